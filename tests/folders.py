"""Small Hugging Face folders of every kind, with the processors of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from architectures import SMALL, SMALL_PAIR

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    ",",
    *[
        "every",
        "node",
        "of",
        "this",
        "graph",
        "belongs",
        "to",
        "a",
        "module",
        "and",
        "that",
        "ran",
        "is",
    ],
]
TEXT = {**SMALL, "vocab_size": len(WORDS), "max_position_embeddings": 64}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
Saved = tuple[PreTrainedModel, list[Any]]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="[CLS]",
        eos_token="[SEP]",
    )


def text_encoder() -> Saved:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)), [tokenizer()]


def text_decoder() -> Saved:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1)), [
        tokenizer()
    ]


def encoder_decoder() -> Saved:
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=len(WORDS),
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), [tokenizer()]


def vision() -> Saved:
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE)), [processor]


def audio() -> Saved:
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        vocab_size=len(WORDS),
    )
    return transformers.Wav2Vec2ForCTC(config), [transformers.Wav2Vec2FeatureExtractor()]


def speech() -> Saved:
    config = transformers.WhisperConfig(
        **SMALL_PAIR,
        vocab_size=len(WORDS),
        max_source_positions=50,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
    )
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1)
    return transformers.WhisperForConditionalGeneration(config), [extractor]


def text_and_image() -> Saved:
    text = {**TEXT, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=8)
    image = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return transformers.CLIPModel(config), [transformers.CLIPProcessor(image, tokenizer())]


KINDS: dict[str, Callable[[], Saved]] = {
    make.__name__: make
    for make in (text_encoder, text_decoder, encoder_decoder, vision, audio, speech, text_and_image)
}


def save(kind: str, folder: Path, *, with_processors: bool = True) -> Path:
    """Save a model and its processors into a folder with `save_pretrained`."""
    torch.manual_seed(0)
    model, processors = KINDS[kind]()
    model.save_pretrained(folder)
    for processor in processors if with_processors else ():
        processor.save_pretrained(folder)
    return folder
