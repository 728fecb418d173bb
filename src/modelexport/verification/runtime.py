"""Run models in ONNX Runtime."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
from torch import nn

from modelexport.capture.inputs import ModelInputs
from modelexport.capture.module_tree import forward_args
from modelexport.capture.recorder import flatten_tensors
from modelexport.errors import ArgumentError, FormatError, SourceError, first_line, plural
from modelexport.onnx_file import wire
from modelexport.tagged.tables import tensor_infos
from modelexport.verification.pytorch_run import as_array
from modelexport.verification.records import Array, value_kind

_NO_KERNEL = ("NOT_IMPLEMENTED", "tensor(bfloat16)")
"""How ONNX Runtime says that it lacks an operator for a type.

Some operators take bfloat16 and have no CPU kernel for it, others take it only in a later opset.
"""
_FOLDER = "session.model_external_initializers_file_folder_path"


def import_onnxruntime() -> Any:
    """ONNX Runtime, or an error that says how to get it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        hint = "pip install onnxruntime"
        raise SourceError(f"this needs onnxruntime: {first_line(error)}", hint=hint) from error


def run_with_outputs(
    data: wire.Buffer, folder: Path, feeds: Mapping[str, Array], names: Iterable[str]
) -> dict[str, Array]:
    """The values of these tensors of a model's main graph, besides its outputs."""
    return run_model_bytes(b"".join(wire.with_outputs(data, list(names))), folder, feeds)


def run_model_bytes(model: bytes, folder: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What a model gives for these inputs; what it does not take is left out, and numbers are made to fit its types."""
    runtime = import_onnxruntime()
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
    return {
        name: value
        for name, value in zip(outputs, results, strict=True)
        if isinstance(value, np.ndarray)
    }


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


_MOST_WAYS = 10_000


def onnx_inputs(graph: onnx.GraphProto, model: nn.Module, inputs: ModelInputs) -> dict[str, Array]:
    """By name where the file has the names of forward's arguments, else in order; exporters leave unused ones out."""
    weights = {tensor.name for tensor in graph.initializer}
    wanted = [value for value in graph.input if value.name not in weights]
    positional = dict(zip(forward_args(model), inputs.args, strict=False))
    by_name = {
        name: as_array(v)
        for name, v in {**positional, **inputs.kwargs}.items()
        if isinstance(v, torch.Tensor)
    }
    if all(value.name in by_name for value in wanted):
        found = {value.name: by_name[value.name] for value in wanted}
    else:
        given = [
            as_array(tensor)
            for tensor in flatten_tensors((inputs.args, list(inputs.kwargs.values())))
        ]
        found = _in_order(wanted, given)
    for value in wanted:
        if value.name not in found or not _fits(value, found[value.name], only_shape=True):
            raise _no_fit(value, found.get(value.name))
    return found


def _in_order(wanted: list[Any], given: list[Array]) -> dict[str, Array]:
    """Inputs by their place; where the file has fewer, those that fit, if there is only one way."""
    if len(wanted) == len(given):
        return {value.name: array for value, array in zip(wanted, given, strict=True)}
    fitting = [
        chosen
        for chosen in itertools.islice(itertools.combinations(given, len(wanted)), _MOST_WAYS)
        if all(_fits(value, array) for value, array in zip(wanted, chosen, strict=True))
    ]
    if len(fitting) > 1:
        raise ArgumentError(
            f"the file has {len(wanted)} of the {plural(len(given), 'input')}, and their names do not tell which",
            hint="export with inputs by name, as a dict, or with input_names",
        )
    return {
        value.name: array for chosen in fitting for value, array in zip(wanted, chosen, strict=True)
    }


def _fits(value: onnx.ValueInfoProto, array: Array, only_shape: bool = False) -> bool:
    tensor = value.type.tensor_type
    dims = tensor.shape.dim
    if len(dims) != array.ndim or any(
        dim.HasField("dim_value") and dim.dim_value != size
        for dim, size in zip(dims, array.shape, strict=True)
    ):
        return False
    if only_shape:
        return True
    stand_in = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return value_kind(array) == value_kind(array.astype(stand_in))


def _no_fit(value: onnx.ValueInfoProto, array: Array | None) -> ArgumentError:
    (info,) = tensor_infos([value])
    dims = ",".join("?" if dim is None else str(dim) for dim in info.shape)
    given = "none" if array is None else f"[{','.join(map(str, array.shape))}]"
    hint = "use the inputs that the file was exported with"
    if array is not None:
        hint = f"{hint}, or others of that shape; export with --dynamic for other shapes"
    return ArgumentError(
        f"the file's input {value.name!r}: expected [{dims}], got {given}", hint=hint
    )


_MOST_ZEROS = 256 << 20
_LONGEST_ZERO_RUN = 60.0
"""Seconds: on zeros, a loop may never end."""


class ZeroRun(msgspec.Struct, frozen=True):
    """What ONNX Runtime did with a model.

    Attributes:
        loads: Whether it loaded the model.
        runs: Whether it then ran the model on zeros.
        message: What happened, in words.
    """

    loads: bool
    runs: bool
    message: str


def run_on_zeros(path: Path) -> ZeroRun | None:
    """Load a model file and run it on zeros, if its inputs are plain tensors.

    Args:
        path: The model file.

    Returns:
        How far ONNX Runtime got; None if it is not installed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for each of its states
        return ZeroRun(False, False, f"rejects the model: {first_line(error)}")
    loaded = "loaded the model"
    try:
        feeds = {value.name: _zeros(value) for value in session.get_inputs()}
        if any(value is None for value in feeds.values()):
            reason = "inputs that are no plain tensors, or huge"
            return ZeroRun(True, False, f"{loaded}, did not run it: {reason}")
        limited = runtime.RunOptions()
        timer = threading.Timer(_LONGEST_ZERO_RUN, setattr, (limited, "terminate", True))
        timer.start()
        try:
            session.run(None, feeds, limited)
        finally:
            timer.cancel()
    except Exception as error:
        return ZeroRun(True, False, f"{loaded}, could not run it on zeros: {first_line(error)}")
    return ZeroRun(True, True, f"{loaded} and ran it on zeros")


def _zeros(value: Any) -> Array | None:
    """Return zeros for an input, with 1 for unknown sizes; None if it is not a plain tensor."""
    name = value.type.removeprefix("tensor(").removesuffix(")")
    shape = [size if isinstance(size, int) else 1 for size in value.shape or []]
    if name == "string":
        return np.full(shape, "", dtype=object)
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name.upper()))
    except (ValueError, KeyError):
        return None
    return np.zeros(shape, dtype) if math.prod(shape) * dtype.itemsize <= _MOST_ZEROS else None
