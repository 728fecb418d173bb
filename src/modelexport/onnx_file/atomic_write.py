"""Write files all or nothing, also when the process is killed.

A `Transaction` writes its files into a hidden work folder and moves them to the target folder on
commit. The list of moves (`moves.json`) is what commits: a run killed before it exists changes
nothing, one killed later is completed by the next run in the folder. A run locks its work folder,
so that the next run can see whether the one that created it is still alive.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelexport.errors import ArgumentError, ArgumentTypeError, FileError, describe_type
from modelexport.onnx_file.wire import Buffer

try:
    import fcntl
except ImportError:  # without locks, no work folder counts as left by a killed run
    fcntl = None  # type: ignore[assignment]

PREFIX = ".modelexport-"
"""How the name of every work folder begins."""
_WORK_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{12}")
_MOVES = "moves.json"
_MAX_MOVES_BYTES = 1 << 20
_WRITABLE = "choose a folder that you may write to"


class Transaction:
    """A work folder, and the moves that put its files into the target folder.

    Use it through `transaction`, which opens and clears it.

    Attributes:
        work: The work folder: in the target folder, or in `temp_dir` where one is given.
    """

    def __init__(self, target_folder: Path, temp_dir: Path | None) -> None:
        name = f"{PREFIX}{secrets.token_hex(6)}"
        self._folder = target_folder.absolute()
        # A file is replaced atomically only within a file system, so that files are moved from a
        # work folder beside their targets, whatever the temporary folder.
        self._near = self._folder / name
        self._sources: list[Path] = []
        self._names: list[str] = []
        self._removed: list[str] = []
        self._locks: list[int] = []
        self._parent_locks: list[int] = []
        self.work: Path = self._near if temp_dir is None else temp_dir.absolute() / name

    def create(self, work: Path) -> None:
        """Create a work folder and lock it, so that no other run recovers it."""
        with _lock_and_recover(work.parent, self._parent_locks):
            work.mkdir()
            _lock(work, self._locks)

    def subfolder(self, name: str) -> Path:
        """Create a folder in the work folder."""
        folder = self.work / name
        folder.mkdir()
        return folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> Path:
        """Write chunks to a new file in the work folder, and return its path."""
        path = self.work / name
        with path.open("wb") as file:
            file.writelines(chunks)
        return path

    def publish(self, path: Path, name: str) -> None:
        """Register a file to be moved into the target folder on commit, after those before it.

        Args:
            path: The file, in the work folder.
            name: Its name in the target folder. `weights/w.bin` puts it into a subfolder, which
                is created if it does not exist.

        Raises:
            FileError: The name leads out of the target folder.
        """
        if not _stays_in(self._folder, name):
            raise FileError(
                f"{name} would lie outside {self._folder}", hint="choose another output folder"
            )
        self._sources.append(path)
        self._names.append(name)

    def remove(self, name: str) -> None:
        """Register a file of the target folder to be deleted on commit, if it exists."""
        self._removed.append(name)

    def commit(self) -> None:
        """Move all files into the target folder, or none.

        Raises:
            FileError: A folder has the name of one of the files.
            OSError: A file cannot be moved; those already moved are put back.
        """
        if self._near != self.work:
            self.create(self._near)
        for number, path in enumerate(self._sources):
            shutil.move(path, self._near / str(number))
        with _lock_and_recover(self._folder, self._parent_locks):
            for path in (self._folder / name for name in self._names):
                if path.is_dir():
                    raise FileError(f"{path} is a folder", hint="choose another output name")
            replaced = self._link_replaced()
            new_folders = self._missing_folders()
            # An interruption from here on comes too late: `clear` completes the moves.
            try:
                write_moves(self._near, self._names, self._removed)
                _make_moves(self._near, self._names, self._removed)
            except OSError:
                self._undo(replaced)
                for folder in new_folders:
                    with suppress(OSError):
                        folder.rmdir()
                (self._near / _MOVES).unlink(missing_ok=True)
                raise
            (self._near / _MOVES).unlink(missing_ok=True)

    def _link_replaced(self) -> set[str]:
        """Link the files that will be replaced into the work folder, and return their names."""
        replaced = {name for name in self._names if os.path.lexists(self._folder / name)}
        for number, name in enumerate(self._names):
            if name in replaced:
                with suppress(OSError):  # a file system without hard links
                    old = self._near / f"old-{number}"
                    os.link(self._folder / name, old, follow_symlinks=False)
        return replaced

    def _missing_folders(self) -> list[Path]:
        """List the subfolders that the moves will create, innermost first."""
        above = {folder for name in self._names for folder in (self._folder / name).parents}
        return sorted((f for f in above if not f.exists()), key=lambda f: -len(f.parts))

    def _undo(self, replaced: set[str]) -> None:
        """Undo the moves that were completed."""
        for number, name in enumerate(self._names):
            if (self._near / str(number)).exists():
                continue
            with suppress(OSError):
                if name in replaced:
                    os.replace(self._near / f"old-{number}", self._folder / name)
                else:
                    (self._folder / name).unlink()

    def clear(self) -> None:
        """Complete a commit that was interrupted, and remove the work folder."""
        # Ctrl-C may have come while the lock was held; taking it again would wait for ourselves.
        _release(self._parent_locks)
        if self._near.exists():
            with _hold_lock(self._folder, self._parent_locks):
                _recover(self._near)
        shutil.rmtree(self.work, ignore_errors=True)
        _release(self._locks)


def write_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """Commit: record that the files 0, 1, … of a work folder belong beside it, under these names.

    The files `removed` of the target folder are to be deleted.
    """
    draft = work / f"{_MOVES}.draft"
    moves = {"folder": _identity(work), "names": names, "removed": removed}
    draft.write_text(json.dumps(moves), encoding="utf-8")
    os.replace(draft, work / _MOVES)


def _identity(work: Path) -> list[int]:
    """Return the device and inode of a folder, which one from an archive cannot predict."""
    status = work.lstat()
    return [status.st_dev, status.st_ino]


def _make_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """Move every file that is still in the work folder to its target."""
    for number, name in enumerate(names):
        if _is_regular(work / str(number)):
            (work.parent / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(work / str(number), work.parent / name)
    for name in removed:
        (work.parent / name).unlink(missing_ok=True)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def recover_killed_runs(folder: Path) -> None:
    """Complete or undo what killed runs left in a folder, as every transaction does."""
    with _lock_and_recover(folder, []):
        pass


@contextmanager
def _lock_and_recover(folder: Path, locks: list[int]) -> Iterator[None]:
    """Lock a folder, and recover the work folders that killed runs left in it."""
    with _hold_lock(folder, locks) as exclusive:
        if exclusive:
            with suppress(OSError):
                for work in folder.iterdir():
                    if _WORK_NAME.fullmatch(work.name) and work.lstat().st_uid == os.geteuid():
                        held: list[int] = []
                        if _lock(work, held):
                            _recover(work)
                        _release(held)
        yield


def _recover(work: Path) -> None:
    """Make the moves that were committed, and remove the work folder; its parent is locked."""
    path = work / _MOVES
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        # A link, a pipe or a large file is not a list of moves: it is not opened.
        if _is_regular(path) and path.lstat().st_size <= _MAX_MOVES_BYTES:
            moves = json.loads(path.read_bytes())
            names, removed = list(moves["names"]), list(moves["removed"])
            inside = all(_stays_in(work.parent, name) for name in (*names, *removed))
            if inside and moves["folder"] == _identity(work):
                _make_moves(work, names, removed)
    shutil.rmtree(work, ignore_errors=True)


def is_inside(name: str) -> bool:
    """Return whether a relative path names a file in a folder or below it, links aside."""
    path = Path(name)
    return bool(path.parts) and not path.anchor and ".." not in path.parts and "\0" not in name


def _stays_in(folder: Path, name: str) -> bool:
    """Return whether a relative path stays in a folder, also where links lie on the way."""
    return is_inside(name) and (folder / name).parent.resolve().is_relative_to(folder.resolve())


@contextmanager
def _hold_lock(folder: Path, locks: list[int]) -> Iterator[bool]:
    """Lock a folder, without a lock file; yield False where its file system has no locks."""
    try:
        yield _lock(folder, locks, wait=True)
    finally:
        _release(locks)


def _lock(folder: Path, locks: list[int], wait: bool = False) -> bool:
    """Lock a folder until the handle that is added to the locks is closed; False if impossible."""
    if fcntl is None:
        return False
    try:
        # In the list before it is locked: Ctrl-C may come as soon as flock returns.
        locks.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        fcntl.flock(locks[-1], fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _release(locks: list[int]) -> None:
    """Close the handles of locks; those that Ctrl-C left closed in the list are passed over."""
    for handle in locks:
        with suppress(OSError):
            os.close(handle)
    locks.clear()


def check_output_path(output_path: object, suffix: str = ".onnx") -> Path:
    """Check that a file can be written to a path, and return the path.

    Args:
        output_path: What the caller gave as the path.
        suffix: What its name must end in; empty for any.

    Raises:
        ArgumentTypeError: It is not a path.
        ArgumentError: It ends differently, is a folder, or its folder does not exist.
    """
    if not isinstance(output_path, str | os.PathLike):
        kind = describe_type(output_path)
        raise ArgumentTypeError(f"the output path is {kind}", hint="pass a path such as m.onnx")
    target = Path(output_path)
    if suffix and target.suffix != suffix:
        hint = f"name it, for example, model{suffix}"
        raise ArgumentError(f"the output {target.name!r} does not end in {suffix}", hint=hint)
    try:
        if "\0" in str(target):  # is_dir() returns False for it
            raise ValueError("embedded null character")
        has_parent, is_folder = target.parent.is_dir(), target.is_dir()
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"no file can have the name {target.name[:80]!r}", hint="choose another output name"
        ) from error
    if not has_parent:
        hint = "create it, or choose another output"
        raise ArgumentError(f"the folder {target.parent} does not exist", hint=hint)
    if is_folder:
        raise ArgumentError(f"{target} is a folder", hint="choose another output name")
    return target


def check_writable(folder: Path) -> None:
    """Check that files can be written to a folder.

    Raises:
        FileError: They cannot.
    """
    if not os.access(folder, os.W_OK):
        raise FileError(f"cannot write to {folder}", hint=_WRITABLE)


@contextmanager
def transaction(target_folder: Path, temp_dir: Path | None = None) -> Iterator[Transaction]:
    """Provide a work folder, and remove it at the end of the block.

    Args:
        target_folder: Where the files go on `commit`.
        temp_dir: Where the work folder is created; the target folder if None.

    Yields:
        The transaction, which changes the target folder only by `commit`.

    Raises:
        ArgumentError: The temporary folder does not exist.
        FileError: A folder cannot be written to, or the disk is full.
    """
    if temp_dir is not None and not temp_dir.is_dir():
        raise ArgumentError(
            f"the temporary folder {temp_dir} does not exist", hint="create it, or choose another"
        )
    check_writable(target_folder)
    stage = Transaction(target_folder, temp_dir)
    try:
        try:
            stage.create(stage.work)
        except OSError as error:
            message = f"cannot write to {temp_dir or target_folder}: {error.strerror}"
            raise FileError(message, hint=_WRITABLE) from error
        yield stage
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write the output: {error.strerror or error}",
            hint="free some space, or choose another folder",
        ) from error
    finally:
        try:
            stage.clear()
        finally:
            stage.clear()  # does the rest if Ctrl-C ended the first


def write_file(target: Path, data: Buffer) -> None:
    """Write a file as a whole or not at all; a pipe or a device is written to directly.

    Raises:
        FileError: It cannot be written.
    """
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with transaction(target.parent) as stage:
        stage.publish(stage.write("output", [data]), target.name)
        stage.commit()
