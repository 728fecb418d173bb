"""Run extracted models in ONNX Runtime without optimisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

Values = dict[str, np.ndarray]


def session(model: onnx.ModelProto | Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | Path, values: Values) -> Values:
    """Run a model on those of the values that are its inputs."""
    ready = session(model)
    results = ready.run(None, {value.name: values[value.name] for value in ready.get_inputs()})
    return {value.name: result for value, result in zip(ready.get_outputs(), results, strict=True)}


def identical(first: np.ndarray, second: np.ndarray) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )
