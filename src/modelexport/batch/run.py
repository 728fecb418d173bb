"""Run many exports on this machine or on a Ray cluster; if one fails, the others go on."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from modelexport.batch.jobs import Batch, BatchJob, given_jobs, read_jobs
from modelexport.batch.results import CRASHED, SKIPPED, JobResult, ResultsFile, is_unchanged
from modelexport.batch.supervisor import StoppedError, run_job
from modelexport.errors import ArgumentError, FileError, first_line
from modelexport.onnx_file.model_file import StrPath
from modelexport.option_values import spell_option
from modelexport.packages import import_package, require_package

EXECUTORS = ("process", "ray")
_MOST_WORKERS = 8
_TICK = 0.25
_PROBE, _CONNECT = 5, 60


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
    """Run the jobs of a batch, as `export_batch` does; an interruption kills all their processes.

    `on_wait` is called several times a second with the running jobs and their seconds.
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
    engine: ProcessExecutor | RayExecutor | None,
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
    """Choose how many jobs run at a time: by default one per core, up to 8."""
    if workers is not None and workers < 1:
        raise ArgumentError(
            f"{spell_option('workers')} must be 1 or more, got {workers}", hint="leave it out"
        )
    return min(workers or min(os.cpu_count() or 1, _MOST_WORKERS), jobs)


class ProcessExecutor:
    """Runs a number of jobs at a time on this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        require_package("torch")  # one error, not one for each job
        self._folder = folder
        self._workers = workers
        self._stopped = threading.Event()
        self._started: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(workers)

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        """Run jobs; yield several times a second those that have ended since, often none."""
        pending: set[Future[JobResult]] = {self._pool.submit(self._run, job) for job in jobs}
        while pending:
            ended, pending = wait(pending, _TICK, FIRST_COMPLETED)
            yield [future.result() for future in ended]
        self._pool.shutdown()

    def _run(self, job: BatchJob) -> JobResult:
        """Run one job in this thread."""
        if self._stopped.is_set():
            raise StoppedError
        self._started[job.name] = time.monotonic()
        try:
            return run_job(job, self._folder, self._workers, self._stopped.is_set)
        finally:
            del self._started[job.name]

    def running(self) -> dict[str, float]:
        """Return the names of the running jobs with their seconds."""
        return {name: time.monotonic() - start for name, start in self._started.copy().items()}

    def stop(self) -> None:
        """Kill all jobs, and wait until their processes have ended; they get no result."""
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


class RayExecutor:
    """Runs each job as a Ray task, which runs the job in a process of its own.

    Ray may reuse the process of a task, and a crash or a memory limit would hit that process.
    """

    def __init__(self, folder: Path, workers: int, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray = import_package("ray")
        self._folder = folder
        self._workers = workers
        self._tasks: dict[Any, BatchJob] = {}
        is_local = address is None or address == "local"
        try:
            if is_local:
                self._init("local", num_cpus=workers, include_dashboard=False)
            else:
                self._connect(str(address))
        except Exception as error:  # Ray raises many unrelated kinds
            action, hint = "start a local Ray", "leave --executor ray out"
            if not is_local:
                action = f"reach the Ray cluster at {address}"
                hint = (
                    "check --ray-address; for a cluster with token authentication, "
                    "set RAY_AUTH_MODE=token"
                )
            raise ArgumentError(f"cannot {action}: {first_line(error)}", hint=hint) from error

    def _init(self, address: str, **options: Any) -> None:
        """Initialize Ray without its own log."""
        self._ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)

    def _connect(self, address: str) -> None:
        """Connect to a cluster, in a thread: ray.init ignores Ctrl-C while a cluster is silent."""
        _probe(address)
        errors: list[Exception] = []

        def connect() -> None:
            try:
                self._init(address)
            except Exception as error:  # raised again by the thread that waits
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_CONNECT)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {_CONNECT} s")
        if errors:
            raise errors[0]

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        """Run jobs as above; Ray decides when and where each runs."""
        task = self._ray.remote(num_cpus=1, max_retries=0)(run_job)
        self._tasks = {task.remote(job, self._folder, self._workers): job for job in jobs}
        while self._tasks:
            ended, _ = self._ray.wait(list(self._tasks), timeout=_TICK)
            yield [self._result(reference) for reference in ended]
        self._ray.shutdown()

    def _result(self, reference: Any) -> JobResult:
        """Return the result of a task; a task that Ray lost is a crash."""
        job = self._tasks.pop(reference)
        try:
            result: JobResult = self._ray.get(reference)
        except Exception as error:  # a machine or one of Ray's own processes died
            return JobResult(
                name=job.name,
                status=CRASHED,
                output=job.output,
                message=f"Ray lost the job: {type(error).__name__}: {first_line(error)}",
                hint="run again with --resume",
            )
        return result

    def running(self) -> dict[str, float]:
        """Return nothing: only Ray knows which tasks have started."""
        return {}

    def stop(self) -> None:
        """Cancel all tasks; the watchdog of each job kills its processes."""
        for reference in self._tasks:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _probe(address: str) -> None:
    """Raise if nothing listens at an address; one without a port is resolved by Ray."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE).close()


def make_executor(
    name: str, folder: Path, workers: int, ray_address: str | None
) -> ProcessExecutor | RayExecutor:
    """Make an executor, connected and ready; without an address, Ray is started locally."""
    if name not in EXECUTORS:
        raise ArgumentError(f"there is no executor {name!r}", hint=f"known: {', '.join(EXECUTORS)}")
    if name == "ray":
        return RayExecutor(folder, workers, ray_address)
    if ray_address is not None:
        raise ArgumentError("a Ray address needs the executor ray", hint="add --executor ray")
    return ProcessExecutor(folder, workers)
