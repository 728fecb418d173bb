"""Tiny models of transformers that generate, one of each kind, with the inputs of `generate`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import modelexport
from exports import shared_folder
from folders import WORDS, tokenizer
from proof import model_unchanged

VOCABULARY = len(WORDS)
IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **IDS,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
UNTIED = {"head_dim": 8, "tie_word_embeddings": False}
SPLIT = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY,
    **IDS,
    "decoder_start_token_id": 2,
}
LINKED = {
    "mamba_d_state": 8,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64, **IDS
    ),
    "t5": lambda: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    ),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, **UNTIED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 6}, sliding_window=8, **UNTIED
    ),
    "moshi": lambda: transformers.MoshiConfig(
        **GROUPED, head_dim=8, ffn_dim=64, sliding_window=8, num_codebooks=2, audio_vocab_size=8
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, vocab_size=VOCABULARY, max_position_embeddings=64, **IDS,
    ),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
    "minimax": lambda: transformers.MiniMaxConfig(
        **GROUPED, head_dim=8, layer_types=["full_attention", "linear_attention"],
        num_local_experts=4, num_experts_per_tok=2,
    ),
    "mamba": lambda: transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCABULARY, **IDS
    ),
    "jamba": lambda: transformers.JambaConfig(**{**GROUPED, "num_hidden_layers": 4}, **LINKED),
    "bart": lambda: transformers.BartConfig(**SPLIT, max_position_embeddings=64),
    "whisper": lambda: transformers.WhisperConfig(
        **SPLIT, num_mel_bins=8, max_source_positions=20, max_target_positions=64
    ),
}  # fmt: skip
"""The configuration of each model; the first three are in `make test`, all in `make generation`."""
ALWAYS = 3
NOISE = {"t5": 1.3, "gpt2": 0.6}
"""How far weights are from their usual random values, where the tokens would be all the same."""
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            number >= ALWAYS and "ALL_GENERATION" not in os.environ, reason="make generation"
        ),
    )
    for number, name in enumerate(CONFIGS)
]
AUTO = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
)
"""With an encoder first: the decoders of BART and Whisper alone are causal models as well."""


def build(name: str) -> Any:
    """Build a model with weights that give different tokens, always the same."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    auto = next(
        found
        for found in (getattr(transformers, one) for one in AUTO)
        if type(config) in found._model_mapping
    )
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += NOISE.get(name, 0.3) * torch.randn(parameter.shape)
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")  # as the command line does
    return model


def prompt(model: Any, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of `generate`: tokens without special ones, or the features of a sound."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_ids":
        tokens = torch.randint(4, VOCABULARY, (1, length), generator=generator)
        return {"input_ids": tokens}
    shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    return {model.main_input_name: torch.randn(shape, generator=generator)}


def exported(name: str, max_cache_length: int | None = None) -> Path:
    """Return the generation file of a model, exported once a run."""

    def fill(folder: Path) -> None:
        model = build(name)
        tokenizer().save_pretrained(folder / "tokenizer")
        with model_unchanged(model):
            modelexport.export_generation(
                model,
                prompt(model),
                folder / "m",
                tokenizer=folder / "tokenizer",
                max_cache_length=max_cache_length,
            )

    key = name if max_cache_length is None else f"{name}-{max_cache_length}"
    return shared_folder(f"generation-{key}", fill) / "m_generation.json"
