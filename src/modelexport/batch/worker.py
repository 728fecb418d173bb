"""Run one job: the process `python -m modelexport.batch.worker`.

It reads a `JobRequest` from stdin and writes a `WorkerMessage` to stdout for each step and for the
result, a line of JSON each. What the model's code prints goes to stderr.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import (
    DONE,
    FAILED,
    OUT_OF_MEMORY,
    JobResult,
    file_digest,
    job_digest,
)
from modelexport.errors import ModelExportError, causes, first_line
from modelexport.source_export import SourceExport, run_export

_NO_MEMORY = (os.strerror(errno.ENOMEM), "bad_alloc")
_LONGEST, _MOST_DETAILS = 2000, 50


class JobRequest(msgspec.Struct, frozen=True):
    """A job and its limits: bytes of memory, and threads."""

    job: BatchJob
    memory: int
    threads: int


class WorkerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a worker: the step that begins, or the result."""

    step: str | None = None
    result: JobResult | None = None


def main() -> None:
    """Read the request, run the job, and write its messages."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=JobRequest)
    # The messages keep the real stdout; prints of the model's code and of C++ go to stderr.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _apply_limits(request)
        result = run(request.job, lambda step: _send(messages, WorkerMessage(step=step)))
        _send(messages, WorkerMessage(result=result))
    except BaseException:
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    os._exit(0)  # does not wait for threads that the model's code has started


def _apply_limits(request: JobRequest) -> None:
    """Limit the threads and the memory of this process."""
    os.environ["OMP_NUM_THREADS"] = str(request.threads)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = request.memory if hard == resource.RLIM_INFINITY else min(request.memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _send(messages: BinaryIO, message: WorkerMessage) -> None:
    """Write a message as a line."""
    messages.write(msgspec.json.encode(message) + b"\n")


def run(job: BatchJob, on_step: Callable[[str], None]) -> JobResult:
    """Run one job in this process; whatever it raises becomes a result too."""
    try:
        on_step("read the job")
        digest = job_digest(job, Path.cwd())
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        return _success(job, run_export(job.model, job.output, job, on_step), digest)
    except BaseException as error:  # the model's code may exit or raise KeyboardInterrupt too
        return _failure(job, error)


def _success(job: BatchJob, done: SourceExport, digest: str) -> JobResult:
    """Make the result of an export, with the digests of its files."""
    report = done.report
    parts = report.parts.values() or (report,)
    paths = list(dict.fromkeys(path for part in parts for path in part.files))
    paths += [] if report.generation_path is None else [report.generation_path]
    folder = Path(job.output).parent
    notes = [*done.notes, *report.notes]
    if report.graphml_error is not None:
        notes.append(f"no GraphML: {report.graphml_error}")
    notes += [f"no page: {part.view_error}" for part in parts if part.view_error is not None]
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return JobResult(
        name=job.name,
        status=DONE,
        output=job.output,
        strategy=report.strategy,
        exporter=report.exporter,
        fallback_reason=report.fallback_reason,
        nodes=report.nodes,
        coverage=report.coverage,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        notes=tuple(notes),
        files={os.path.relpath(path, folder): file_digest(path) for path in paths},
        job=digest,
    )


def _failure(job: BatchJob, error: BaseException) -> JobResult:
    """Make the result of a job that raised."""
    status = OUT_OF_MEMORY if _is_out_of_memory(error) else FAILED
    hint: str | None = None
    details: tuple[str, ...] = ()
    exit_code = 3
    if isinstance(error, ModelExportError):
        message, hint, details = error.message, error.hint, error.details
        exit_code = error.exit_code
    elif isinstance(error, Exception):
        message = f"{type(error).__name__}: {_message(error)}"
        if status == FAILED:
            details = tuple(traceback.format_exc(limit=-3).splitlines())
    else:
        message, hint = f"{job.model} raised {type(error).__name__}", "fix the model's code"
    return JobResult(
        name=job.name,
        status=status,
        output=job.output,
        message=_sendable(message),
        hint=None if hint is None else _sendable(hint),
        details=tuple(map(_sendable, details[:_MOST_DETAILS])),
        exit_code=exit_code,
    )


def _message(error: BaseException) -> str:
    """Return the first line of an error's message."""
    try:
        return first_line(error)
    except Exception:  # str() of an error that the model's code defines may raise
        return "it has no message"


def _sendable(text: str) -> str:
    """Truncate text, and replace what JSON cannot hold."""
    return text[:_LONGEST].encode("utf-8", "replace").decode()


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, as Python, torch or the C library reports it."""
    return any(
        isinstance(cause, MemoryError) or any(word in _message(cause) for word in _NO_MEMORY)
        for cause in causes(error)
    )


if __name__ == "__main__":
    main()
