"""Outputs of the model: keep the tensors, and name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelexport.capture.inputs import holds_tensor
from modelexport.errors import ArgumentError


class OutputFilter:
    """A forward hook for the root that drops what is not a tensor and notes the outputs' names.

    `names` is passed to torch before the model runs, and filled when it does: torch reads it only
    after the capture, so no extra forward pass is needed to know the names.
    """

    def __init__(self, taken: Sequence[str] = (), may_be_numbers: bool = True) -> None:
        """Start without names.

        Args:
            taken: The names of the inputs, which no output may have.
            may_be_numbers: Whether an output may have a number as its name.
        """
        self.names: list[str] = []
        self.dropped: list[str] = []
        """The name and the type of each dropped output."""
        self._taken = set(taken)
        self._may_be_numbers = may_be_numbers

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return what is left of an output; None if nothing was changed."""
        self.dropped = []
        fields = _named_fields(output)
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if _is_exportable(value):
                kept[name] = value
            else:
                self.dropped.append(f"{name}: {type(value).__name__}")
        if not any(holds_tensor(value) for value in kept.values()):
            raise ArgumentError(
                f"the model returns no tensor ({type(output).__name__})",
                hint="an ONNX graph needs at least one tensor output; "
                "wrap the model so that it returns one",
            )
        if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
            self.names[:] = unique_names(map(self._legal, _flat_names(kept)), self._taken)
        if self.dropped or not isinstance(output, torch.Tensor | Mapping | tuple | list):
            return tuple(value for value in kept.values() if value is not None)
        return None

    def _legal(self, name: str) -> str:
        """Return a valid name: ONNX has no empty names, and torch.jit none that are numbers."""
        if not name:
            return "output"
        return name if self._may_be_numbers or not name.isdecimal() else f"output_{name}"


def unique_names(names: Iterable[str], taken: Set[str]) -> list[str]:
    """Make names unique by adding numbers.

    Args:
        names: The names.
        taken: Other names that they must differ from.

    Returns:
        The names in the same order.
    """
    used = set(taken)
    unique = []
    for name in names:
        candidate, number = name, 1
        while candidate in used:
            candidate, number = f"{name}_{number}", number + 1
        used.add(candidate)
        unique.append(candidate)
    return unique


def _named_fields(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if isinstance(output, tuple | list):
        return {str(position): value for position, value in enumerate(output)}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {"output": output}


def _is_exportable(value: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, tuple | list):
        return all(_is_exportable(item) for item in value)
    return isinstance(value, dict) and all(_is_exportable(item) for item in value.values())


def _flat_names(fields: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif isinstance(value, Mapping):
            names.extend(f"{name}_{inner}" for inner in _flat_names(value))
        elif isinstance(value, tuple | list):
            names.extend(f"{name}_{inner}" for inner in _flat_names(_named_fields(value)))
    return names


@contextmanager
def filter_outputs(
    model: nn.Module, taken: Sequence[str] = (), may_be_numbers: bool = True
) -> Iterator[OutputFilter]:
    """Let the model return tensors only while the block runs.

    Args:
        model: The model.
        taken: The names of its inputs, which no output may have.
        may_be_numbers: Whether an output may have a number as its name.

    Yields:
        The names and what was dropped, once the model has run.
    """
    output_filter = OutputFilter(taken, may_be_numbers)
    # A compiled module takes no hooks, and can return nothing but tensors.
    if isinstance(model, torch.jit.ScriptModule):
        yield output_filter
        return
    handle = model.register_forward_hook(output_filter)
    try:
        yield output_filter
    finally:
        handle.remove()
