"""Find the axes of inputs that can change, in groups that change together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from modelexport.capture.inputs import ModelInputs, can_run, check_model_runs, parse_inputs
from modelexport.capture.module_tree import named_args
from modelexport.errors import SourceError
from modelexport.source.example_inputs import (
    ExampleInputs,
    named_tensors,
    replace_tensors,
    resize_axis,
)

Axes = dict[str, dict[int, str]]
"""The labels of symbolic axes, by input name and axis."""
AxisGroup = list[tuple[str, int]]
"""Inputs, and an axis of each: these axes have the same size and change together."""
GroupedInputs = tuple[ModelInputs, dict[str, AxisGroup]]
"""Inputs of at least two along each dynamic axis, and the groups of axes by label."""


def pass_by_name(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Pass all inputs by name: both exporters take axes by name.

    Args:
        model: The model that takes the inputs.
        inputs: The inputs.

    Returns:
        The same values as keywords.

    Raises:
        SourceError: If a positional input has no name.
    """
    names = list(named_args(model))
    if len(inputs.args) > len(names):
        raise SourceError(
            f"{type(model).__name__}.forward takes inputs without a name",
            hint="dynamic axes go by the inputs' names",
        )
    return ModelInputs((), {**dict(zip(names, inputs.args, strict=False)), **inputs.kwargs})


def group_axes(axes: Axes) -> dict[str, AxisGroup]:
    """Group axes by label.

    Args:
        axes: Labels by input and axis.

    Returns:
        The groups by label.
    """
    groups: dict[str, AxisGroup] = {}
    for name, labels in axes.items():
        for axis, label in labels.items():
            groups.setdefault(label, []).append((name, axis))
    return groups


def ungroup_axes(groups: Mapping[str, AxisGroup]) -> Axes:
    """List the axes of labelled groups by input, the inverse of `group_axes`.

    Args:
        groups: The groups by label.

    Returns:
        Labels by input and axis.
    """
    axes: Axes = {}
    for label, group in groups.items():
        for name, axis in group:
            axes.setdefault(name, {})[axis] = label
    return axes


def complete_groups(model: nn.Module, inputs: ModelInputs, axes: Axes) -> GroupedInputs:
    """Check the axes that a user names, and add those that have to change with them.

    Args:
        model: The model.
        inputs: Its inputs, by name.
        axes: The axes that the user names.

    Returns:
        The inputs and the complete groups.

    Raises:
        SourceError: If there is no such input or axis.
    """
    tensors = named_tensors(model, inputs)
    for name, labels in axes.items():
        if name not in tensors:
            raise SourceError(
                f"--dynamic-axes names {name!r}, which is no input",
                hint=f"there is {', '.join(tensors)}",
            )
        for axis in labels:
            if not 0 <= axis < tensors[name].dim():
                raise SourceError(
                    f"--dynamic-axes names axis {axis} of {name}, "
                    f"which has {tensors[name].dim()} axes",
                    hint="axes count from 0",
                )
    groups = group_axes(axes)
    for label, group in groups.items():
        inputs, groups[label] = _complete_group(model, inputs, group)
    return inputs, groups


def _complete_group(
    model: nn.Module, inputs: ModelInputs, group: AxisGroup
) -> tuple[ModelInputs, AxisGroup]:
    """Add the axes that have to change with a group for the model to run at another size.

    Those are axes of inputs with the same shape, as a mask and its tokens have; if that does not
    work, of inputs with the same size there.
    """
    tensors = named_tensors(model, inputs)
    name, axis = group[0]
    shape = tensors[name].shape
    free = {other: tensor for other, tensor in tensors.items() if (other, axis) not in group}
    same_shape = [(other, axis) for other, tensor in free.items() if tensor.shape == shape]
    same_size = [
        (other, axis)
        for other, tensor in free.items()
        if tensor.dim() > axis and tensor.shape[axis] == shape[axis]
    ]
    for added in (same_shape, [], same_size):
        larger = _resize_group(model, inputs, [*group, *added], shape[axis] + 1)
        if can_run(model, larger):
            return inputs if shape[axis] > 1 else larger, [*group, *added]
    return inputs, group


def find_groups(model: nn.Module, inputs: ModelInputs, example: ExampleInputs) -> GroupedInputs:
    """Find axes by what changes in inputs of another size, or else by trying.

    Args:
        model: The model.
        inputs: Its inputs, by name.
        example: The same inputs, with the way to make them at another size if there is one.

    Returns:
        The inputs and the groups, of which there may be none.

    Raises:
        ModelRunError: If the model does not run on the inputs.
    """
    if example.other_size is not None:
        other = pass_by_name(model, parse_inputs(example.other_size()))
        groups = _differing_axes(named_tensors(model, inputs), named_tensors(model, other))
        if groups and can_run(model, other):
            return other, _label(groups)
    check_model_runs(model, inputs)
    groups = []
    for candidate in _candidate_groups(named_tensors(model, inputs)):
        if any(axis in group for group in groups for axis in candidate):
            continue
        name, axis = candidate[0]
        size = named_tensors(model, inputs)[name].shape[axis]
        for larger in at_other_sizes(model, inputs, candidate):
            if can_run(model, larger):
                groups.append(candidate)
                inputs = larger if size < 2 else inputs
                break
    return inputs, _label(groups)


def _differing_axes(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> list[AxisGroup]:
    """Find the axes whose sizes differ; those that change in the same way are one group."""
    groups: dict[tuple[bool, int, int], AxisGroup] = {}
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.dim() != tensor.dim():
            continue
        for axis, (before, after) in enumerate(zip(tensor.shape, other.shape, strict=True)):
            if before != after:
                groups.setdefault((axis == 0, before, after), []).append((name, axis))
    return list(groups.values())


def _candidate_groups(tensors: Mapping[str, torch.Tensor]) -> list[AxisGroup]:
    """List groups to try: axes of one size at one position, then all of one size, then single."""
    by_position: dict[tuple[int, int], AxisGroup] = {}
    by_size: dict[int, AxisGroup] = {}
    single: list[AxisGroup] = []
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            by_position.setdefault((axis, size), []).append((name, axis))
            by_size.setdefault(size, []).append((name, axis))
            single.append([(name, axis)])
    groups = (*by_position.values(), *by_size.values(), *single)
    return [list(group) for group in dict.fromkeys(map(tuple, groups))]


def at_other_sizes(
    model: nn.Module, inputs: ModelInputs, group: AxisGroup
) -> Iterator[ModelInputs]:
    """Resize a group of axes to one more, and to one less: there may be a largest size.

    Args:
        model: The model.
        inputs: Its inputs.
        group: The axes to resize.

    Returns:
        The resized inputs, made one after the other.
    """
    name, axis = group[0]
    size = named_tensors(model, inputs)[name].shape[axis]
    return (_resize_group(model, inputs, group, size + step) for step in (1, -1) if size + step > 1)


def _resize_group(
    model: nn.Module, inputs: ModelInputs, group: AxisGroup, size: int
) -> ModelInputs:
    """Resize a group of axes."""
    tensors = named_tensors(model, inputs)
    for name, axis in group:
        tensors[name] = resize_axis(tensors[name], axis, size)
    return replace_tensors(model, inputs, tensors)


def _label(groups: Iterable[AxisGroup]) -> dict[str, AxisGroup]:
    """Label first axes `batch`, the first other group `sequence`, and others by input and axis."""
    labelled: dict[str, AxisGroup] = {}
    for group in groups:
        name, axis = group[0]
        usual = "batch" if all(axis == 0 for _, axis in group) else "sequence"
        labelled[f"{name}_{axis}" if usual in labelled else usual] = group
    return labelled
