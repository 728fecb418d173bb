"""The process of one job: `python -m modelexport.batch.worker`.

It reads its job from standard input and tells, a line of JSON each, what it is doing and at last what came of it.
Whatever the model's code prints goes elsewhere.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import DONE, FAILED, OUT_OF_MEMORY, JobResult, digest_of, job_digest
from modelexport.errors import ModelExportError, first_line
from modelexport.source_export import SourceExport, run_export

_NO_MEMORY = (os.strerror(errno.ENOMEM), "bad_alloc")
_LONGEST, _MOST_DETAILS = 2000, 50


class JobRequest(msgspec.Struct, frozen=True):
    """A job, and what it may take: memory in bytes, and threads."""

    job: BatchJob
    memory: int
    threads: int


class WorkerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker tells: its step, or its result."""

    step: str | None = None
    result: JobResult | None = None


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=JobRequest)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        _limit(order)
        _tell(
            answers,
            WorkerMessage(
                result=run(order.job, lambda step: _tell(answers, WorkerMessage(step=step)))
            ),
        )
    finally:
        os._exit(0)  # without waiting for threads that the model's code has started


def _limit(order: JobRequest) -> None:
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    limit = order.memory if highest == resource.RLIM_INFINITY else min(order.memory, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, highest))


def _tell(answers: BinaryIO, told: WorkerMessage) -> None:
    answers.write(msgspec.json.encode(told) + b"\n")


def run(job: BatchJob, on_step: Callable[[str], None]) -> JobResult:
    """Carry out one job; whatever goes wrong is a result."""
    try:
        on_step("read the job")
        digest = job_digest(job, Path.cwd())
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
        return _done(job, run_export(job.model, job.output, job, on_step), digest)
    except (
        BaseException
    ) as error:  # an exit or an interrupt in the model's code is as good as an error
        return _failed(job, error)


def _failed(job: BatchJob, error: BaseException) -> JobResult:
    status = OUT_OF_MEMORY if _is_for_memory(error) else FAILED
    if isinstance(error, ModelExportError):
        message, hint, details = error.message, error.hint, error.details
    elif not isinstance(error, Exception):
        message, hint, details = (
            f"{job.model} raised {type(error).__name__}",
            "mend the model's code",
            (),
        )
    else:
        message, hint = f"{type(error).__name__}: {_said(error)}", None
        details = tuple(traceback.format_exc(limit=-3).splitlines()) if status == FAILED else ()
    return JobResult(
        name=job.name,
        status=status,
        output=job.output,
        message=_sendable(message),
        hint=None if hint is None else _sendable(hint),
        details=tuple(map(_sendable, details[:_MOST_DETAILS])),
        exit_code=error.exit_code if isinstance(error, ModelExportError) else 3,
    )


def _said(error: BaseException) -> str:
    try:
        return first_line(error)
    except Exception:  # an error of the model's own making, that cannot even be told
        return "it says nothing"


def _sendable(text: str) -> str:
    """Text that JSON can hold, and not without end."""
    return text[:_LONGEST].encode("utf-8", "replace").decode()


def _done(job: BatchJob, done: SourceExport, digest: str) -> JobResult:
    report = done.report
    extra = (report.report_path, report.graphml_path, report.graphml_data_path, report.graph_path)
    paths = [report.onnx_path, report.sidecar_path, *report.data_paths]
    paths += [Path(path) for path in extra if path is not None]
    folder = Path(job.output).parent
    unit = 1 if sys.platform == "darwin" else 1024
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
        notes=(
            *done.notes,
            *report.notes,
            *([] if report.graphml_error is None else [f"no GraphML: {report.graphml_error}"]),
        ),
        files={os.path.relpath(path, folder): digest_of(path) for path in paths},
        job=digest,
    )


def _is_for_memory(error: BaseException) -> bool:
    """Whether it was memory that ran out, whoever noticed it: Python, torch or the C library."""
    return any(
        isinstance(found, MemoryError) or any(word in _said(found) for word in _NO_MEMORY)
        for found in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


if __name__ == "__main__":
    main()
