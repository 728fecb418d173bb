"""Example inputs: read what the caller passes, and pass it as the exporter takes it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from modelexport.capture.failure import model_run_error
from modelexport.capture.model_state import check_has_weights, preserve_model, silence_torch
from modelexport.capture.module_tree import forward_args
from modelexport.errors import ArgumentTypeError, describe_type


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Example inputs, as positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool = True
    """Whether keyword inputs are to be called by their keys."""

    @property
    def for_torch(self) -> tuple[Any, ...]:
        """The positional ones as torch.onnx.export takes them: it would take a dict at their end for keywords."""
        return (*self.args, {}) if self.args and isinstance(self.args[-1], dict) else self.args

    @property
    def names(self) -> list[str] | None:
        """The names of keyword inputs; None where torch is to choose its own."""
        if not self.named or not self.kwargs or self.args:
            return None
        if any(
            not isinstance(value, torch.Tensor) and _holds_tensor(value)
            for value in self.kwargs.values()
        ):
            return None
        return [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]


def parse_inputs(example_inputs: object) -> ModelInputs:
    """A tensor, a tuple of positional inputs or a dict of keyword inputs, checked; `as_called` takes a tuple apart."""
    hint = "pass a tensor, a tuple of positional inputs, a dict of keyword inputs, or a tuple that ends in such a dict"
    if isinstance(example_inputs, torch.Tensor):
        return ModelInputs((example_inputs,), {})
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
        wrong = [key for key in kwargs if not isinstance(key, str)]
        if wrong:
            raise ArgumentTypeError(
                f"example_inputs has the key {wrong[0]!r}, which is not an argument name", hint=hint
            )
        inputs = ModelInputs((), kwargs)
    elif isinstance(example_inputs, tuple | list):
        inputs = ModelInputs(tuple(example_inputs), {})
    else:
        raise ArgumentTypeError(f"example_inputs is {describe_type(example_inputs)}", hint=hint)
    for name, value in (*enumerate(inputs.args), *inputs.kwargs.items()):
        if not _is_input(value):
            raise ArgumentTypeError(
                f"example input {name!r} is {describe_type(value)}",
                hint="inputs are tensors, or plain constants that stay fixed; convert arrays with torch.as_tensor",
            )
    return inputs


def bind_inputs(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Read positional inputs that end in a dict as torch's exporters do: it holds keywords, if it can.

    The others may stand in a tuple of their own, `((a,), {"b": b})`. Where forward could take that tuple as an
    argument as well, it does if the model runs so.
    """
    last = inputs.args[-1] if inputs.args else None
    if not isinstance(last, dict) or not all(isinstance(name, str) for name in last):
        return inputs
    flat = ModelInputs(inputs.args[:-1], last, named=False)
    ways = [way for way in (flat, *_nested(flat)) if _fits(model, way)]
    if len(ways) > 1 and not can_run(model, ways[0]):
        return ways[1]
    return ways[0] if ways else inputs


def _nested(flat: ModelInputs) -> Iterator[ModelInputs]:
    if len(flat.args) == 1 and isinstance(flat.args[0], tuple | list):
        yield dataclasses.replace(flat, args=tuple(flat.args[0]))


def _fits(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether the model's forward takes inputs of this number and these names."""
    try:
        inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return False
    return True


def in_signature_order(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Keyword inputs in the order of forward's arguments, in which torch.jit traces them."""
    rank = {name: place for place, name in enumerate(forward_args(model))}
    ordered = sorted(inputs.kwargs.items(), key=lambda item: rank.get(item[0], len(rank)))
    return dataclasses.replace(inputs, kwargs=dict(ordered))


def _is_input(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_input(item) for item in value.values())
    if isinstance(value, tuple | list):
        return all(_is_input(item) for item in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _holds_tensor(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, tuple | list) and any(_holds_tensor(item) for item in value)


def keyword_shim(model: nn.Module, names: Sequence[str], constants: Mapping[str, Any]) -> None:
    """Rebind `forward` to take the named inputs by position; `preserved` puts the old one back."""
    original = model.forward

    def forward(*tensors: Any) -> Any:
        return original(**dict(zip(names, tensors, strict=True)), **constants)

    model.forward = forward


def run_model(model: nn.Module, inputs: ModelInputs) -> Any:
    """What the model itself gives for these inputs; it is left as it was."""
    with silence_torch(verbose=False), preserve_model(model), torch.no_grad():
        return model(*inputs.args, **inputs.kwargs)


def can_run(model: nn.Module, inputs: ModelInputs) -> bool:
    try:
        run_model(model, inputs)
    except Exception:
        return False
    return True


def check_model_runs(model: nn.Module, inputs: ModelInputs) -> None:
    """Raise if the model itself does not run on these inputs."""
    check_has_weights(model)
    try:
        run_model(model, inputs)
    except Exception as error:
        raise model_run_error(error) from error
