"""Ends what a killed run had begun: moves that were under way are completed, all else of it is removed.

Run as a program, this file waits until the process at the other end of its input is gone, however it ended, and then
does that for the folders it is given. It imports nothing but Python's own library, so as to start at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: nothing is taken for dead
    fcntl = None  # type: ignore[assignment]

PREFIX = ".modelexport-"
_MOVES = "moves.json"


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """The folder for this run alone; False where its file system knows no locks. No file is made for it."""
    handle = hold(folder, wait=True)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def hold(folder: Path, wait: bool = False) -> int | None:
    """A lock on a folder for as long as the handle is open, which ends with the process; None if it cannot be had."""
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle


def write_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """From here on the run counts as done: the files 0, 1, ... of its folder belong beside it, under these names."""
    draft = work / f"{_MOVES}.draft"
    draft.write_text(json.dumps({"names": names, "removed": removed}), encoding="utf-8")
    os.replace(draft, work / _MOVES)


def make_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """Put every file into its place that is not there yet."""
    for number, name in enumerate(names):
        if (work / str(number)).exists():
            os.replace(work / str(number), work.parent / name)
    for name in removed:
        (work.parent / name).unlink(missing_ok=True)


def forget_moves(work: Path) -> None:
    """Nothing is to be completed any more: it is done, or given up."""
    (work / _MOVES).unlink(missing_ok=True)


def settle(work: Path) -> None:
    """Bring a dead run's folder to its end; its target folder is locked."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((work / _MOVES).read_bytes())
        names, removed = list(told["names"]), list(told["removed"])
        if all(Path(name).name == name for name in (*names, *removed)):
            make_moves(work, names, removed)
    shutil.rmtree(work, ignore_errors=True)


def settle_dead(folder: Path) -> None:
    """Settle the runs that died in this folder and whose own watcher died with them; the folder is locked."""
    if fcntl is None:
        return
    with suppress(OSError):
        for work in folder.glob(f"{PREFIX}*"):
            if work.lstat().st_uid == os.geteuid() and (handle := hold(work)) is not None:
                settle(work)
                os.close(handle)


def _watch(works: list[Path]) -> None:
    sys.stdin.buffer.read()
    for work in works:
        with locked(work.parent):
            settle(work)


if __name__ == "__main__":
    _watch([Path(argument) for argument in sys.argv[1:]])
