"""Run models in ONNX Runtime: the only file that opens a session, and that maps its errors."""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from modelexport.errors import ArgumentError, FormatError, first_line
from modelexport.onnx_file import wire
from modelexport.packages import import_package
from modelexport.verification.records import Array

# Nothing here imports torch: commands that only read files open sessions too.

# Some operators take bfloat16 and have no CPU kernel for it, others take it in a later opset only.
_MISSING_KERNEL = ("NOT_IMPLEMENTED", "tensor(bfloat16)")
CPU = "CPUExecutionProvider"
_LEVELS = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_SAVED_DATA = "session.optimized_model_external_initializers_file_name"
_SAVED_DATA_FROM = "session.optimized_model_external_initializers_min_size_in_bytes"
ANNOTATION = "layer_ann"
"""The key of a node's layer annotation in its metadata."""
ASSIGNMENT = "session.layer_assignment_settings"
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
_NO_PACKING = "session.disable_prepacking"
_ERRORS_ONLY = 4
_SMALLEST_SAVED = 1024
_LARGE_FILE = 16 << 20
"""Bytes from which a file is mapped into memory, not copied."""


def import_onnxruntime() -> Any:
    """Import ONNX Runtime.

    Raises:
        MissingPackageError: If it is not installed or cannot be loaded.
    """
    return import_package("onnxruntime")


class SessionSettings(msgspec.Struct, frozen=True):
    """How ONNX Runtime runs a model."""

    optimization: str = "off"
    """`off`, `basic`, `extended` or `all`; only with `off` are all values computed as the file
    says."""
    threads: int | None = None
    """How many threads a node may use; None leaves it to ONNX Runtime."""
    provider: str = CPU
    save_to: Path | None = None
    """Where to save the optimized model; its initializers go to a data file beside it."""
    profile_prefix: Path | None = None
    """Where to write a profile; ONNX Runtime appends the time and `.json`."""
    packs_weights: bool = True
    """Whether to copy weights into the layout of the kernels, which one run alone does not pay."""


OPTIMIZED = SessionSettings("all")


class Session:
    """A model that is loaded in ONNX Runtime."""

    def __init__(
        self,
        model: bytes | Path,
        *,
        data_folder: Path | None = None,
        settings: SessionSettings | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: The path of a file, or a serialized model.
            data_folder: The folder of the external data, for a serialized model.
            settings: How to run it; by default without optimization, on the CPU.

        Raises:
            ArgumentError: If ONNX Runtime does not have the provider.
            SourceError: If ONNX Runtime is not installed.
            FormatError: If ONNX Runtime rejects the model.
        """
        runtime = import_onnxruntime()
        settings = settings or SessionSettings()
        check_provider(settings.provider)
        options = _session_options(runtime, settings)
        if data_folder is not None:
            options.add_session_config_entry(_DATA_FOLDER, str(data_folder.resolve()))
        source = model if isinstance(model, bytes) else str(model)
        # Nodes that another provider has no kernel for run on the CPU.
        providers = list(dict.fromkeys((settings.provider, CPU)))
        try:
            self._session = runtime.InferenceSession(source, options, providers=providers)
        except Exception as error:  # onnxruntime has an exception class for each of its states
            raise _as_format_error("ONNX Runtime rejects the model", error) from error

    @classmethod
    def with_outputs(
        cls,
        data: wire.Buffer,
        path: Path,
        names: Iterable[str],
        settings: SessionSettings | None = None,
    ) -> Session:
        """Load a model file with more values of its main graph as outputs.

        Args:
            data: The bytes of the file.
            path: The file.
            names: The values.
            settings: How to run it; by default without optimization, on the CPU.

        Returns:
            The session.

        Raises:
            SourceError: If ONNX Runtime is not installed.
            FormatError: If ONNX Runtime rejects the model.
        """
        if len(data) > _LARGE_FILE and not path.is_symlink():
            # ONNX Runtime refuses data files behind a link that leads out of the folder.
            data = b"".join(wire.with_external_data(data, path.name))
        model = b"".join(wire.with_outputs(data, names))
        return cls(model, data_folder=path.parent, settings=settings)

    def end_profile(self) -> Path:
        """End the profile, and return the file that ONNX Runtime wrote."""
        return Path(self._session.end_profiling())

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the model, with their names, types and shapes."""
        return list(self._session.get_inputs())

    def run(self, values: Mapping[str, Array], seconds: float | None = None) -> dict[str, Array]:
        """Run the model.

        Args:
            values: Values by input name, cast to the types of the inputs if need be. The model
                ignores names that it has no input for.
            seconds: The time limit; none if left out.

        Returns:
            The outputs that are tensors, by name.

        Raises:
            FormatError: If a value is missing or ONNX Runtime cannot run the model on them.
        """
        names = [output.name for output in self._session.get_outputs()]
        options = import_onnxruntime().RunOptions()
        timer = threading.Timer(seconds or 0.0, setattr, (options, "terminate", True))
        if seconds is not None:
            timer.start()
        try:
            # The file may be of another precision than the values of the model.
            feeds = {
                info.name: values[info.name].astype(dtype, copy=False)
                if (dtype := _input_dtype(info)) is not None
                else values[info.name]
                for info in self.inputs
            }
            results = self._session.run(names, feeds, options)
        except Exception as error:  # as above, and what casting a value raises
            raise _as_format_error("ONNX Runtime cannot run the model", error) from error
        finally:
            timer.cancel()
        outputs = zip(names, results, strict=True)
        return {name: value for name, value in outputs if isinstance(value, np.ndarray)}


def check_provider(provider: str) -> None:
    """Check that the installed ONNX Runtime has an execution provider.

    Raises:
        ArgumentError: If it does not.
        SourceError: If ONNX Runtime is not installed.
    """
    available = import_onnxruntime().get_available_providers()
    if provider not in available:
        raise ArgumentError(
            f"this ONNX Runtime has no provider {provider!r}",
            hint=f"it has {', '.join(available)}",
        )


@functools.cache
def supports_layer_annotations() -> bool:
    """Return whether the installed ONNX Runtime assigns nodes to devices by their annotations.

    One that does refuses a malformed setting, one that does not ignores it.

    Raises:
        SourceError: If ONNX Runtime is not installed.
    """
    runtime = import_onnxruntime()
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    stored = onnx.helper.make_tensor("x", onnx.TensorProto.FLOAT, [1], [0.0])
    graph = onnx.helper.make_graph([], "g", [], [value], [stored])
    opset = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    options = runtime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.add_session_config_entry(ASSIGNMENT, "malformed")
    try:
        runtime.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    except Exception:  # a version that has the option rejects the malformed value
        return True
    return False


def _session_options(runtime: Any, settings: SessionSettings) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    level = _LEVELS[settings.optimization]
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if settings.save_to is not None:
        options.optimized_model_filepath = str(settings.save_to)
        # Otherwise the saved file refers to data files that are not in its folder.
        options.add_session_config_entry(_SAVED_DATA, f"{settings.save_to.name}.data")
        options.add_session_config_entry(_SAVED_DATA_FROM, str(_SMALLEST_SAVED))
    if settings.profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(settings.profile_prefix)
    if not settings.packs_weights:
        options.add_session_config_entry(_NO_PACKING, "1")
    return options


def _as_format_error(problem: str, error: Exception) -> FormatError:
    """Map an error of ONNX Runtime to ours, with advice for a missing kernel."""
    reason = first_line(error)
    advice = (
        "export and verify a float32 copy of the model, model.float(); "
        "its modules and names are the same"
    )
    lacks_kernel = any(mark in reason for mark in _MISSING_KERNEL)
    return FormatError(f"{problem}: {reason}", hint=advice if lacks_kernel else None)


def _input_dtype(info: Any) -> np.dtype[Any] | None:
    """Return the dtype of an input; None for an input that numpy has no dtype for."""
    name = info.type.removeprefix("tensor(").removesuffix(")").upper()
    try:
        return onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name))
    except (ValueError, KeyError):
        return None


_MOST_ZEROS = 256 << 20
_LONGEST_ZERO_RUN = 60.0
"""Seconds: on zeros, a loop may never end."""


class ZeroRun(msgspec.Struct, frozen=True):
    """Whether ONNX Runtime loaded a model and then ran it on zeros, and a message that says so."""

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
    try:
        session = Session(path, settings=OPTIMIZED)
    except FormatError as error:
        return ZeroRun(False, False, error.message.removeprefix("ONNX Runtime "))
    loaded = "loaded the model"
    try:
        zeros = {info.name: _zeros(info) for info in session.inputs}
        feeds = {name: value for name, value in zeros.items() if value is not None}
        if len(feeds) < len(zeros):
            reason = "inputs that are not plain tensors, or huge"
            return ZeroRun(True, False, f"{loaded}, did not run it: {reason}")
        session.run(feeds, _LONGEST_ZERO_RUN)
    except Exception as error:  # also sizes that numpy refuses
        return ZeroRun(True, False, f"{loaded}, could not run it on zeros: {first_line(error)}")
    return ZeroRun(True, True, f"{loaded} and ran it on zeros")


def _zeros(info: Any) -> Array | None:
    """Return zeros for an input, with 1 for unknown sizes; None if it is not a plain tensor."""
    shape = [size if isinstance(size, int) else 1 for size in info.shape or []]
    if info.type == "tensor(string)":
        return np.full(shape, "", dtype=object)
    dtype = _input_dtype(info)
    if dtype is None or math.prod(shape) * dtype.itemsize > _MOST_ZEROS:
        return None
    return np.zeros(shape, dtype)
