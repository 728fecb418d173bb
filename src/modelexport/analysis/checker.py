"""ONNX's own checker. For a large file it runs in a process of its own, at the same time as everything else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import onnx

_LARGE = 4 << 20
_MOST = 1 << 15
"""A complaint that fits into a pipe."""

Answer = Callable[[], str | None]
"""What the checker complains of, or None; asking waits for it."""


@contextmanager
def checking(path: Path) -> Iterator[Answer]:
    """The full check of a file, under way while the block runs."""
    if path.stat().st_size < _LARGE or not _may_fork():
        yield lambda: complaint(path)
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(path, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        status: int | None = None

        def answer() -> str | None:
            nonlocal status
            told = pipe.read().decode("utf-8", "replace")
            _, status = os.waitpid(child, 0)
            return told or (f"the checker stopped with status {status}" if status else None)

        try:
            yield answer
        finally:
            if status is None:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _may_fork() -> bool:
    """A copy of this process has one thread; others, torch's above all, may hold what the checker needs."""
    return hasattr(os, "fork") and threading.active_count() == 1 and "torch" not in sys.modules


def _answer(path: Path, pipe: int) -> None:
    """What the child does: tell, and be gone without a trace."""
    status = 1
    try:
        os.write(pipe, (complaint(path) or "").encode()[:_MOST])
        status = 0
    finally:
        os._exit(status)


def complaint(path: Path) -> str | None:
    """What ONNX's full check complains of, or None."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated kinds
        return str(error).strip() or type(error).__name__
    return None
