"""Run a function in its own process, with limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

_MEMORY = 40 << 30
_FORKING = threading.RLock()


class LimitError(Exception):
    """The process ended without a result."""


def run_isolated(function: Callable[[], Any], seconds: float) -> Any:
    """Run a function in a forked process, and return its result as plain JSON values.

    The process is killed when its time is up; a LimitError is raised if there is no result.
    """
    with _FORKING:  # or the child of another thread would inherit this pipe and keep it open
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(int(seconds) + 5)  # also ends processes that it forks itself
            os.setsid()
            _run(function, writer)
        os.close(writer)
    try:
        answer = _read_all(reader, seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        raise LimitError(f"took more than {seconds:.0f} s")
    if not answer:
        raise LimitError(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    return msgspec.json.decode(answer)


def _run(function: Callable[[], Any], writer: int) -> None:
    """Child process: write the result to the pipe and exit; drop what torch prints."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        content = memoryview(msgspec.json.encode(function()))
        while content:
            content = content[os.write(writer, content) :]
    finally:
        os._exit(0)


def _read_all(reader: int, seconds: float) -> bytes | None:
    """Read a pipe to its end; None if that takes too long."""
    deadline = time.monotonic() + seconds
    content = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return content
        content += chunk
