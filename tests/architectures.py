"""Architectures of transformers at tiny size, one of each kind: (model, example inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo import distinct

Example = tuple[nn.Module, dict[str, Any]]


def tokens(length: int = 7, vocabulary: int = 99) -> Tensor:
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def build(config: Any, **inputs: Tensor) -> Example:
    """Build a model without a cache, so that a plain export works too: it takes tensors only."""
    torch.manual_seed(0)
    for part in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()))):
        part.use_cache = False
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return distinct(model.eval()), inputs


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXT = {**SMALL, "vocab_size": 99, "max_position_embeddings": 32}
SMALL_PAIR = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
"""An encoder and a decoder."""


def bert() -> Example:
    return build(
        transformers.BertConfig(**TEXT),
        input_ids=tokens(),
        attention_mask=torch.ones(1, 7, dtype=torch.long),
    )


def distilbert() -> Example:
    config = transformers.DistilBertConfig(
        dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=99, max_position_embeddings=32
    )
    return build(config, input_ids=tokens())


def gpt2() -> Example:
    return build(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=99, n_positions=32),
        input_ids=tokens(),
    )


def llama() -> Example:
    return build(transformers.LlamaConfig(**TEXT, num_key_value_heads=1), input_ids=tokens())


def t5() -> Example:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=99
    )
    return build(config, input_ids=tokens(), decoder_input_ids=tokens(4))


def bart() -> Example:
    config = transformers.BartConfig(
        **SMALL_PAIR,
        vocab_size=99,
        max_position_embeddings=32,
    )
    return build(config, input_ids=tokens(), decoder_input_ids=tokens(4))


def vit() -> Example:
    return build(
        transformers.ViTConfig(**SMALL, image_size=16, patch_size=8),
        pixel_values=noise(1, 3, 16, 16),
    )


def swin() -> Example:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    return build(config, pixel_values=noise(1, 3, 32, 32))


def resnet() -> Example:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_channels=3
    )
    return build(config, pixel_values=noise(1, 3, 32, 32))


def convnext() -> Example:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2)
    return build(config, pixel_values=noise(1, 3, 32, 32))


def wav2vec2() -> Example:
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return build(config, input_values=noise(1, 400))


def whisper() -> Example:
    config = transformers.WhisperConfig(
        **SMALL_PAIR,
        vocab_size=99,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return build(config, input_features=noise(1, 8, 40), decoder_input_ids=tokens(4))


def mamba() -> Example:
    config = transformers.MambaConfig(
        hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=99
    )
    return build(config, input_ids=tokens())


def clip() -> Example:
    text = {**TEXT, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text,
        vision_config={**SMALL, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    return build(
        config,
        input_ids=tokens(),
        pixel_values=noise(1, 3, 16, 16),
        attention_mask=torch.ones(1, 7, dtype=torch.long),
    )


def segformer() -> Example:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    return build(config, pixel_values=noise(1, 3, 32, 32))


ARCHITECTURES: dict[str, Callable[[], Example]] = {
    factory.__name__: factory
    for factory in (
        bert,
        distilbert,
        gpt2,
        llama,
        t5,
        bart,
        vit,
        swin,
        resnet,
        convnext,
        wav2vec2,
        whisper,
        mamba,
        clip,
        segformer,
    )
}
