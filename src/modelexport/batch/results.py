"""Record what became of each job as a line of JSON, and decide which jobs are unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from modelexport.batch.jobs import BatchJob
from modelexport.errors import FileError
from modelexport.onnx_file.atomic_write import check_output_path, write_file
from modelexport.onnx_file.model_file import check_regular_file
from modelexport.source_export import source_files
from modelexport.tagged.records import UNREADABLE

DONE, SKIPPED = "done", "skipped"
FAILED, CRASHED, TIMED_OUT, OUT_OF_MEMORY = "failed", "crashed", "timed-out", "out-of-memory"
_VERSIONS = ("modelexport", "torch", "onnx", "onnxscript", "transformers")
_LIMITS = ("name", "timeout", "memory")
"""Fields of a job that have no influence on its outputs."""
_WRITTEN = (
    ".onnx",
    ".onnx.data",
    "_hierarchy.json",
    "_generation.json",
    "_report.md",
    ".html",
    "_results.jsonl",
    ".graphml",
    ".onnxdata",
)
"""Endings of outputs; a model's folder may hold them, and they are no part of the model."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one job."""

    name: str
    status: str
    output: str
    seconds: float = 0.0
    message: str = ""
    hint: str | None = None
    details: tuple[str, ...] = ()
    step: str | None = None
    """The last step that began, if the job did not succeed."""
    log: tuple[str, ...] = ()
    """The last lines that the job printed, if it did not succeed."""
    exit_code: int = 0
    strategy: str | None = None
    exporter: str | None = None
    fallback_reason: str | None = None
    nodes: int | None = None
    coverage: float | None = None
    peak_memory: int | None = None
    notes: tuple[str, ...] = ()
    files: dict[str, str] = {}
    """The outputs, each with its SHA-256."""
    job: str | None = None
    """The digest of everything that decides the outputs."""

    @property
    def succeeded(self) -> bool:
        """Whether the outputs are there."""
        return self.status in (DONE, SKIPPED)


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def job_digest(job: BatchJob, folder: Path) -> str:
    """Compute a digest of what decides the outputs of a job: options, local files, versions."""
    digest = hashlib.sha256()
    options = {
        name: value for name, value in msgspec.structs.asdict(job).items() if name not in _LIMITS
    }
    plain = msgspec.to_builtins([options, dict(_versions())], str_keys=True)
    digest.update(msgspec.json.encode(plain, order="deterministic"))
    for path in _local_files(job, folder):
        digest.update(f"{path.name}\0{file_digest(path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    """Yield the packages that decide an export, with their versions."""
    import importlib.metadata

    for name in _VERSIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _local_files(job: BatchJob, folder: Path) -> list[Path]:
    """List the files that a job names: those of the model, the factory's file, the inputs."""
    model = sorted(
        path for path in source_files(str(folder / job.model)) if not path.name.endswith(_WRITTEN)
    )
    specs = [] if job.input_specs is None else [folder / job.input_specs]
    return [path for path in (*model, *specs) if path.is_file()]


def is_unchanged(result: JobResult, job: BatchJob, folder: Path) -> bool:
    """Return whether a job is done, and neither it nor its outputs have changed since."""
    if result.status != DONE or not result.files or result.output != job.output:
        return False
    outputs = Path(job.output).parent
    try:
        return result.job == job_digest(job, folder) and all(
            file_digest(outputs / name) == digest for name, digest in result.files.items()
        )
    except OSError:
        return False


class ResultsFile:
    """The results of a batch, a line each.

    A line is written as its job ends, so that the file is right however the batch ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, JobResult]:
        """Read the last result of each job; lines that are no results are passed over."""
        try:
            check_regular_file(self.path)
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise FileError(
                f"cannot read {self.path}: {error.strerror or error}", hint="run without --resume"
            ) from error
        return {result.name: result for result in _decode(lines)}

    def start(self, kept: Iterable[JobResult]) -> None:
        """Rewrite the file with the results that are kept."""
        check_regular_file(self.path)
        write_file(check_output_path(self.path, suffix=""), b"".join(map(_encode, kept)))

    def add(self, result: JobResult) -> None:
        """Append a result."""
        try:
            with self.path.open("ab") as file:
                file.write(_encode(result))
        except OSError as error:
            raise FileError(
                f"cannot write {self.path}: {error.strerror or error}",
                hint="choose another --output-dir",
            ) from error


def _encode(result: JobResult) -> bytes:
    """Encode a result as a line of JSON."""
    return msgspec.json.encode(result) + b"\n"


def _decode(lines: Iterable[bytes]) -> Iterator[JobResult]:
    """Decode the lines that are results."""
    for text in lines:
        try:
            yield msgspec.json.decode(text, type=JobResult)
        except UNREADABLE:
            continue
