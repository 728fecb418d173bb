"""What came of each job, one JSON line each, and which jobs are done and unchanged since."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from modelexport.batch.jobs import BatchJob
from modelexport.errors import FileError
from modelexport.onnx_file.atomic_write import check_output_path, write_file
from modelexport.onnx_file.model_file import check_regular_file
from modelexport.source_export import source_files

DONE, SKIPPED = "done", "skipped"
FAILED, CRASHED, TIMED_OUT, OUT_OF_MEMORY = "failed", "crashed", "timed-out", "out-of-memory"
_VERSIONS = ("modelexport", "torch", "onnx", "onnxscript", "transformers")
_LIMITS = ("name", "timeout", "memory")
_WRITTEN = (
    ".onnx",
    ".onnx.data",
    "_hierarchy.json",
    "_report.md",
    "_results.jsonl",
    ".graphml",
    ".onnxdata",
)
"""Outputs may go into the folder of the model, but are no part of it."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job's end. `files` are its outputs with the SHA-256 of each; `job` is the digest of all that went in."""

    name: str
    status: str
    output: str
    seconds: float = 0.0
    message: str = ""
    hint: str | None = None
    details: tuple[str, ...] = ()
    step: str | None = None
    """What it was doing, where it did not end by itself."""
    log: tuple[str, ...] = ()
    """The last lines that it printed, where it failed."""
    exit_code: int = 0
    strategy: str | None = None
    exporter: str | None = None
    fallback_reason: str | None = None
    nodes: int | None = None
    coverage: float | None = None
    peak_memory: int | None = None
    notes: tuple[str, ...] = ()
    files: dict[str, str] = {}
    job: str | None = None

    @property
    def succeeded(self) -> bool:
        return self.status in (DONE, SKIPPED)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def job_digest(job: BatchJob, folder: Path) -> str:
    """What decides an export's outputs: its options, the local files it names, and the versions that carry it out."""
    digest = hashlib.sha256()
    told = {
        name: value for name, value in msgspec.structs.asdict(job).items() if name not in _LIMITS
    }
    plain = msgspec.to_builtins([told, dict(_versions())], str_keys=True)
    digest.update(msgspec.json.encode(plain, order="deterministic"))
    for path in _local_files(job, folder):
        digest.update(f"{path.name}\0{digest_of(path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    for name in _VERSIONS:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _local_files(job: BatchJob, folder: Path) -> list[Path]:
    """The files that a job names: a model's folder or file, the file of a factory, the inputs."""
    model = sorted(
        path for path in source_files(str(folder / job.model)) if not path.name.endswith(_WRITTEN)
    )
    specs = [] if job.input_specs is None else [folder / job.input_specs]
    return [path for path in (*model, *specs) if path.is_file()]


def is_unchanged(result: JobResult, job: BatchJob, folder: Path) -> bool:
    """Whether a job was done, and neither it nor what it wrote is another since."""
    if result.status != DONE or not result.files or result.output != job.output:
        return False
    outputs = Path(job.output).parent
    try:
        return result.job == job_digest(job, folder) and all(
            digest_of(outputs / name) == digest for name, digest in result.files.items()
        )
    except OSError:
        return False


class ResultsFile:
    """The lines of a batch; each is written as its job ends, so that they tell what is done however the batch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, JobResult]:
        """The last result of each job; a line that was cut short by the end of its batch is none."""
        try:
            check_regular_file(self.path)
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise FileError(
                f"cannot read {self.path}: {error.strerror or error}", hint="run without --resume"
            ) from error
        return {result.name: result for result in _decoded(lines)}

    def start(self, kept: Iterable[JobResult]) -> None:
        """Begin the file anew with these lines."""
        check_regular_file(self.path)
        write_file(check_output_path(self.path, suffix=""), b"".join(map(line, kept)))

    def add(self, result: JobResult) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(line(result))
        except OSError as error:
            raise FileError(
                f"cannot write {self.path}: {error.strerror or error}",
                hint="choose another --output-dir",
            ) from error


def line(result: JobResult) -> bytes:
    """A result as one line of JSON."""
    return msgspec.json.encode(result) + b"\n"


def _decoded(lines: Iterable[bytes]) -> Iterator[JobResult]:
    for text in lines:
        try:
            yield msgspec.json.decode(text, type=JobResult)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
