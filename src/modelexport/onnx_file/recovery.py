"""Complete or undo the writes of a killed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
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
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{12}")
_LARGEST = 1 << 20


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
    told = {"folder": _identity(work), "names": names, "removed": removed}
    draft.write_text(json.dumps(told), encoding="utf-8")
    os.replace(draft, work / _MOVES)


def _identity(work: Path) -> list[int]:
    """What a folder that came from elsewhere, in an archive for example, cannot say of itself."""
    status = work.lstat()
    return [status.st_dev, status.st_ino]


def make_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """Put every file into its place that is not there yet."""
    for number, name in enumerate(names):
        if _is_ordinary(work / str(number)):
            (work.parent / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(work / str(number), work.parent / name)
    for name in removed:
        (work.parent / name).unlink(missing_ok=True)


def _is_ordinary(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def forget_moves(work: Path) -> None:
    """Nothing is to be completed any more: it is done, or given up."""
    (work / _MOVES).unlink(missing_ok=True)


def settle(work: Path) -> None:
    """Bring a dead run's folder to its end; its target folder is locked."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        told = json.loads(_content(work / _MOVES))
        names, removed = list(told["names"]), list(told["removed"])
        if told["folder"] == _identity(work) and all(
            stays_in(work.parent, name) for name in (*names, *removed)
        ):
            make_moves(work, names, removed)
    shutil.rmtree(work, ignore_errors=True)


def stays_in(folder: Path, name: str) -> bool:
    """Whether a relative path names something in a folder or below it, and no link on the way leads out of it."""
    path = Path(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        return False
    return (folder / path).parent.resolve().is_relative_to(folder.resolve())


def _content(path: Path) -> bytes:
    """An ordinary file of moderate size; neither a link nor a pipe is opened."""
    if not _is_ordinary(path) or path.lstat().st_size > _LARGEST:
        raise ValueError
    return path.read_bytes()


def settle_dead(folder: Path) -> None:
    """Settle the runs that died in this folder and whose own watcher died with them; the folder is locked."""
    if fcntl is None:
        return
    with suppress(OSError):
        for work in folder.iterdir():
            if not _NAME.fullmatch(work.name):
                continue
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
