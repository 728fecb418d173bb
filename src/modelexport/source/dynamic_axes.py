"""Dynamic axes: find them, name them, and check the exported file at a second size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.inputs import (
    ModelInputs,
    bind_inputs,
    can_run,
    check_model_runs,
    parse_inputs,
    run_model,
)
from modelexport.capture.module_tree import named_args
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import flatten_tensors
from modelexport.errors import ModelRunError, SourceError
from modelexport.options import SourceOptions
from modelexport.report import ExportReport
from modelexport.source.example_inputs import (
    ExampleInputs,
    InputRequest,
    make_example_inputs,
    named_tensors,
    resized_along,
    with_tensors,
)
from modelexport.source.load import LoadedModel, load_source

Axes = dict[str, dict[int, str]]
_Place = tuple[str, int]


class DynamicInputs(NamedTuple):
    """Inputs to export with, by name, and the names of their symbolic axes."""

    inputs: dict[str, Any]
    axes: Axes


def dynamic_inputs(model: nn.Module, example: ExampleInputs) -> DynamicInputs:
    """Inputs of at least two along each dynamic axis, since torch takes a size of one to be fixed."""
    inputs = by_name(model, bind_inputs(model, parse_inputs(example.inputs)))
    if example.other_size is not None:
        other = by_name(model, parse_inputs(example.other_size()))
        groups = list(_differing(named_tensors(model, inputs), named_tensors(model, other)))
        if groups and can_run(model, other):
            return DynamicInputs(other.kwargs, _named(groups))
    return _tried(model, inputs)


def check_axes(model: nn.Module, example: ExampleInputs, axes: Axes) -> DynamicInputs:
    """The axes that a user named, checked against the inputs."""
    inputs = by_name(model, bind_inputs(model, parse_inputs(example.inputs)))
    tensors = named_tensors(model, inputs)
    for name, named in axes.items():
        if name not in tensors:
            raise SourceError(
                f"--dynamic-axes names {name!r}, which is no input",
                hint=f"there is {', '.join(tensors)}",
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
    as_large = [
        (other, axis)
        for other, t in free.items()
        if t.dim() > axis and t.shape[axis] == shape[axis]
    ]
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
            f"{type(model).__name__}.forward takes inputs without a name",
            hint="dynamic axes go by the inputs' names",
        )
    return ModelInputs((), {**dict(zip(names, inputs.args, strict=False)), **inputs.kwargs})


def _differing(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> Iterator[list[_Place]]:
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
    check_model_runs(model, inputs)
    found: list[list[_Place]] = []
    for places in _candidates(named_tensors(model, inputs)):
        if any(place in group for group in found for place in places):
            continue
        name, axis = places[0]
        size = named_tensors(model, inputs)[name].shape[axis]
        larger = next(
            (other for other in at_other_sizes(model, inputs, places) if can_run(model, other)),
            None,
        )
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


def at_other_sizes(
    model: nn.Module, inputs: ModelInputs, places: list[_Place]
) -> Iterator[ModelInputs]:
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


class PreparedInputs(NamedTuple):
    """Inputs to export with, the names of their symbolic axes, and the rung of the ladder they are from."""

    inputs: Any
    axes: Axes | None
    rung: str


def open_source(
    model: str, options: SourceOptions, trust_remote_code: bool, seed: int
) -> LoadedModel:
    """The model that a command line names."""
    return load_source(
        model,
        task=options.task,
        model_class=options.model_class,
        revision=options.revision,
        trust_remote_code=trust_remote_code,
        random_weights=options.random_weights,
        seed=seed,
    )


@contextmanager
def as_input_error(user_chose_inputs: bool) -> Iterator[None]:
    """Where the user chose the inputs, a model that does not run on them is bad input, not a failed export.

    They are chosen by options, or in the factory that returns them.
    """
    try:
        yield
    except ModelRunError as error:
        if user_chose_inputs:
            raise SourceError(error.message, hint=error.hint) from error
        raise


def prepare_inputs(
    source: LoadedModel, wanted: InputRequest, dynamic: bool, axes: Axes, seed: int
) -> PreparedInputs:
    """Inputs for a source, dynamic ones if asked for."""
    example = make_example_inputs(source, wanted, seed)
    if not dynamic and not axes:
        return PreparedInputs(example.inputs, None, example.rung)
    if isinstance(source.model, ExportedProgram):
        raise SourceError(
            f"{source.name} has its shapes in it, fixed or dynamic",
            hint="choose them in torch.export.export",
        )
    found = (
        check_axes(source.model, example, axes) if axes else dynamic_inputs(source.model, example)
    )
    if not found.axes:
        raise SourceError(
            "no axis can be dynamic: the model runs at no other size than this",
            hint="leave --dynamic out, or set axes with --dynamic-axes",
        )
    return PreparedInputs(found.inputs, found.axes, example.rung)


def export_dynamic(
    export: Callable[..., ExportReport],
    model: Any,
    prepared: PreparedInputs,
    may_drop: bool,
    on_step: Callable[[str], None],
) -> tuple[ExportReport, list[str]]:
    """Export with symbolic axes, and once more without those that the exporter fixed after all; and notes on it.

    A tracer takes down what happened at one size; whether that holds at another, only trying tells.
    """
    axes = prepared.axes or {}
    report = export(dynamic_shapes=axes)
    on_step("try it at another size")
    broken = broken_axes(model, report.onnx_path, prepared.inputs, axes)
    if not broken:
        return report, []
    told = f"the {report.exporter} exporter fixed {' and '.join(broken)} to the size of the example"
    if not may_drop:
        return report, [f"{told}: at another size the file fails or computes something else"]
    left = {
        name: {axis: label for axis, label in named.items() if label not in broken}
        for name, named in axes.items()
    }
    report = export(dynamic_shapes={name: named for name, named in left.items() if named} or None)
    return report, [f"{told}; exported again without"]


def broken_axes(model: nn.Module, path: Path, inputs: dict[str, Any], axes: Axes) -> list[str]:
    """The symbolic axes at which the file fails or gives other results than the model; none without onnxruntime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    start = ModelInputs((), inputs)
    return [
        label
        for label, places in places_of(axes).items()
        if not _holds(model, session, start, places)
    ]


def _holds(
    model: nn.Module, session: Any, inputs: ModelInputs, places: list[tuple[str, int]]
) -> bool:
    for other in at_other_sizes(model, inputs, places):
        try:
            with filter_outputs(model):  # the file has only the outputs that can be exported
                output = run_model(model, other)
        except Exception:
            continue
        return _agrees(model, session, other, output)
    return True  # the model itself has no other size here, so there is nothing to hold


def _agrees(model: nn.Module, session: Any, other: ModelInputs, output: Any) -> bool:
    expected = list(flatten_tensors(output))
    tensors = named_tensors(model, other)
    try:
        results = session.run(
            None, {value.name: tensors[value.name].numpy() for value in session.get_inputs()}
        )
    except Exception:
        return False
    if len(results) == len(expected):
        return all(map(_same, expected, results))
    return all(any(_same(tensor, result) for result in results) for tensor in expected)


def _same(tensor: torch.Tensor, result: Any) -> bool:
    """Whether a result of the file is the model's: within a tolerance for floats, exactly for all others."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not isinstance(result, np.ndarray) or tuple(tensor.shape) != result.shape:
        return False
    if not tensor.is_floating_point():
        return np.array_equal(tensor.numpy(), result)
    expected = tensor.float().numpy()
    scale = float(np.max(np.abs(expected), initial=1.0, where=np.isfinite(expected)))
    return np.allclose(
        expected, result.astype(np.float32), rtol=1e-2, atol=1e-2 * scale, equal_nan=True
    )
