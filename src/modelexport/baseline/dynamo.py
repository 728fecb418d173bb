"""Exports through torch's dynamo exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _errors

from modelexport.baseline.branches import BranchModules, watched_branches
from modelexport.baseline.calling import ModelInputs, preserved, quiet, shaped_output, swapped, unique_names
from modelexport.baseline.decomposition import FxTap
from modelexport.baseline.dynamo_trace import Translation, read_trace, watched_translation
from modelexport.baseline.options import Baseline, ExportOptions, mapped
from modelexport.errors import ArgumentError
from modelexport.hierarchy.calls import CallLog
from modelexport.hierarchy.capture import forward_args, recording
from modelexport.hierarchy.tree import ModuleTree


def export(
    model: nn.Module | ExportedProgram, tree: ModuleTree, inputs: ModelInputs, target: Path, options: ExportOptions
) -> Baseline:
    """Write `target` (and its data file beside it) with `torch.onnx.export(dynamo=True)`."""
    if isinstance(model, ExportedProgram):
        return _export_program(model, tree, target, options)
    try:
        return _export_once(model, tree, inputs, target, options)
    except _errors.ConversionError as error:
        # With gradients torch may capture other kernels than it decomposes to, and then fail on its own program.
        if not torch.is_grad_enabled() or isinstance(error.__cause__, torch.onnx.OnnxExporterError):
            raise
        with torch.no_grad():
            return _export_once(model, tree, inputs, target, options)


def _export_once(
    model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: ExportOptions
) -> Baseline:
    names = options.input_names or inputs.names
    tap = FxTap()
    with (
        preserved(model),
        shaped_output(model, names or ()) as shape,
        recording(model, tree, tap) as recorder,
        watched_branches(model, tree) as branches,
        watched_translation() as translated,
        _renaming(chosen=options.output_names is not None),
        quiet(options.verbose),
    ):
        written = torch.onnx.export(
            model,
            inputs.for_torch,
            str(target),
            kwargs=inputs.kwargs or None,
            input_names=names,
            output_names=options.output_names or shape.names,
            dynamic_shapes=_for_every_input(model, inputs, options.dynamic_shapes),
            **_common(options),
        )
    return _read(written, tree, recorder.log(), tap, translated, branches, target, options, shape.dropped)


def _for_every_input(model: nn.Module, inputs: ModelInputs, dynamic_shapes: Any) -> Any:
    """Dynamic shapes by name with an entry for every input, as torch.export wants them."""
    if not isinstance(dynamic_shapes, Mapping) or not all(isinstance(name, str) for name in dynamic_shapes):
        return dynamic_shapes
    arguments = list(forward_args(model))
    shapes: dict[str, Any] = dict.fromkeys((*arguments[: len(inputs.args)], *inputs.kwargs))
    shapes.update(dynamic_shapes)
    gathered = next((name.removeprefix("**") for name in arguments if name.startswith("**")), None)
    loose = [name for name in shapes if name in inputs.kwargs and name not in arguments]
    if gathered is None or not loose:
        return shapes
    return {**{name: shapes[name] for name in shapes if name not in loose}, gathered: {n: shapes[n] for n in loose}}


def _export_program(program: ExportedProgram, tree: ModuleTree, target: Path, options: ExportOptions) -> Baseline:
    """A program has its inputs, shapes and calls in it already."""
    with watched_translation() as translated, _renaming(chosen=True), quiet(options.verbose):
        written = torch.onnx.export(
            program,
            (),
            str(target),
            input_names=options.input_names,
            output_names=options.output_names,
            **_common(options),
        )
    return _read(written, tree, CallLog((), {}), FxTap(), translated, None, target, options, ())


def _common(options: ExportOptions) -> dict[str, Any]:
    return {
        "dynamo": True,
        "verbose": options.verbose,
        "optimize": options.optimize,
        "opset_version": options.opset_version,
        "external_data": True if options.external_data is None else options.external_data,
    }


def _read(
    written: Any,
    tree: ModuleTree,
    log: CallLog,
    tap: FxTap,
    translated: Translation,
    branches: BranchModules | None,
    target: Path,
    options: ExportOptions,
    dropped: Sequence[str],
) -> Baseline:
    trace = read_trace(written, tree, log, tap, translated)
    if branches is not None:
        scopes = {**trace.scopes, **dict(branches.sites(written.model.graph))}
        trace = msgspec.structs.replace(trace, scopes=scopes, ran_in_bodies=frozenset(branches.ran))
    files = {path.name: path for path in target.parent.iterdir() if path != target}
    text = str(written.exported_program) if options.with_graph_text else None
    return Baseline(mapped(target), files, trace, tuple(dropped), text)


@contextmanager
def _renaming(chosen: bool) -> Iterator[None]:
    """Give no output the name of another value, which torch does: ONNX has no such graphs.

    Where the caller chose the names that is an error; a key of what the model returns gets a number.
    """
    from torch.onnx._internal.exporter import _ir_passes

    original = _ir_passes.rename_outputs

    def rename_outputs(model: Any, names: Sequence[str]) -> None:
        renamed = {id(value) for value, _ in zip(model.graph.outputs, names, strict=False)}
        taken = {value.name for value in _ir_passes._all_values(model) if id(value) not in renamed}
        clash = next((name for name in names if name in taken), None)
        if clash is not None and chosen:
            raise ArgumentError(
                f"the output name {clash!r} is the name of another value in the graph", hint="choose another"
            )
        original(model, names if clash is None else unique_names(names, taken))

    with swapped(_ir_passes, rename_outputs=rename_outputs):
        yield
