"""Gives example inputs other shapes, with values that stay within their range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from modelexport.baseline.calling import ModelInputs
from modelexport.errors import SourceError
from modelexport.hierarchy.capture import forward_args
from modelexport.source.specs import InputSpec, cannot_make, make_tensor, shape_text


def named_tensors(model: nn.Module, inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """The tensors among the inputs by the names of forward's arguments."""
    positional = dict(zip(forward_args(model), inputs.args, strict=False))
    return {name: value for name, value in {**positional, **inputs.kwargs}.items() if isinstance(value, torch.Tensor)}


def with_tensors(model: nn.Module, inputs: ModelInputs, changed: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The inputs with other tensors in some places."""
    names = list(forward_args(model))
    args = tuple(
        changed.get(names[place], value) if place < len(names) else value for place, value in enumerate(inputs.args)
    )
    return ModelInputs(args, {name: changed.get(name, value) for name, value in inputs.kwargs.items()})


def resize_inputs(
    model: nn.Module, inputs: ModelInputs, shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator
) -> ModelInputs:
    """The inputs at the shapes asked for; a shape under the empty name is the main input's.

    An input of the same shape as a changed one changes with it (a mask with its tokens), and one
    of the same batch size takes the new batch size.
    """
    tensors = named_tensors(model, inputs)
    wanted = {_name(model, tensors, name): shape for name, shape in shapes.items()}
    changed: dict[str, torch.Tensor] = {}
    for name, shape in wanted.items():
        before = tensors[name].shape
        changed[name] = _resized(tensors[name], shape, generator)
        for other, tensor in tensors.items():
            if other in wanted or other in changed or not shape:
                continue
            if tensor.shape == before:
                changed[other] = _resized(tensor, shape, generator)
            elif tensor.dim() and before and tensor.shape[0] == before[0] != shape[0]:
                changed[other] = _resized(tensor, (shape[0], *tensor.shape[1:]), generator)
    return with_tensors(model, inputs, changed)


def _name(model: nn.Module, tensors: Mapping[str, Any], name: str) -> str:
    if not tensors:
        raise SourceError("there is no input to give a shape to: none is a tensor by itself", hint="use --input-specs")
    if name and name not in tensors:
        raise SourceError(f"there is no input {name!r} to give a shape to", hint=f"there is {', '.join(tensors)}")
    if name:
        return name
    main = getattr(model, "main_input_name", None)
    return main if isinstance(main, str) and main in tensors else next(iter(tensors))


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The same values, repeated or cut along each axis; new ones of the same range for another rank."""
    if tensor.dim() != len(shape) or not tensor.numel():
        if not tensor.is_floating_point():
            raise SourceError(
                f"the shape {shape_text(shape)} does not fit an input of shape {shape_text(tensor.shape)}",
                hint="give as many sizes as the input has axes",
            )
        return make_tensor(InputSpec(shape, str(tensor.dtype).removeprefix("torch.")), generator)
    try:
        for axis, size in enumerate(shape):
            tensor = resized_along(tensor, axis, size)
    except (RuntimeError, MemoryError) as error:
        raise cannot_make(shape, str(tensor.dtype).removeprefix("torch."), error) from error
    return tensor


def resized_along(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The same values, repeated or cut along one axis."""
    return tensor.index_select(axis, torch.arange(size) % tensor.shape[axis]).contiguous()
