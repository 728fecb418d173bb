"""Decides which axes of the inputs become symbolic, without knowing the model.

An axis is dynamic if the model runs with another size there: the processor says so by itself
when it is fed something longer; where there is none, the model is tried at other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.baseline.calling import ModelInputs, as_called, can_run, check_runs, read_inputs
from modelexport.errors import SourceError
from modelexport.hierarchy.capture import named_args
from modelexport.source.inputs import Example
from modelexport.source.resize import named_tensors, resized_along, with_tensors

Axes = dict[str, dict[int, str]]
_Place = tuple[str, int]


class DynamicInputs(NamedTuple):
    """Inputs to export with, by name, and the names of their symbolic axes."""

    inputs: dict[str, Any]
    axes: Axes


def dynamic_inputs(model: nn.Module, example: Example) -> DynamicInputs:
    """Inputs of at least two along each dynamic axis, since torch takes a size of one to be fixed."""
    inputs = by_name(model, as_called(model, read_inputs(example.inputs)))
    if example.other_size is not None:
        other = by_name(model, read_inputs(example.other_size()))
        groups = list(_differing(named_tensors(model, inputs), named_tensors(model, other)))
        if groups and can_run(model, other):
            return DynamicInputs(other.kwargs, _named(groups))
    return _tried(model, inputs)


def set_axes(model: nn.Module, example: Example, axes: Axes) -> DynamicInputs:
    """The axes that a user named, checked against the inputs."""
    inputs = by_name(model, as_called(model, read_inputs(example.inputs)))
    tensors = named_tensors(model, inputs)
    for name, named in axes.items():
        if name not in tensors:
            raise SourceError(
                f"--dynamic-axes names {name!r}, which is no input", hint=f"there is {', '.join(tensors)}"
            )
        for axis in named:
            if not 0 <= axis < tensors[name].dim():
                raise SourceError(
                    f"--dynamic-axes names axis {axis} of {name}, which has {tensors[name].dim()} axes",
                    hint="axes count from 0",
                )
    groups = places_of(axes)
    for places in groups.values():
        inputs = _grown_by_hand(model, inputs, places)
    return DynamicInputs(inputs.kwargs, _axes_of(groups))


def places_of(axes: Axes) -> dict[str, list[_Place]]:
    """The inputs and axes that share each label."""
    groups: dict[str, list[_Place]] = {}
    for name, named in axes.items():
        for axis, label in named.items():
            groups.setdefault(label, []).append((name, axis))
    return groups


def _axes_of(groups: Mapping[str, list[_Place]]) -> Axes:
    axes: Axes = {}
    for label, places in groups.items():
        for name, axis in places:
            axes.setdefault(name, {})[axis] = label
    return axes


def _grown_by_hand(model: nn.Module, inputs: ModelInputs, places: list[_Place]) -> ModelInputs:
    """Inputs of at least two along an axis; what has to change with it is added to its places.

    That is what has the same shape, as a mask and its tokens do; if need be, what has the same size there.
    """
    tensors = named_tensors(model, inputs)
    name, axis = places[0]
    shape = tensors[name].shape
    free = {other: tensor for other, tensor in tensors.items() if (other, axis) not in places}
    alike = [(other, axis) for other, tensor in free.items() if tensor.shape == shape]
    as_large = [(other, axis) for other, t in free.items() if t.dim() > axis and t.shape[axis] == shape[axis]]
    for others in (alike, [], as_large):
        larger = _grown(model, inputs, [*places, *others], shape[axis] + 1)
        if can_run(model, larger):
            places += others
            return inputs if shape[axis] > 1 else larger
    return inputs


def by_name(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Positional inputs by the names of forward's arguments: both exporters take axes by name."""
    names = list(named_args(model))
    if len(inputs.args) > len(names):
        raise SourceError(
            f"{type(model).__name__}.forward takes inputs without a name", hint="dynamic axes go by the inputs' names"
        )
    return ModelInputs((), {**dict(zip(names, inputs.args, strict=False)), **inputs.kwargs})


def _differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> Iterator[list[_Place]]:
    """The axes whose sizes differ, those that change together in one group."""
    groups: dict[tuple[bool, int, int], list[_Place]] = {}
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.dim() != tensor.dim():
            continue
        for axis, (before, after) in enumerate(zip(tensor.shape, other.shape, strict=True)):
            if before != after:
                groups.setdefault((axis == 0, before, after), []).append((name, axis))
    yield from groups.values()


def _tried(model: nn.Module, inputs: ModelInputs) -> DynamicInputs:
    """Grow each group of axes that may belong together, and keep those with which the model still runs."""
    check_runs(model, inputs)
    found: list[list[_Place]] = []
    for places in _candidates(named_tensors(model, inputs)):
        if any(place in group for group in found for place in places):
            continue
        name, axis = places[0]
        size = named_tensors(model, inputs)[name].shape[axis]
        larger = next((other for other in at_other_sizes(model, inputs, places) if can_run(model, other)), None)
        if larger is None:
            continue
        found.append(places)
        if size < 2:
            inputs = larger
    return DynamicInputs(inputs.kwargs, _named(found))


def _candidates(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[_Place]]:
    """Axes at the same position with the same size go together; failing that all of the same size, or one alone."""
    at_position: dict[tuple[int, int], list[_Place]] = {}
    by_size: dict[int, list[_Place]] = {}
    alone: list[list[_Place]] = []
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            at_position.setdefault((axis, size), []).append((name, axis))
            by_size.setdefault(size, []).append((name, axis))
            alone.append([(name, axis)])
    seen: list[list[_Place]] = []
    for places in (*at_position.values(), *by_size.values(), *alone):
        if places not in seen:
            seen.append(places)
            yield places


def at_other_sizes(model: nn.Module, inputs: ModelInputs, places: list[_Place]) -> Iterator[ModelInputs]:
    """The inputs one larger along an axis, and one smaller: there may be a largest size."""
    name, axis = places[0]
    size = named_tensors(model, inputs)[name].shape[axis]
    return (_grown(model, inputs, places, size + step) for step in (1, -1) if size + step > 1)


def _grown(model: nn.Module, inputs: ModelInputs, places: list[_Place], size: int) -> ModelInputs:
    tensors = dict(named_tensors(model, inputs))
    for name, axis in places:
        tensors[name] = resized_along(tensors[name], axis, size)
    return with_tensors(model, inputs, tensors)


def _named(groups: list[list[_Place]]) -> Axes:
    """`batch` for first axes, `sequence` for the first other group, then by the input and the axis."""
    labelled: dict[str, list[_Place]] = {}
    for places in groups:
        name, axis = places[0]
        usual = "batch" if all(place[1] == 0 for place in places) else "sequence"
        labelled[f"{name}_{axis}" if usual in labelled else usual] = places
    return _axes_of(labelled)
