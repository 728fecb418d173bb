"""Looks at an imported model: ONNX's checker, what was recorded of its graph, ONNX Runtime where it is installed."""

from __future__ import annotations

import importlib.util
import math
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from modelexport.analysis.validate import complaint
from modelexport.errors import first_line
from modelexport.graph.flat import flatten
from modelexport.graphml.rebuild import Imported
from modelexport.graphml.wiring import structure_digest
from modelexport.onnx_file.model_file import open_mapped, parse_model

_MOST_BYTES = 256 << 20
_LONGEST_RUN = 60.0
"""Seconds; on zeros, a loop may never end."""


class ImportCheck(msgspec.Struct, frozen=True):
    """What was found.

    `runtime` says what ONNX Runtime did, None where it is not installed; `loads` whether it loaded the model, `runs`
    whether it then ran it on zeros as well.
    """

    checker: str | None
    same_topology: bool
    runtime: str | None
    loads: bool
    runs: bool

    @property
    def passed(self) -> bool:
        return self.checker is None and self.same_topology and (self.loads or self.runtime is None)


def check_import(imported: Imported) -> ImportCheck:
    """Check a model that was just imported."""
    with open_mapped(imported.onnx) as data:
        same = structure_digest(flatten(parse_model(data, imported.onnx))) == imported.topology
    if importlib.util.find_spec("onnxruntime") is None:
        return ImportCheck(complaint(imported.onnx), same, None, loads=False, runs=False)
    loads, runs, told = _run(imported.onnx)
    return ImportCheck(complaint(imported.onnx), same, told, loads, runs)


def _run(path: Path) -> tuple[bool, bool, str]:
    """Load the model in ONNX Runtime and run it on zeros, if its inputs are plain tensors; say which of it was done."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a kind for each of its states
        return False, False, f"refuses the model: {first_line(error)}"
    try:
        feeds = {value.name: _zeros(value) for value in session.get_inputs()}
        if any(value is None for value in feeds.values()):
            return (
                True,
                False,
                "loaded the model, did not run it: inputs that are no plain tensors, or huge",
            )
        limited = runtime.RunOptions()
        timer = threading.Timer(_LONGEST_RUN, setattr, (limited, "terminate", True))
        timer.start()
        try:
            session.run(None, feeds, limited)
        finally:
            timer.cancel()
    except Exception as error:
        return True, False, f"loaded the model, could not run it on zeros: {first_line(error)}"
    return True, True, "loaded the model and ran it on zeros"


def _zeros(value: Any) -> np.ndarray | None:
    """An input of zeros, one along every axis without a size; None for what is no plain tensor."""
    name = value.type.removeprefix("tensor(").removesuffix(")")
    shape = [size if isinstance(size, int) else 1 for size in value.shape or []]
    if name == "string":
        return np.full(shape, "", dtype=object)
    try:
        kind = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name.upper()))
    except (ValueError, KeyError):
        return None
    return np.zeros(shape, kind) if math.prod(shape) * kind.itemsize <= _MOST_BYTES else None
