"""ONNX's own checker. For a large file it runs in a process of its own, at the same time as everything else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

_LARGE = 8 << 20

Answer = Callable[[], str | None]
"""What the checker complains of, or None; asking waits for it."""


@contextmanager
def checking(path: Path) -> Iterator[Answer]:
    """The full check of a file, under way while the block runs."""
    if path.stat().st_size < _LARGE or not sys.executable:
        yield lambda: complaint(path)
        return
    command = [sys.executable, "-P", "-m", __name__, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:

        def answer() -> str | None:
            told, _ = process.communicate()
            if process.returncode:
                return f"the checker stopped with status {process.returncode}"
            return told or None

        try:
            yield answer
        finally:
            process.kill()


def complaint(path: Path) -> str | None:
    """What ONNX's full check complains of, or None."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated kinds
        return str(error).strip() or type(error).__name__
    return None


if __name__ == "__main__":
    print(complaint(Path(sys.argv[1])) or "", end="")
