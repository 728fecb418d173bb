"""Makes example inputs for a model: from text through its tokenizer, from a shape, or its own dummies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelexport.errors import SourceError
from modelexport.hierarchy.capture import forward_args
from modelexport.source.load import Source, import_transformers

DEFAULT_TEXT = "every node of this graph belongs to a module"


def example_inputs(source: Source, text: str | None, shape: Sequence[int] | None, seed: int) -> Any:
    """The inputs to export with; what the factory returned, unless a text or a shape is asked for."""
    if source.inputs is not None and text is None and shape is None:
        return source.inputs
    if source.folder is not None and (tokenizer := _tokenizer(source.folder)) is not None:
        return _accepted(source.model, _tokenize(tokenizer, text or DEFAULT_TEXT, shape))
    if text is not None:
        raise SourceError("there is no tokenizer to read --input-text with", hint="use --input-shape")
    if shape is not None:
        return _of_shape(source.model, shape, seed)
    dummies = getattr(source.model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and (accepted := _accepted(source.model, dummies)):
        return accepted
    raise SourceError(
        f"no example inputs for {type(source.model).__name__}.forward{inspect.signature(source.model.forward)}",
        hint="use --input-shape, or a factory that returns the model and its inputs",
    )


def _tokenizer(folder: str) -> Any | None:
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None


def _tokenize(tokenizer: Any, text: str, shape: Sequence[int] | None) -> Mapping[str, Any]:
    if shape is None:
        encoded: Mapping[str, Any] = tokenizer([text], return_tensors="pt")
        return encoded
    if len(shape) != 2:
        raise SourceError(f"the shape {','.join(map(str, shape))} is not that of text", hint="pass batch,length")
    batch, length = shape
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    padded: Mapping[str, Any] = tokenizer(
        [text] * batch, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    return padded


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those inputs that the model's forward takes."""
    names = forward_args(model)
    takes_any = any(name.startswith("**") for name in names)
    return {name: value for name, value in inputs.items() if name in names or (takes_any and len(names) == 1)}


def _of_shape(model: nn.Module, shape: Sequence[int], seed: int) -> Any:
    """The main input at this shape: tokens within the vocabulary where the model has one, else noise."""
    generator = torch.Generator().manual_seed(seed)
    name = getattr(model, "main_input_name", None)
    get_config = getattr(getattr(model, "config", None), "get_text_config", None)
    vocabulary = getattr(get_config(), "vocab_size", None) if callable(get_config) else None
    if vocabulary and len(shape) == 2:
        tensor = torch.randint(0, int(vocabulary), tuple(shape), generator=generator)
    else:
        tensor = torch.randn(*shape, generator=generator)
    return {name: tensor} if isinstance(name, str) and name in forward_args(model) else (tensor,)
