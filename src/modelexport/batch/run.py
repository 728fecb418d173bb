"""export_batch(): many exports, of which none takes another down."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from modelexport.batch.executors import EXECUTORS, make_executor
from modelexport.batch.jobs import Batch, BatchJob, given_jobs, read_jobs
from modelexport.batch.results import SKIPPED, JobResult, ResultsFile, is_unchanged
from modelexport.errors import ArgumentError, FileError
from modelexport.onnx_file.model_file import StrPath

_MOST_WORKERS = 8


class Listener(Protocol):
    """Who wants to know how a batch is getting on."""

    def ended(self, result: JobResult) -> None:
        """A job has its result."""

    def waiting(self, running: dict[str, float]) -> None:
        """Nothing happened for a moment; these are the jobs under way, with their seconds."""


def export_batch(
    jobs: Sequence[Mapping[str, Any] | BatchJob] | StrPath,
    *,
    defaults: Mapping[str, Any] | None = None,
    output_dir: StrPath | None = None,
    executor: str = EXECUTORS[0],
    workers: int | None = None,
    ray_address: str | None = None,
    resume: bool = False,
    results: StrPath | None = None,
    on_result: Callable[[JobResult], None] | None = None,
) -> list[JobResult]:
    """Carry out many exports, each in a process of its own, and return a result for each, in the order of the jobs.

    `jobs` are dicts with the options of `modelexport export` (`model`, `output`, `strategy`, ...; a `timeout` in
    seconds and a `memory` limit such as "4 GiB" too), or the path of a TOML or JSON file of such; `defaults` are what
    they share. A job that fails, crashes, hangs or runs out of memory is a result with that status; nothing is raised.
    `results` is a file that gets a line for each job, in the folder of the outputs if it is not named; with `resume`,
    jobs that it says are done are skipped, if neither they nor their outputs have changed since.
    """
    if isinstance(jobs, str | os.PathLike):
        batch = read_jobs(jobs, output_dir, defaults)
    else:
        batch = given_jobs(jobs, output_dir, defaults)
    path = batch.results if results is None else Path(results)
    return run_batch(batch, path, executor, workers, ray_address, resume, _Telling(on_result))


def run_batch(
    batch: Batch,
    results: Path,
    executor: str,
    workers: int | None,
    ray_address: str | None,
    resume: bool,
    listener: Listener,
) -> list[JobResult]:
    """The results of all jobs in their order. When it is interrupted, every process is ended first."""
    at_once = checked_workers(workers, len(batch.jobs))
    try:
        batch.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot create {batch.output_dir}: {error.strerror}",
            hint="choose another --output-dir",
        ) from error
    file = ResultsFile(results)
    earlier = file.read() if resume else {}
    unchanged = {
        job.name: earlier[job.name]
        for job in batch.jobs
        if job.name in earlier and is_unchanged(earlier[job.name], job, batch.folder)
    }
    left = [job for job in batch.jobs if job.name not in unchanged]
    engine = make_executor(executor, batch.folder, at_once, ray_address) if left else None
    found: dict[str, JobResult] = {}
    try:
        file.start(unchanged.values())
        for name, result in unchanged.items():
            found[name] = msgspec.structs.replace(result, status=SKIPPED)
            listener.ended(found[name])
        if engine is not None:
            for ended in engine.results(left):
                for result in ended:
                    file.add(result)
                    found[result.name] = result
                    listener.ended(result)
                listener.waiting(engine.running())
    except BaseException:
        if engine is not None:
            engine.stop()
        raise
    return [found[job.name] for job in batch.jobs]


def checked_workers(workers: int | None, jobs: int) -> int:
    """How many jobs run at once: what is asked for, or one a core up to 8, but no more than there are jobs."""
    if workers is not None and workers < 1:
        raise ArgumentError(f"{workers} workers cannot do anything", hint="give 1 or more")
    return min(workers or min(os.cpu_count() or 1, _MOST_WORKERS), jobs)


class _Telling:
    def __init__(self, on_result: Callable[[JobResult], None] | None) -> None:
        self._on_result = on_result

    def ended(self, result: JobResult) -> None:
        if self._on_result is not None:
            self._on_result(result)

    def waiting(self, running: dict[str, float]) -> None:
        """Nobody asked."""
