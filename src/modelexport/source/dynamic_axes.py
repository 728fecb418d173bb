"""Prepare the inputs of an export, find axes that can be dynamic, and check them in the file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.graph_inputs import as_array
from modelexport.capture.hooks import filter_outputs, flatten_tensors
from modelexport.capture.inputs import (
    ModelInputs,
    bind_inputs,
    can_run,
    check_model_runs,
    parse_inputs,
    run_model,
)
from modelexport.capture.module_tree import named_args
from modelexport.errors import FormatError, ModelRunError, SourceError
from modelexport.option_values import spell_option
from modelexport.report import ExportReport
from modelexport.source.example_inputs import (
    ExampleInputs,
    InputRequest,
    make_example_inputs,
    named_tensors,
    replace_tensors,
    resize_axis,
)
from modelexport.source.load import LoadedModel
from modelexport.verification.records import Array, Tolerance, is_comparable, measure_difference
from modelexport.verification.runtime import OPTIMIZED, Session, import_onnxruntime

_TOLERANCE = 1e-2

Axes = dict[str, dict[int, str]]
"""The labels of symbolic axes, by input name and axis."""
AxisGroup = list[tuple[str, int]]
"""Inputs, and an axis of each: these axes have the same size and change together."""
GroupedInputs = tuple[ModelInputs, dict[str, AxisGroup]]
"""Inputs of at least two along each dynamic axis, and the groups of axes by label."""


class PreparedInputs(NamedTuple):
    """Inputs to export with, their symbolic axes if there are any, and where they come from."""

    inputs: Any
    axes: Axes | None
    origin: str


@contextmanager
def as_input_error(user_chose_inputs: bool) -> Iterator[None]:
    """Raise SourceError for ModelRunError, if options or a factory chose what the model runs on."""
    try:
        yield
    except ModelRunError as error:
        if user_chose_inputs:
            raise SourceError(error.message, hint=error.hint) from error
        raise


def prepare_inputs(
    source: LoadedModel, wanted: InputRequest, dynamic: bool, axes: Axes, seed: int
) -> PreparedInputs:
    """Make the inputs to export a model with, with dynamic axes if the user wants or names them.

    Along a dynamic axis they have at least two elements, since torch takes a size of one as fixed.
    """
    example = make_example_inputs(source, wanted, seed)
    if not dynamic and not axes:
        return PreparedInputs(example.inputs, None, example.origin)
    model = source.model
    if isinstance(model, ExportedProgram):
        raise SourceError(
            f"{source.name} has its shapes in it, fixed or dynamic",
            hint="choose them in torch.export.export",
        )
    inputs = _pass_by_name(model, bind_inputs(model, parse_inputs(example.inputs)))
    if axes:
        inputs, groups = _complete_groups(model, inputs, axes)
    else:
        inputs, groups = _find_groups(model, inputs, example)
    if not groups:
        raise SourceError(
            "no axis can be dynamic: the model runs at no other size than this",
            hint=f"leave {spell_option('dynamic')} out, "
            f"or set axes with {spell_option('dynamic_axes')}",
        )
    return PreparedInputs(inputs.kwargs, _ungroup_axes(groups), example.origin)


def _pass_by_name(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Pass all inputs by name: both exporters take axes by name."""
    names = list(named_args(model))
    if len(inputs.args) > len(names):
        raise SourceError(
            f"{type(model).__name__}.forward takes inputs without a name",
            hint="dynamic axes go by the inputs' names",
        )
    return ModelInputs((), {**dict(zip(names, inputs.args, strict=False)), **inputs.kwargs})


def _group_axes(axes: Axes) -> dict[str, AxisGroup]:
    """Group axes by label."""
    groups: dict[str, AxisGroup] = {}
    for name, labels in axes.items():
        for axis, label in labels.items():
            groups.setdefault(label, []).append((name, axis))
    return groups


def _ungroup_axes(groups: Mapping[str, AxisGroup]) -> Axes:
    """List the axes of labelled groups by input, the inverse of `_group_axes`."""
    axes: Axes = {}
    for label, group in groups.items():
        for name, axis in group:
            axes.setdefault(name, {})[axis] = label
    return axes


def _complete_groups(model: nn.Module, inputs: ModelInputs, axes: Axes) -> GroupedInputs:
    """Check the axes that a user names, and add those that have to change with them."""
    tensors, option = named_tensors(model, inputs), spell_option("dynamic_axes")
    for name, labels in axes.items():
        if name not in tensors:
            raise SourceError(
                f"{option} names {name!r}, which is not an input",
                hint=f"there is {', '.join(tensors)}",
            )
        for axis in labels:
            if not 0 <= axis < tensors[name].dim():
                raise SourceError(
                    f"{option} names axis {axis} of {name}, which has {tensors[name].dim()} axes",
                    hint="axes count from 0",
                )
    groups = _group_axes(axes)
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


def _find_groups(model: nn.Module, inputs: ModelInputs, example: ExampleInputs) -> GroupedInputs:
    """Find axes by what changes in inputs of another size, or else by trying."""
    if example.other_size is not None:
        other = _pass_by_name(model, parse_inputs(example.other_size()))
        groups = _differing_axes(named_tensors(model, inputs), named_tensors(model, other))
        if groups and can_run(model, other):
            return other, _label(groups)
    check_model_runs(model, inputs)
    groups = []
    for candidate in _candidate_groups(named_tensors(model, inputs)):
        if any(axis in group for group in groups for axis in candidate):
            continue
        size = _size_of(model, inputs, candidate)
        for larger in _at_other_sizes(model, inputs, candidate):
            if can_run(model, larger):
                groups.append(candidate)
                inputs = larger if size < 2 else inputs
                break
    return inputs, _label([*groups, *_find_joint_groups(model, inputs, groups)])


def _find_joint_groups(
    model: nn.Module, inputs: ModelInputs, found: Iterable[AxisGroup]
) -> list[AxisGroup]:
    """Find groups of axes of objects that change only if other axes grow by as much.

    That is how a mask over all tokens grows with the cache of those before.
    """
    taken = {axis for group in found for axis in group}
    free = [
        group
        for group in _candidate_groups(named_tensors(model, inputs))
        if taken.isdisjoint(group) and _size_of(model, inputs, group) > 1
    ]
    others = list(itertools.filterfalse(_is_in_objects, free))
    for group, other in itertools.product(filter(_is_in_objects, free), others):
        if any(can_run(model, one) for one in _at_other_sizes(model, inputs, group, other)):
            return [group, other]
    return []


def _is_in_objects(group: AxisGroup) -> bool:
    """Return whether all axes are of tensors in objects: those have a path as their name."""
    return all("." in name for name, _ in group)


def _size_of(model: nn.Module, inputs: ModelInputs, group: AxisGroup) -> int:
    """Return the size along a group of axes."""
    name, axis = group[0]
    return named_tensors(model, inputs)[name].shape[axis]


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


def _at_other_sizes(
    model: nn.Module, inputs: ModelInputs, *groups: AxisGroup
) -> Iterator[ModelInputs]:
    """Resize groups of axes to one more, and to one less: there may be a largest size."""
    sizes = [_size_of(model, inputs, group) for group in groups]
    for step in (1, -1):
        if all(size + step > 1 for size in sizes):
            resized = inputs
            for group, size in zip(groups, sizes, strict=True):
                resized = _resize_group(model, resized, group, size + step)
            yield resized


def _resize_group(
    model: nn.Module, inputs: ModelInputs, group: AxisGroup, size: int
) -> ModelInputs:
    """Resize a group of axes."""
    tensors = named_tensors(model, inputs)
    for name, axis in group:
        tensors[name] = resize_axis(tensors[name], axis, size)
    return replace_tensors(model, inputs, tensors)


def _label(groups: Iterable[AxisGroup]) -> dict[str, AxisGroup]:
    """Label first axes `batch`, the first other group `sequence`, and others by input and axis.

    Axes of objects are labelled by the argument that is the object.
    """
    labelled: dict[str, AxisGroup] = {}
    for group in groups:
        name, axis = group[0]
        usual = "batch" if all(axis == 0 for _, axis in group) else "sequence"
        if usual == "sequence" and _is_in_objects(group):
            usual = f"{name.partition('.')[0]}_{axis}"
        labelled[f"{name}_{axis}" if usual in labelled else usual] = group
    return labelled


def export_dynamic(
    export: Callable[..., ExportReport],
    model: Any,
    prepared: PreparedInputs,
    may_drop: bool,
    on_step: Callable[[str], None],
) -> tuple[ExportReport, list[str]]:
    """Export with symbolic axes, and check them by running the file at another size.

    A tracer records what happens at one size; only a run shows whether that holds at another. With
    `may_drop` the model is exported again without the axes that the exporter fixed after all.
    Returns the last report, and notes for the user.
    """
    axes = prepared.axes or {}
    report = export(dynamic_shapes=axes)
    on_step("try it at another size")
    try:
        broken = _find_broken_axes(model, report.onnx_path, prepared.inputs, axes)
    except FormatError as error:
        return report, [f"the file was not tried at another size: {error.message}"]
    if not broken:
        return report, []
    note = f"the {report.exporter} exporter fixed {' and '.join(broken)} to the size of the example"
    if not may_drop:
        return report, [f"{note}: at another size the file fails or computes something else"]
    kept = {
        name: {axis: label for axis, label in labels.items() if label not in broken}
        for name, labels in axes.items()
    }
    report = export(dynamic_shapes={name: axes for name, axes in kept.items() if axes} or None)
    return report, [f"{note}; exported again without"]


def _find_broken_axes(
    model: nn.Module, path: Path, inputs: dict[str, Any], axes: Axes
) -> list[str]:
    """Find the labels of axes at which the file computes something else than the model."""
    try:
        import_onnxruntime()
    except SourceError:  # an optional package: without it, nothing is checked
        return []
    session = Session(path, settings=OPTIMIZED)
    example, groups = ModelInputs((), inputs), _group_axes(axes)
    return [
        label
        for label, group in groups.items()
        if not _works_at_other_size(model, session, example, group, groups.values())
    ]


def _works_at_other_size(
    model: nn.Module,
    session: Session,
    inputs: ModelInputs,
    group: AxisGroup,
    groups: Iterable[AxisGroup],
) -> bool:
    """Compare file and model at the first other size that the model runs at."""
    joint = [other for other in groups if _is_in_objects(group) != _is_in_objects(other)]
    for resized in itertools.chain(
        _at_other_sizes(model, inputs, group),
        *(_at_other_sizes(model, inputs, group, other) for other in joint),
    ):
        try:
            with filter_outputs(model):  # the file has only the outputs that can be exported
                returned = run_model(model, resized)
        except Exception:  # whatever the model raises, it does not run at this size
            continue
        tensors = named_tensors(model, resized)
        try:
            outputs = session.run({name: as_array(tensor) for name, tensor in tensors.items()})
        except FormatError:
            return False
        results = list(outputs.values())
        for with_trees in (True, False):  # a file may lack the caches that the model returns
            expected = list(flatten_tensors(returned, with_trees))
            if len(results) == len(expected):
                return all(map(_is_close, expected, results))
        return all(any(_is_close(tensor, result) for result in results) for tensor in expected)
    return True  # the model itself runs at no other size


def _is_close(tensor: torch.Tensor, result: Array) -> bool:
    """Return whether a result of the file is the model's.

    The tolerance is wide: a fixed axis gives errors far above those of another order of additions.
    """
    # Both exporters write complex numbers as pairs of floats.
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    expected = as_array(tensor)
    scale = float(np.max(np.abs(expected), initial=1, where=np.isfinite(expected)))
    tolerance = Tolerance(_TOLERANCE * scale, _TOLERANCE)
    return (
        is_comparable(expected, result) and measure_difference(expected, result, tolerance).within
    )
