"""Prepare the inputs of an export, and check its dynamic axes by running the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.capture.inputs import ModelInputs, bind_inputs, parse_inputs, run_model
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import flatten_tensors
from modelexport.errors import FormatError, ModelRunError, SourceError
from modelexport.options import SourceOptions
from modelexport.report import ExportReport
from modelexport.source.axis_groups import (
    Axes,
    AxisGroup,
    at_other_sizes,
    complete_groups,
    find_groups,
    group_axes,
    pass_by_name,
    ungroup_axes,
)
from modelexport.source.example_inputs import InputRequest, make_example_inputs, named_tensors
from modelexport.source.load import LoadedModel, load_source
from modelexport.verification.pytorch_run import as_array
from modelexport.verification.records import (
    Array,
    Tolerance,
    is_comparable,
    measure_difference,
)
from modelexport.verification.runtime import Session, import_onnxruntime

_TOLERANCE = 1e-2


class PreparedInputs(NamedTuple):
    """Inputs to export with, their symbolic axes if there are any, and where they come from."""

    inputs: Any
    axes: Axes | None
    origin: str


def open_source(
    model: str, options: SourceOptions, trust_remote_code: bool, seed: int
) -> LoadedModel:
    """Load the model that a command line names.

    Args:
        model: What the command line calls MODEL.
        options: How to load it, as the export records it.
        trust_remote_code: Whether to run code that comes with the model.
        seed: Seed of random weights.

    Returns:
        The model.

    Raises:
        SourceError: If it cannot be loaded.
    """
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
    """Report a model that does not run as bad input, if the user chose what it runs on.

    Args:
        user_chose_inputs: Whether the inputs come from options, or from the factory.

    Raises:
        SourceError: In place of a ModelRunError.
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
    """Make the inputs to export a model with.

    Args:
        source: The model.
        wanted: What the user says about the inputs.
        dynamic: Whether to find dynamic axes.
        axes: Dynamic axes that the user names.
        seed: Seed of random values.

    Returns:
        The inputs; with dynamic axes they are of at least two along each, since torch takes a size
        of one to be fixed.

    Raises:
        SourceError: If there are no such inputs or axes.
        ModelRunError: If the model does not run on them.
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
    inputs = pass_by_name(model, bind_inputs(model, parse_inputs(example.inputs)))
    if axes:
        inputs, groups = complete_groups(model, inputs, axes)
    else:
        inputs, groups = find_groups(model, inputs, example)
    if not groups:
        raise SourceError(
            "no axis can be dynamic: the model runs at no other size than this",
            hint="leave --dynamic out, or set axes with --dynamic-axes",
        )
    return PreparedInputs(inputs.kwargs, ungroup_axes(groups), example.origin)


def export_dynamic(
    export: Callable[..., ExportReport],
    model: Any,
    prepared: PreparedInputs,
    may_drop: bool,
    on_step: Callable[[str], None],
) -> tuple[ExportReport, list[str]]:
    """Export with symbolic axes, and check them by running the file at another size.

    A tracer records what happens at one size; only a run shows whether that holds at another.

    Args:
        export: Exports the model with the `dynamic_shapes` that it is given.
        model: The model.
        prepared: Its inputs and symbolic axes.
        may_drop: Whether to export again without the axes that the exporter fixed after all.
        on_step: Called with a line of progress.

    Returns:
        The report of the last export, and notes for the user.
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
    session = Session(path, optimize=True)
    example = ModelInputs((), inputs)
    return [
        label
        for label, group in group_axes(axes).items()
        if not _works_at_other_size(model, session, example, group)
    ]


def _works_at_other_size(
    model: nn.Module, session: Session, inputs: ModelInputs, group: AxisGroup
) -> bool:
    """Compare file and model at the first other size that the model runs at."""
    for resized in at_other_sizes(model, inputs, group):
        try:
            with filter_outputs(model):  # the file has only the outputs that can be exported
                expected = list(flatten_tensors(run_model(model, resized)))
        except Exception:  # whatever the model raises, it does not run at this size
            continue
        tensors = named_tensors(model, resized)
        try:
            outputs = session.run({name: as_array(tensor) for name, tensor in tensors.items()})
        except FormatError:
            return False
        results = list(outputs.values())
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
