"""One step of generation with the architectures that keep a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES

KEYS = [f"past_key_values.layers.{n}.{kind}" for n in (0, 1) for kind in ("keys", "values")]
"""The tensors of the cache of a decoder with two layers."""


def decode_step(name: str, mask: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model, and the inputs of one step of generation: a token, and a cache of others."""
    model, inputs = ARCHITECTURES[name]()
    tokens = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if tokens == "input_ids":
        model.config.use_cache = True
    else:
        inputs["use_cache"] = True
    with torch.no_grad():
        output = model(**inputs)
    field = next(field for field, value in output.items() if not isinstance(value, Tensor))
    if mask:
        inputs["attention_mask"] = torch.ones(1, inputs[tokens].shape[1] + 1, dtype=torch.long)
    return model, {**inputs, tokens: inputs[tokens][:, -1:], field: output[field]}
