"""Make the inputs of a model's `generate`, and find its tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelexport.capture.inputs import bind_inputs, name_inputs, parse_inputs
from modelexport.errors import SourceError
from modelexport.option_values import spell_option
from modelexport.source.example_inputs import InputRequest, make_example_inputs
from modelexport.source.huggingface import find_processors
from modelexport.source.load import LoadedModel

_OF_THE_DECODER = "decoder_"
"""How arguments of `forward` begin that `generate` makes itself."""


def make_generation_inputs(
    source: LoadedModel, wanted: InputRequest, seed: int
) -> tuple[dict[str, torch.Tensor], str]:
    """Make the inputs of a model's `generate`, and say where they come from.

    Raises:
        SourceError: The model has no `generate`, or there are no inputs.
    """
    model: Any = source.model
    if not isinstance(model, nn.Module) or not getattr(model, "can_generate", bool)():
        hint = "return a model of transformers with a language-model head"
        if source.hub is not None:
            hint = f"load a language-model head, as with {spell_option('task')} text-generation"
        raise SourceError(
            f"{source.name} does not generate text: {type(model).__name__} has no `generate`",
            hint=hint,
        )
    example = make_example_inputs(source, wanted, seed)
    named = name_inputs(model, bind_inputs(model, parse_inputs(example.inputs)))
    inputs = {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and not name.startswith(_OF_THE_DECODER)
    }
    return inputs, example.origin


def find_tokenizer(source: LoadedModel) -> str | None:
    """Return the folder, or the name on the hub, of the tokenizer that comes with a model."""
    if source.hub is None or find_processors(source.hub).tokenizer is None:
        return None
    return source.hub.name
