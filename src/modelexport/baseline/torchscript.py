"""Exports through torch's legacy TorchScript exporter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelexport.baseline.calling import (
    ModelInputs,
    exceeds_one_file,
    in_signature_order,
    keyword_shim,
    preserved,
    quiet,
    shaped_output,
)
from modelexport.baseline.lowering import read_trace, watched_lowering
from modelexport.baseline.options import Baseline, ExportOptions
from modelexport.baseline.tap import JitTap
from modelexport.baseline.tracer_warnings import collected_tracer_warnings
from modelexport.baseline.weights_apart import weights_apart
from modelexport.collector import collector_paused
from modelexport.errors import ArgumentError
from modelexport.hierarchy.capture import forward_args, hooks_not_compiled, recording
from modelexport.hierarchy.tree import ModuleTree


def export(model: nn.Module, tree: ModuleTree, inputs: ModelInputs, target: Path, options: ExportOptions) -> Baseline:
    """Export with `torch.onnx.export(dynamo=False)` into memory; large weights go straight to a data file."""
    ask, shim = True, _needs_shim(model, inputs)
    while True:
        try:
            return _export_once(model, tree, inputs, target, options, JitTap(ask), shim)
        except _TraceDisturbedError:
            # Asking for a value put a constant into the trace; without asking, the trace is the baseline's.
            ask = False
        except TypeError:
            # The tracer passes keywords by position and fills in defaults, which many models reject.
            if shim:
                raise
            shim = True


class _TraceDisturbedError(Exception):
    """The trace is not the one that a plain export would have made."""


def _export_once(
    model: nn.Module,
    tree: ModuleTree,
    inputs: ModelInputs,
    target: Path,
    options: ExportOptions,
    tap: JitTap,
    shim: bool,
) -> Baseline:
    inputs = inputs if shim else in_signature_order(model, inputs)
    names = options.input_names or inputs.names
    sink = _Sink()
    apart = options.external_data or exceeds_one_file(model)
    with (
        preserved(model),
        hooks_not_compiled(model),
        shaped_output(model, names or (), may_be_numbers=False) as shape,
        recording(model, tree, tap) as recorder,
        watched_lowering(tap) as lowering,
        quiet(options.verbose),
        collected_tracer_warnings(options.verbose) as notes,
        weights_apart(target) if apart else nullcontext() as place,
        collector_paused(),
    ):
        args, kwargs = (_by_position(model, inputs), None) if shim else (inputs.for_torch, inputs.kwargs or None)
        torch.onnx.export(
            model,
            args,
            sink,  # type: ignore[arg-type]
            kwargs=kwargs,
            dynamo=False,
            optimize=options.optimize,
            opset_version=options.opset_version,
            input_names=names,
            output_names=options.output_names or shape.names,
            dynamic_axes=_dynamic_axes(options.dynamic_shapes, names),
        )
    if tap.disturbed:
        raise _TraceDisturbedError
    data = memoryview(sink.content if place is None else place(sink.content))
    files = {path.name: path for path in target.parent.iterdir() if path.stat().st_size}
    with collector_paused():
        trace = read_trace(recorder.log(), lowering)
    text = str(lowering.final) if options.with_graph_text else None
    return Baseline(data, files, trace, tuple(shape.dropped), text, tuple(notes))


def _needs_shim(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether keywords need to go by position.

    The tracer makes inputs of the file of the numbers among them, and of those that it fills in
    as defaults; and it does not know keywords that forward has no name for.
    """
    if not inputs.kwargs:
        return False
    parameters = inspect.signature(model.forward).parameters
    defaults = {name: item.default for name, item in parameters.items()}
    given = dict(zip(forward_args(model), inputs.args, strict=False)) | inputs.kwargs
    numbers = any(isinstance(v, int | float) and not isinstance(v, bool) for v in (defaults | given).values())
    return numbers or any(name not in parameters for name in inputs.kwargs)


def _by_position(model: nn.Module, inputs: ModelInputs) -> tuple[Any, ...]:
    """Rebind forward to take the tensor inputs by position, and give them in that order."""
    named = {**dict(zip(forward_args(model), inputs.args, strict=False)), **inputs.kwargs}
    tensors = {name: value for name, value in named.items() if not _is_constant(value)}
    constants = {name: value for name, value in named.items() if _is_constant(value)}
    keyword_shim(model, list(tensors), constants)
    return tuple(tensors.values())


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _dynamic_axes(dynamic_shapes: Any, names: Any) -> dict[str, dict[int, str]] | None:
    """torch's newer `dynamic_shapes`, by input name, as the axes that this exporter takes."""
    if not dynamic_shapes:
        return None
    if not isinstance(dynamic_shapes, Mapping) or names is None:
        raise ArgumentError(
            "the torchscript exporter needs dynamic_shapes by input name",
            hint="pass a dict such as {'input_ids': {0: 'batch'}} together with keyword inputs or input_names",
        )
    axes: dict[str, dict[int, str]] = {}
    for name, dims in dynamic_shapes.items():
        items = dims.items() if isinstance(dims, Mapping) else enumerate(dims or ())
        axes[name] = {
            axis: str(getattr(dim, "__name__", None) or (dim if isinstance(dim, str) else f"{name}_{axis}"))
            for axis, dim in items
            if dim is not None and not isinstance(dim, int)
        }
    return axes


class _Sink:
    """A file for torch to write its model bytes into; keeps the object itself, without a copy."""

    content: bytes = b""

    def write(self, content: bytes) -> int:
        self.content = content
        return len(content)

    def flush(self) -> None:
        """Nothing is buffered."""
