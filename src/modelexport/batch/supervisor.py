"""Run one job in a process of its own and wait for its end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from modelexport.batch import watchdog
from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import CRASHED, OUT_OF_MEMORY, TIMED_OUT, JobResult
from modelexport.batch.worker import JobRequest, WorkerMessage
from modelexport.onnx_file.atomic_write import settle_dead_runs

_TICK = 0.2
_CHUNK = 1 << 16
_LOG_LINES, _LONGEST_LINE = 20, 500
_NO_MEMORY = b"bad_alloc"
_LAST_READS = 1000
_CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")


class StoppedError(Exception):
    """The batch is stopped; the job has no result."""


def run_job(
    job: BatchJob, folder: Path, share: int, stopped: Callable[[], bool] = lambda: False
) -> JobResult:
    """Run one job and wait for its end; a `share` of the machine's memory and cores is what it may take."""
    start = time.monotonic()
    memory = job.memory_bytes or physical_memory() // share
    try:
        result = _run(
            job, folder, JobRequest(job, memory, max(1, (os.cpu_count() or 1) // share)), stopped
        )
    except StoppedError:
        raise
    except Exception as error:  # no job takes another one down
        message = f"its process could not be run: {type(error).__name__}: {error}"
        result = JobResult(
            name=job.name, status=CRASHED, output=job.output, message=message, exit_code=3
        )
    return msgspec.structs.replace(result, seconds=round(time.monotonic() - start, 3))


def _run(job: BatchJob, folder: Path, order: JobRequest, stopped: Callable[[], bool]) -> JobResult:
    deadline = time.monotonic() + job.timeout
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "modelexport.batch.worker",
        ],  # -P: no file of the folder is taken for a module
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    reading = _Reading(process)
    holder = None
    try:
        holder = _start_watchdog(process.pid)
        holder.wait()
        reading.give(msgspec.json.encode(order))
        timed_out = reading.until_end(deadline, stopped)
    finally:
        _kill(process)
        settle_dead_runs((folder / job.output).parent)
        reading.close()
        if holder is not None:
            holder.communicate(b"ended")
    result = reading.result
    if result is None or timed_out:
        result = _without_answer(job, reading, timed_out)
    if result.status == OUT_OF_MEMORY:
        result = _for_memory(result, order.memory)
    return (
        result
        if result.succeeded
        else msgspec.structs.replace(result, step=reading.step, log=reading.log_lines())
    )


def _start_watchdog(group: int) -> subprocess.Popen[bytes]:
    """Start a process whose input ends with this process, to kill a process group then."""
    return subprocess.Popen(
        # -I -S: it needs no package, and nothing of the environment reaches it.
        [sys.executable, "-I", "-S", watchdog.__file__, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
        cwd="/",
    )


def physical_memory() -> int:
    """The memory in bytes of the machine, or of the container that this is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(machine, int(_CONTAINER_MEMORY.read_text()))
    return machine


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the job and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Reading:
    """What a worker tells and prints, up to now."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.step: str | None = None
        self.result: JobResult | None = None
        self._process = process
        self._pipes = (process.stdin, process.stdout, process.stderr)
        self._told = b""
        self._log: deque[bytes] = deque(maxlen=_LOG_LINES + 1)
        self._selector = selectors.DefaultSelector()
        for pipe, take in ((process.stdout, self._take_told), (process.stderr, self._take_log)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, take)

    def give(self, order: bytes) -> None:
        with suppress(BrokenPipeError):  # it died at once, and says so by its exit code
            self._pipes[0].write(order)
            self._pipes[0].close()

    def until_end(self, deadline: float, stopped: Callable[[], bool]) -> bool:
        """Wait for the result or the end of the process; True if neither came in time."""
        while self.result is None and self._process.poll() is None:
            if stopped():
                raise StoppedError
            if time.monotonic() > deadline:
                return True
            self._take(_TICK)
        for _ in range(_LAST_READS):
            if not self._take(0):
                break
        return False

    def _take(self, seconds: float) -> bool:
        """Read what there is; False if that is nothing."""
        some = False
        for key, _ in self._selector.select(seconds):
            chunk = os.read(key.fd, _CHUNK)
            if chunk:
                key.data(chunk)
                some = True
            else:
                self._selector.unregister(key.fd)
        return some

    def _take_told(self, chunk: bytes) -> None:
        *lines, self._told = (self._told + chunk).split(b"\n")
        for line in lines:
            try:
                told = msgspec.json.decode(line, type=WorkerMessage)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # the model's code wrote where it has no business
            self.step = told.step or self.step
            self.result = told.result or self.result

    def _take_log(self, chunk: bytes) -> None:
        last = self._log.pop() if self._log else b""
        self._log.extend((last[-_CHUNK:] + chunk).split(b"\n"))

    def log_lines(self) -> tuple[str, ...]:
        """The last lines that it printed."""
        lines = (line.decode("utf-8", "replace").rstrip()[:_LONGEST_LINE] for line in self._log)
        return tuple(line for line in lines if line)

    @property
    def exit_code(self) -> int:
        return int(self._process.returncode)

    def printed(self, word: bytes) -> bool:
        return any(word in line for line in self._log)

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.close()


def _without_answer(job: BatchJob, reading: _Reading, timed_out: bool) -> JobResult:
    """A result for a process that gave none."""
    step = f"; its last step: {reading.step}" if reading.step else ""
    if timed_out:
        status, message = TIMED_OUT, f"no result within {job.timeout:g} s{step}"
        hint = "give it more time with timeout or --timeout, or look at what it was doing"
    elif reading.printed(_NO_MEMORY):
        status, message, hint = OUT_OF_MEMORY, "", ""
    else:
        code = reading.exit_code
        why = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        end = f"exit code {code}" if code >= 0 else f"{_signal_name(-code)}{why}"
        status, message = CRASHED, f"its process ended with {end}{step}"
        hint = "run it by itself with modelexport export -v to see what it prints"
    return JobResult(
        name=job.name, status=status, output=job.output, message=message, hint=hint, exit_code=3
    )


def _for_memory(result: JobResult, memory: int) -> JobResult:
    return msgspec.structs.replace(
        result,
        message=f"it needs more memory than its limit of {_size(memory)}",
        hint="give it more with memory or --memory, or run fewer jobs at once with --workers",
        details=(result.message,) if result.message else (),
        exit_code=3,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _size(memory: int) -> str:
    return f"{memory / (1 << 30):.3g} GiB" if memory >= 1 << 30 else f"{memory / (1 << 20):.3g} MiB"
