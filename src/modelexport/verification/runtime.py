"""Run models in ONNX Runtime: the only place that opens a session, and that maps its errors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from modelexport.errors import FormatError, SourceError, first_line
from modelexport.verification.records import Array

# Nothing here imports torch: commands that only read files open sessions too.

_MISSING_KERNEL = ("NOT_IMPLEMENTED", "tensor(bfloat16)")
"""How ONNX Runtime reports a missing CPU kernel.

Some operators take bfloat16 and have no CPU kernel for it, others take it only in a later opset.
"""
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_ERRORS_ONLY = 4


def import_onnxruntime() -> Any:
    """Import ONNX Runtime.

    Returns:
        The module.

    Raises:
        SourceError: If it is not installed or cannot be loaded.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise SourceError(
            f"this needs onnxruntime: {first_line(error)}", hint="pip install onnxruntime"
        ) from error


class Session:
    """A model that is loaded in ONNX Runtime, on the CPU."""

    def __init__(
        self, model: bytes | Path, *, data_folder: Path | None = None, optimize: bool = False
    ) -> None:
        """Load a model.

        Args:
            model: The path of a file, or a serialized model.
            data_folder: The folder of the external data, for a serialized model.
            optimize: Whether ONNX Runtime optimizes the graph; only without it are all values
                computed as the file says.

        Raises:
            SourceError: If ONNX Runtime is not installed.
            FormatError: If ONNX Runtime rejects the model.
        """
        runtime = import_onnxruntime()
        options = runtime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        if not optimize:
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if data_folder is not None:
            options.add_session_config_entry(_DATA_FOLDER, str(data_folder.resolve()))
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = runtime.InferenceSession(
                source, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has an exception class for each of its states
            raise _as_format_error("ONNX Runtime rejects the model", error) from error

    def run(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model.

        Args:
            values: Values by input name, cast to the types of the inputs if need be. The model
                ignores names that it has no input for.

        Returns:
            The outputs that are tensors, by name.

        Raises:
            FormatError: If a value is missing or ONNX Runtime cannot run the model on them.
        """
        names = [output.name for output in self._session.get_outputs()]
        try:
            feeds = {
                info.name: _cast(values[info.name], info.type)
                for info in self._session.get_inputs()
            }
            results = self._session.run(names, feeds)
        except Exception as error:
            raise _as_format_error("ONNX Runtime cannot run the model", error) from error
        outputs = zip(names, results, strict=True)
        return {name: value for name, value in outputs if isinstance(value, np.ndarray)}


def _as_format_error(problem: str, error: Exception) -> FormatError:
    """Map an error of ONNX Runtime to ours, with advice for a missing kernel."""
    reason = first_line(error)
    advice = (
        "export and verify a float32 copy of the model, model.float(); "
        "its modules and names are the same"
    )
    lacks_kernel = any(mark in reason for mark in _MISSING_KERNEL)
    return FormatError(f"{problem}: {reason}", hint=advice if lacks_kernel else None)


def _cast(values: Array, input_type: str) -> Array:
    """Cast values to the type of an input: the file may be of another precision than the model."""
    name = input_type.removeprefix("tensor(").removesuffix(")")
    try:
        data_type = onnx.TensorProto.DataType.Value(name.upper())
        return values.astype(onnx.helper.tensor_dtype_to_np_dtype(data_type), copy=False)
    except (ValueError, KeyError):  # not a tensor, or a type without a numpy dtype
        return values
