"""Runs an ONNX file in ONNX Runtime with any of its tensors as outputs, optimisation off."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from modelexport.errors import FormatError, SourceError, first_line
from modelexport.parity.measure import Array
from modelexport.tagged import wire

_NO_KERNEL = ("NOT_IMPLEMENTED", "tensor(bfloat16)")
"""How ONNX Runtime says that it lacks an operator for a type.

Some operators take bfloat16 and have no CPU kernel for it, others take it only in a later opset.
"""
_FOLDER = "session.model_external_initializers_file_folder_path"


def check_runtime() -> Any:
    """ONNX Runtime, or an error that says how to get it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        hint = "pip install onnxruntime"
        raise SourceError(f"this needs onnxruntime: {first_line(error)}", hint=hint) from error


def run_exposed(data: wire.Buffer, folder: Path, feeds: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """The values of these tensors of a model's main graph, besides its outputs."""
    return run_bytes(b"".join(wire.with_outputs(data, list(names))), folder, feeds)


def run_bytes(model: bytes, folder: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What a model gives for these inputs; what it does not take is left out, and numbers are made to fit its types."""
    runtime = check_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(_FOLDER, str(folder.resolve()))
    try:
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a kind for each of its states
        raise _refused("ONNX Runtime refuses the model", error) from error
    given = {value.name: _fitted(feeds[value.name], value.type) for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    try:
        results = session.run(outputs, given)
    except Exception as error:
        raise _refused("ONNX Runtime cannot run the model", error) from error
    return {name: value for name, value in zip(outputs, results, strict=True) if isinstance(value, np.ndarray)}


def _refused(what: str, error: Exception) -> FormatError:
    told = first_line(error)
    lacks = any(word in told for word in _NO_KERNEL)
    hint = "export and verify a float32 copy of the model, model.float(); its modules and names are the same"
    return FormatError(f"{what}: {told}", hint=hint if lacks else None)


def _fitted(values: Array, kind: str) -> Array:
    """The values in the type that an input has; a file may have been converted to another precision."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    try:
        wanted = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name.upper()))
    except (ValueError, KeyError):
        return values
    return values if values.dtype == wanted else values.astype(wanted)
