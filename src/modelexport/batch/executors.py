"""Where the jobs of a batch run: in processes of this machine, or on a Ray cluster. Either way each has its own."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import CRASHED, JobResult
from modelexport.batch.supervisor import StoppedError, run_job
from modelexport.errors import ArgumentError, SourceError, first_line

EXECUTORS = ("process", "ray")
_TICK = 0.25
_PROBE, _CONNECT = 5, 60


class Executor(Protocol):
    """Runs jobs. `results` gives what has ended now and then, nothing if nothing has, until all have ended."""

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]: ...

    def running(self) -> dict[str, float]:
        """The jobs under way, as far as it is known, with the seconds that each has taken."""

    def stop(self) -> None:
        """End all jobs; those that have not ended have no result."""


class ProcessExecutor:
    """A number of jobs at a time on this machine."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._stopped = threading.Event()
        self._started: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(workers)

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        waiting: set[Future[JobResult]] = {self._pool.submit(self._run, job) for job in jobs}
        while waiting:
            ended, waiting = wait(waiting, _TICK, FIRST_COMPLETED)
            yield [future.result() for future in ended]
        self._pool.shutdown()

    def _run(self, job: BatchJob) -> JobResult:
        if self._stopped.is_set():
            raise StoppedError
        self._started[job.name] = time.monotonic()
        try:
            return run_job(job, self._folder, self._workers, self._stopped.is_set)
        finally:
            del self._started[job.name]

    def running(self) -> dict[str, float]:
        return {name: time.monotonic() - start for name, start in self._started.copy().items()}

    def stop(self) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)


class RayExecutor:
    """Ray decides where a job runs and when: a task for each, which gives the job to a process of its own there."""

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
        try:
            if address is None or address == "local":
                self._init("local", num_cpus=workers, include_dashboard=False)
            else:
                self._connect(address)
        except Exception as error:  # Ray raises many unrelated kinds
            where, hint = "start a local Ray", "leave --executor ray out"
            if address not in (None, "local"):
                where = f"reach the Ray cluster at {address}"
                hint = "check --ray-address; for a cluster with token authentication, set RAY_AUTH_MODE=token"
            raise ArgumentError(f"cannot {where}: {first_line(error)}", hint=hint) from error

    def _init(self, address: str, **options: Any) -> None:
        self._ray.init(address=address, logging_level="ERROR", log_to_driver=False, **options)

    def _connect(self, address: str) -> None:
        """Join a cluster. Ray waits for one that does not answer, deaf to Ctrl-C; so it does that in a thread."""
        _probe(address)
        failed: list[Exception] = []

        def join() -> None:
            try:
                self._init(address)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(_CONNECT)
        if thread.is_alive():
            raise TimeoutError(f"no answer within {_CONNECT} s")
        if failed:
            raise failed[0]

    def results(self, jobs: Iterable[BatchJob]) -> Iterator[list[JobResult]]:
        task = self._ray.remote(num_cpus=1, max_retries=0)(run_job)
        self._tasks = {task.remote(job, self._folder, self._workers): job for job in jobs}
        while self._tasks:
            ended, _ = self._ray.wait(list(self._tasks), timeout=_TICK)
            yield [self._result(reference) for reference in ended]
        self._ray.shutdown()

    def _result(self, reference: Any) -> JobResult:
        job = self._tasks.pop(reference)
        try:
            result: JobResult = self._ray.get(reference)
        except Exception as error:  # the node or Ray's own process is gone, not the job alone
            message = f"Ray lost the job: {type(error).__name__}: {first_line(error)}"
            return JobResult(
                name=job.name,
                status=CRASHED,
                output=job.output,
                message=message,
                hint="run again with --resume",
            )
        return result

    def running(self) -> dict[str, float]:
        return {}

    def stop(self) -> None:
        for reference in self._tasks:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


def _probe(address: str) -> None:
    """Raise if nothing listens at an address; one without a port is Ray's to find."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE).close()


def make_executor(name: str, folder: Path, workers: int, ray_address: str | None) -> Executor:
    """The executor of this name."""
    if name not in EXECUTORS:
        raise ArgumentError(f"there is no executor {name!r}", hint=f"known: {', '.join(EXECUTORS)}")
    if name == "ray":
        return RayExecutor(folder, workers, ray_address)
    if ray_address is not None:
        raise ArgumentError("a Ray address without the executor ray", hint="add --executor ray")
    return ProcessExecutor(folder, workers)
