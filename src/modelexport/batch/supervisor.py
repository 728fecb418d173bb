"""Run one job in a process of its own, with its limits, and wait for its end."""

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

from modelexport.batch.jobs import BatchJob
from modelexport.batch.results import CRASHED, OUT_OF_MEMORY, TIMED_OUT, JobResult
from modelexport.batch.worker import JobRequest, WorkerMessage
from modelexport.onnx_file.atomic_write import recover_killed_runs
from modelexport.tagged.records import UNREADABLE

_TICK = 0.2
_CHUNK = 1 << 16
_LOG_LINES, _LONGEST_LINE = 20, 500
_NO_MEMORY = b"bad_alloc"
_LAST_READS = 1000
_CONTAINER_MEMORY = Path("/sys/fs/cgroup/memory.max")
_WATCHDOG = """
import os, signal, sys
if not os.fork() and not sys.stdin.buffer.read():
    try:
        os.killpg(int(sys.argv[1]), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
"""A program that kills a process group if its stdin ends without a word: the supervisor died.

It forks, since what kills the supervisor may kill its children as well: Ray does. The supervisor
waits for the parent's exit, and so knows that the watchdog is there.
"""


class StoppedError(Exception):
    """The batch is stopped; the job has no result."""


def run_job(
    job: BatchJob, folder: Path, share: int, stopped: Callable[[], bool] = lambda: False
) -> JobResult:
    """Run one job in a process of its own and wait for its end.

    Args:
        job: The job.
        folder: The folder that its paths start from.
        share: How many jobs share the memory and the cores of the machine.
        stopped: Asked several times a second whether the batch is stopped.

    Raises:
        StoppedError: The batch is stopped; the processes of the job are killed.
    """
    start = time.monotonic()
    memory = job.memory_bytes or _physical_memory() // share
    request = JobRequest(job, memory, max(1, (os.cpu_count() or 1) // share))
    try:
        result = _run(request, folder, stopped)
    except StoppedError:
        raise
    except Exception as error:  # the other jobs go on
        message = f"its process could not be run: {type(error).__name__}: {error}"
        result = JobResult(
            name=job.name, status=CRASHED, output=job.output, message=message, exit_code=3
        )
    return msgspec.structs.replace(result, seconds=round(time.monotonic() - start, 3))


def _physical_memory() -> int:
    """Return the bytes of memory of the machine or of the container."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(machine, int(_CONTAINER_MEMORY.read_text()))
    return machine


def _run(request: JobRequest, folder: Path, stopped: Callable[[], bool]) -> JobResult:
    """Run a worker, and make a result if it sends none."""
    job = request.job
    deadline = time.monotonic() + job.timeout
    process = subprocess.Popen(
        # -P: a file of the folder must not be imported in place of a module
        [sys.executable, "-P", "-m", "modelexport.batch.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    output = _WorkerOutput(process)
    guard = None
    try:
        guard = _start_watchdog(process.pid)
        guard.wait()  # the watchdog is there before the worker starts anything
        output.send(msgspec.json.encode(request))
        timed_out = output.read_to_end(deadline, stopped)
    finally:
        _kill(process)
        recover_killed_runs((folder / job.output).parent)
        output.close()
        if guard is not None:
            guard.communicate(b"ended")
    result = output.result
    if result is None or timed_out:
        result = _make_result(job, output, None if timed_out else process.returncode)
    if result.status == OUT_OF_MEMORY:
        result = _explain_memory(result, request.memory)
    if result.succeeded:
        return result
    return msgspec.structs.replace(result, step=output.step, log=output.log_lines())


def _start_watchdog(group: int) -> subprocess.Popen[bytes]:
    """Start a process that kills a process group when its standard input ends with this process."""
    return subprocess.Popen(
        # -I -S: it starts in milliseconds, and nothing of the environment reaches it.
        [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is not for it
        cwd="/",
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _WorkerOutput:
    """The messages that a worker sends, and the end of what it prints."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.step: str | None = None
        self.result: JobResult | None = None
        self._process = process
        self._pipes = (process.stdin, process.stdout, process.stderr)
        self._partial_line = b""
        self.log: deque[bytes] = deque(maxlen=_LOG_LINES + 1)
        self._selector = selectors.DefaultSelector()
        for pipe, take in ((process.stdout, self._take_messages), (process.stderr, self._take_log)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, take)

    def send(self, request: bytes) -> None:
        """Send the request to the worker."""
        with suppress(BrokenPipeError):  # the worker died at once; its exit code says why
            self._pipes[0].write(request)
            self._pipes[0].close()

    def read_to_end(self, deadline: float, stopped: Callable[[], bool]) -> bool:
        """Read until there is a result or the process ends; True if neither came in time."""
        while self.result is None and self._process.poll() is None:
            if stopped():
                raise StoppedError
            if time.monotonic() > deadline:
                return True
            self._read(_TICK)
        # What is left in the pipes. Bounded, since a process that the job started may still print.
        for _ in range(_LAST_READS):
            if not self._read(0):
                break
        return False

    def _read(self, seconds: float) -> bool:
        """Read what is there, or comes in time; False if that is nothing."""
        has_read = False
        for key, _ in self._selector.select(seconds):
            chunk = os.read(key.fd, _CHUNK)
            if chunk:
                key.data(chunk)
                has_read = True
            else:
                self._selector.unregister(key.fd)
        return has_read

    def _take_messages(self, chunk: bytes) -> None:
        """Decode the messages in a chunk of stdout."""
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            try:
                message = msgspec.json.decode(line, type=WorkerMessage)
            except UNREADABLE:
                continue  # the model's code wrote to the worker's pipe
            self.step = message.step or self.step
            self.result = message.result or self.result

    def _take_log(self, chunk: bytes) -> None:
        """Keep the last lines of stderr."""
        last = self.log.pop() if self.log else b""
        self.log.extend((last[-_CHUNK:] + chunk).split(b"\n"))

    def log_lines(self) -> tuple[str, ...]:
        """Return the last lines that the job printed."""
        lines = (line.decode("utf-8", "replace").rstrip()[:_LONGEST_LINE] for line in self.log)
        return tuple(line for line in lines if line)

    def close(self) -> None:
        """Close the pipes."""
        self._selector.close()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.close()


def _make_result(job: BatchJob, output: _WorkerOutput, exit_code: int | None) -> JobResult:
    """Make a result for a process that sent none in time; it has no exit code if it timed out."""
    step = f"; its last step: {output.step}" if output.step else ""
    if exit_code is None:
        status, message = TIMED_OUT, f"no result within {job.timeout:g} s{step}"
        hint = "give it more time with timeout or --timeout, or look at what it was doing"
    elif any(_NO_MEMORY in line for line in output.log):
        status, message, hint = OUT_OF_MEMORY, "", ""
    else:
        killed = exit_code == -signal.SIGKILL
        reason = ", as the system does when memory runs out" if killed else ""
        end = f"exit code {exit_code}" if exit_code >= 0 else f"{_signal_name(-exit_code)}{reason}"
        status, message = CRASHED, f"its process ended with {end}{step}"
        hint = "run it by itself with modelexport export -v to see what it prints"
    return JobResult(
        name=job.name, status=status, output=job.output, message=message, hint=hint, exit_code=3
    )


def _explain_memory(result: JobResult, memory: int) -> JobResult:
    """Name the limit that a job exceeded; its own message becomes a detail."""
    return msgspec.structs.replace(
        result,
        message=f"it needs more memory than its limit of {_format_memory(memory)}",
        hint="give it more with memory or --memory, or run fewer jobs at once with --workers",
        details=(result.message,) if result.message else (),
        exit_code=3,
    )


def _signal_name(number: int) -> str:
    """Return the name of a signal, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _format_memory(memory: int) -> str:
    """Format bytes of memory, as in `2 GiB`."""
    return f"{memory / (1 << 30):.3g} GiB" if memory >= 1 << 30 else f"{memory / (1 << 20):.3g} MiB"
