"""Run many exports, so that the failure of one leaves the others alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.batch.executors import EXECUTORS, Executor, make_executor
from modelexport.batch.jobs import Batch, BatchJob, given_jobs, read_jobs
from modelexport.batch.results import SKIPPED, JobResult, ResultsFile, is_unchanged
from modelexport.errors import ArgumentError, FileError
from modelexport.onnx_file.model_file import StrPath

_MOST_WORKERS = 8


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
    """Run many exports, each in a process of its own.

    A job that fails, crashes, hangs or runs out of memory is a result with that status; nothing is
    raised for it.

    Args:
        jobs: Dicts with the options of `modelexport export` (`model`, `output`, `strategy`, ...),
            a `timeout` in seconds and a `memory` limit such as "4 GiB"; or the path of a TOML or
            JSON file with such jobs.
        defaults: The options that the jobs share.
        output_dir: The folder that relative outputs go to.
        executor: "process" for this machine, "ray" for a Ray cluster.
        workers: How many jobs run at a time; by default one per core, up to 8.
        ray_address: The Ray cluster; by default a local one is started.
        resume: Skip the jobs that are done according to `results`, if neither they nor their
            outputs have changed since.
        results: The file that gets a line of JSON for each job; by default one in the folder of
            the outputs.
        on_result: Called with each result as its job ends.

    Returns:
        The results, in the order of the jobs.

    Raises:
        ModelExportError: The list of jobs, an option or the results file is wrong.
    """
    if isinstance(jobs, str | os.PathLike):
        batch = read_jobs(jobs, output_dir, defaults)
    else:
        batch = given_jobs(jobs, output_dir, defaults)
    path = batch.results if results is None else Path(results)
    return run_batch(batch, path, executor, workers, ray_address, resume, on_result=on_result)


def run_batch(
    batch: Batch,
    results: Path,
    executor: str,
    workers: int | None,
    ray_address: str | None,
    resume: bool,
    *,
    on_result: Callable[[JobResult], None] | None = None,
    on_wait: Callable[[dict[str, float]], None] | None = None,
) -> list[JobResult]:
    """Run the jobs of a batch; when it is interrupted, all their processes are killed first.

    Args:
        batch: The jobs and their folders.
        results: The file that gets a line for each job.
        executor: The name of the executor.
        workers: How many jobs run at a time; None chooses.
        ray_address: The Ray cluster, for the executor ray.
        resume: Skip the jobs that are done and unchanged.
        on_result: Called with each result as its job ends.
        on_wait: Called several times a second with the running jobs and their seconds.

    Returns:
        The results, in the order of the jobs.

    Raises:
        ModelExportError: A folder, the results file or the executor cannot be used.
    """
    at_once = choose_workers(workers, len(batch.jobs))
    try:
        batch.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"cannot create {batch.output_dir}: {error.strerror}",
            hint="choose another --output-dir",
        ) from error
    file = ResultsFile(results)
    unchanged = _find_unchanged(batch, file) if resume else {}
    left = [job for job in batch.jobs if job.name not in unchanged]
    # The executor first: if it cannot start, the file keeps the results of the run before.
    engine = make_executor(executor, batch.folder, at_once, ray_address) if left else None
    ended: dict[str, JobResult] = {}
    try:
        file.start(unchanged.values())
        skipped = [msgspec.structs.replace(result, status=SKIPPED) for result in unchanged.values()]
        for result in itertools.chain(skipped, _run(engine, left, file, on_wait)):
            ended[result.name] = result
            if on_result is not None:
                on_result(result)
    except BaseException:
        if engine is not None:
            engine.stop()
        raise
    return [ended[job.name] for job in batch.jobs]


def _run(
    engine: Executor | None,
    jobs: list[BatchJob],
    file: ResultsFile,
    on_wait: Callable[[dict[str, float]], None] | None,
) -> Iterator[JobResult]:
    """Run jobs; each result is in the file before it is yielded."""
    if engine is None:
        return
    for ended in engine.results(jobs):
        for result in ended:
            file.add(result)
            yield result
        if on_wait is not None:
            on_wait(engine.running())


def _find_unchanged(batch: Batch, file: ResultsFile) -> dict[str, JobResult]:
    """Find the earlier results of the jobs that need not run again."""
    earlier = file.read()
    return {
        job.name: earlier[job.name]
        for job in batch.jobs
        if job.name in earlier and is_unchanged(earlier[job.name], job, batch.folder)
    }


def choose_workers(workers: int | None, jobs: int) -> int:
    """Choose how many jobs run at a time.

    Args:
        workers: The number that the user asks for; None for one per core, up to 8.
        jobs: The number of jobs, which is the limit.

    Returns:
        The number of workers.

    Raises:
        ArgumentError: The number is below 1.
    """
    if workers is not None and workers < 1:
        raise ArgumentError(f"workers must be 1 or more, got {workers}", hint="leave it out")
    return min(workers or min(os.cpu_count() or 1, _MOST_WORKERS), jobs)
