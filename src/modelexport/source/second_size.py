"""Runs an exported file at a size that the export has not seen, and compares it with the model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelexport.baseline.calling import ModelInputs, run_once, shaped_output
from modelexport.hierarchy.capture import tensors_in
from modelexport.report import ExportReport
from modelexport.source.dynamic import Axes, at_other_sizes, places_of
from modelexport.source.prepare import Prepared
from modelexport.source.resize import named_tensors


def export_dynamic(
    export: Callable[..., ExportReport],
    model: Any,
    prepared: Prepared,
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
    left = {name: {axis: label for axis, label in named.items() if label not in broken} for name, named in axes.items()}
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
    return [label for label, places in places_of(axes).items() if not _holds(model, session, start, places)]


def _holds(model: nn.Module, session: Any, inputs: ModelInputs, places: list[tuple[str, int]]) -> bool:
    for other in at_other_sizes(model, inputs, places):
        try:
            with shaped_output(model):  # the file has only the outputs that can be exported
                output = run_once(model, other)
        except Exception:
            continue
        return _agrees(model, session, other, output)
    return True  # the model itself has no other size here, so there is nothing to hold


def _agrees(model: nn.Module, session: Any, other: ModelInputs, output: Any) -> bool:
    expected = list(tensors_in(output))
    tensors = named_tensors(model, other)
    try:
        results = session.run(None, {value.name: tensors[value.name].numpy() for value in session.get_inputs()})
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
    return np.allclose(expected, result.astype(np.float32), rtol=1e-2, atol=1e-2 * scale, equal_nan=True)
