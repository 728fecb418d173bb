"""Run the jobs of a batch on this machine or on a Ray cluster, each in its own process."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import CRASHED, JobResult
from modelexport.batch.supervisor import StoppedError, run_job
from modelexport.errors import ArgumentError, SourceError, first_line

EXECUTORS = ("process", "ray")
_TICK = 0.25
_PROBE, _CONNECT = 5, 60


class ProcessExecutor:
    """Runs a number of jobs at a time on this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._stopped = threading.Event()
        self._started: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(workers)

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        """Run jobs until all have ended; each thread of the pool supervises one process.

        Args:
            jobs: The jobs.

        Yields:
            Several times a second, the results of the jobs that have ended since; often none.
        """
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
        if importlib.util.find_spec("ray") is None:
            raise SourceError(
                "the package ray is not installed", hint="pip install 'modelexport[ray]'"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = importlib.import_module("ray")
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
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_CONNECT)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {_CONNECT} s")
        if errors:
            raise errors[0]

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        """Run jobs until all have ended; Ray decides when and where each runs.

        Args:
            jobs: The jobs.

        Yields:
            Several times a second, the results of the jobs that have ended since; often none.
        """
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


Executor = ProcessExecutor | RayExecutor


def _probe(address: str) -> None:
    """Raise if nothing listens at an address; one without a port is resolved by Ray."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE).close()


def make_executor(name: str, folder: Path, workers: int, ray_address: str | None) -> Executor:
    """Make an executor.

    Args:
        name: One of `EXECUTORS`.
        folder: The folder that the paths of the jobs start from.
        workers: How many jobs run at a time.
        ray_address: The cluster to connect to; None starts a local one.

    Returns:
        The executor, connected and ready.

    Raises:
        ArgumentError: There is no such executor, or the cluster cannot be reached.
        SourceError: Ray is not installed.
    """
    if name not in EXECUTORS:
        raise ArgumentError(f"there is no executor {name!r}", hint=f"known: {', '.join(EXECUTORS)}")
    if name == "ray":
        return RayExecutor(folder, workers, ray_address)
    if ray_address is not None:
        raise ArgumentError("a Ray address needs the executor ray", hint="add --executor ray")
    return ProcessExecutor(folder, workers)
