"""The results of a sensitivity measurement, and a file that keeps them for the next run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.onnx_file.atomic_write import check_output_path, write_file
from modelexport.onnx_file.digests import record_digest
from modelexport.onnx_file.model_file import StrPath, require_data_file
from modelexport.quantization.candidates import Candidate
from modelexport.quantization.samples import OutputError, Samples
from modelexport.quantization.variants import Workbench
from modelexport.tagged.model import load
from modelexport.tagged.records import UNREADABLE
from modelexport.verification.runtime import import_onnxruntime


class ModuleSensitivity(msgspec.Struct, frozen=True):
    """The error at the outputs if one module alone is quantized."""

    module: str
    tag: str | None
    own: bool
    """Whether these are only the nodes outside of its submodules."""
    nodes: int
    """How many nodes are converted."""
    saved: int
    """The bytes of initializers that this saves."""
    error: OutputError | None
    """The error; null where the quantized model does not run."""
    failure: str | None = None
    """Why the model does not run."""

    @property
    def size(self) -> float:
        """The relative error, infinite where the model does not run."""
        return float("inf") if self.error is None else self.error.size

    @property
    def has_effect(self) -> bool:
        """Whether quantizing it changes a value or saves a byte."""
        return self.size > 0 or self.saved > 0

    @property
    def title(self) -> str:
        """The module, as messages name it."""
        return Candidate(self.module, self.own, frozenset()).title


class Sensitivity(msgspec.Struct, frozen=True):
    """The sensitivity of the modules of a file, the most sensitive first."""

    file: str
    to: str
    depth: int | None
    """How deep the modules are; null where patterns chose them."""
    inputs: str
    """On which inputs the errors were measured."""
    calibration: str | None
    """On which inputs a static quantization was calibrated."""
    whole: ModuleSensitivity
    """The error if everything is quantized."""
    modules: tuple[ModuleSensitivity, ...]
    notes: tuple[str, ...] = ()


_Recorded = dict[str, dict[str, ModuleSensitivity]]
"""The content of a file: results by digest and module."""


class Results:
    """Results by module, written to a file as they come.

    Args:
        path: The file; None to keep them in memory only.
        digest: What the results depend on: the model and the options.
        recorded: The content of the file, by digest.
    """

    def __init__(self, path: Path | None, digest: str, recorded: _Recorded) -> None:
        self._path = path
        self._recorded = recorded
        self._own = recorded.setdefault(digest, {})

    def get(self, candidate: Candidate) -> ModuleSensitivity | None:
        """Return the result of a module; None if it is not recorded."""
        return self._own.get(candidate.key)

    def add(self, candidate: Candidate, row: ModuleSensitivity) -> None:
        """Record a result, and write the file as a whole or not at all."""
        self._own[candidate.key] = row
        if self._path is not None:
            text = msgspec.json.format(msgspec.json.encode(self._recorded), indent=1)
            write_file(self._path, text + b"\n")


def open_results(resume: StrPath | None, bench: Workbench) -> Results:
    """Open the file of results that a caller gave, or keep results in memory.

    Raises:
        ArgumentError: The file cannot be written.
        FileError: It cannot be read.
        FormatError: It is not a file of results.
    """
    if resume is None:
        return Results(None, "", {})
    path = check_output_path(resume, suffix="").resolve()
    recorded: _Recorded = {}
    if path.exists():
        try:
            recorded = msgspec.json.decode(path.read_bytes(), type=_Recorded)
        except OSError as error:
            raise FileError(f"cannot read {resume}: {error.strerror}") from error
        except UNREADABLE as error:
            raise FormatError(
                f"{resume} is not a file of results", hint="name another file to resume from"
            ) from error
    return Results(path, _digest(bench), recorded)


def _digest(bench: Workbench) -> str:
    """Return a digest of what results depend on: the model, the tool, its options and samples."""
    original = bench.original
    files = [original, *(require_data_file(original, name) for name in load(original).data_files)]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    parts = (bench.to, bench.preprocess, import_onnxruntime().__version__, digest.hexdigest(),
             _samples_digest(bench.samples), _samples_digest(bench.calibration))  # fmt: skip
    return record_digest(parts)


def _samples_digest(samples: Samples) -> str:
    digest = hashlib.sha256()
    for feeds in samples.feeds:
        for name, value in sorted(feeds.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()
