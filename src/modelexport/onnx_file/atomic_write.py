"""Write files all or nothing, also when the process is killed.

A `Transaction` writes its files into a hidden work folder and moves them to the target folder on
commit. The list of moves (`moves.json`) is what commits: a run killed before it exists changes
nothing, one killed later is completed by the next run in the folder. A run locks its work folder,
which tells the next run whether the folder is a dead run's.
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
except ImportError:  # no such locks on this system: no folder is taken for a dead run's
    fcntl = None  # type: ignore[assignment]

PREFIX = ".modelexport-"
"""How the name of every work folder begins."""
_WORK_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{12}")
_MOVES = "moves.json"
_MAX_MOVES_BYTES = 1 << 20


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
        self.work = self._near if temp_dir is None else temp_dir.absolute() / name

    def open(self) -> None:
        """Create the work folder, and settle those that killed runs left beside it."""
        self._create(self.work)

    def _create(self, work: Path) -> None:
        """Create a work folder and lock it before another run can take it for a dead run's."""
        with _locked(work.parent) as exclusive:
            if exclusive:
                _settle_dead_runs(work.parent)
            work.mkdir()
            handle = _lock(work)
        if handle is not None:
            self._locks.append(handle)

    def subfolder(self, name: str) -> Path:
        """Create a folder in the work folder.

        Args:
            name: The name of the folder.
        """
        folder = self.work / name
        folder.mkdir()
        return folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> Path:
        """Write a new file into the work folder.

        Args:
            name: The name of the file in the work folder.
            chunks: Its bytes, in order.

        Returns:
            The path of the file.
        """
        path = self.work / name
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
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
        """Register a file of the target folder to be deleted on commit, if it exists.

        Args:
            name: Its name in the target folder.
        """
        self._removed.append(name)

    def commit(self) -> None:
        """Move all files into the target folder, or none.

        Raises:
            FileError: A folder has the name of one of the files.
            OSError: A file cannot be moved; those already moved are put back.
        """
        if self._near != self.work:
            self._create(self._near)
        for number, path in enumerate(self._sources):
            shutil.move(path, self._near / str(number))
        with _locked(self._folder) as exclusive:
            if exclusive:
                _settle_dead_runs(self._folder)
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
        """Take back the moves made so far."""
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
        if self._near.exists():
            with _locked(self._folder):
                _settle(self._near)
        shutil.rmtree(self.work, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())


def write_moves(work: Path, names: list[str], removed: list[str]) -> None:
    """Commit: record that the files 0, 1, … of a work folder belong beside it, under these names.

    Args:
        work: The work folder.
        names: The names in the target folder, by the number of the file.
        removed: The files of the target folder to delete.
    """
    draft = work / f"{_MOVES}.draft"
    moves = {"folder": _identity(work), "names": names, "removed": removed}
    draft.write_text(json.dumps(moves), encoding="utf-8")
    os.replace(draft, work / _MOVES)


def _identity(work: Path) -> list[int]:
    """Return what a planted folder, unpacked from an archive for example, cannot know of itself."""
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


def settle_dead_runs(folder: Path) -> None:
    """Settle the work folders that killed runs left in a folder.

    Args:
        folder: The folder; every transaction in it does the same.
    """
    with _locked(folder) as exclusive:
        if exclusive:
            _settle_dead_runs(folder)


def _settle_dead_runs(folder: Path) -> None:
    """Settle the work folders that killed runs left in a folder, which is locked."""
    if fcntl is None:
        return
    with suppress(OSError):
        for work in folder.iterdir():
            if not _WORK_NAME.fullmatch(work.name):
                continue
            if work.lstat().st_uid == os.geteuid() and (handle := _lock(work)) is not None:
                _settle(work)
                os.close(handle)


def _settle(work: Path) -> None:
    """Make the moves that were committed, and remove the work folder; its parent is locked."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        moves = json.loads(_read_moves(work / _MOVES))
        names, removed = list(moves["names"]), list(moves["removed"])
        if moves["folder"] == _identity(work) and all(
            _stays_in(work.parent, name) for name in (*names, *removed)
        ):
            _make_moves(work, names, removed)
    shutil.rmtree(work, ignore_errors=True)


def _read_moves(path: Path) -> bytes:
    """Read a regular file of moderate size; a link or a pipe is not opened."""
    if not _is_regular(path) or path.lstat().st_size > _MAX_MOVES_BYTES:
        raise ValueError
    return path.read_bytes()


def _stays_in(folder: Path, name: str) -> bool:
    """Whether a relative path lies in a folder or below it, and no link on the way leads out."""
    path = Path(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        return False
    return (folder / path).parent.resolve().is_relative_to(folder.resolve())


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, without a lock file; yield False where its file system has no locks."""
    handle = _lock(folder, wait=True)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Lock a folder until the handle is closed or the process ends; None if that is impossible."""
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
        raise ArgumentTypeError(
            f"the output path is {describe_type(output_path)}", hint="pass a path such as m.onnx"
        )
    target = Path(output_path)
    if suffix and target.suffix != suffix:
        hint = f"name it, for example, model{suffix}"
        raise ArgumentError(f"the output {target.name!r} does not end in {suffix}", hint=hint)
    try:
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
    hint = "choose a folder that you may write to"
    if not os.access(target_folder, os.W_OK):
        raise FileError(f"cannot write to {target_folder}", hint=hint)
    stage = Transaction(target_folder, temp_dir)
    try:
        try:
            stage.open()
        except OSError as error:
            message = f"cannot write to {temp_dir or target_folder}: {error.strerror}"
            raise FileError(message, hint=hint) from error
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

    Args:
        target: The file.
        data: Its bytes.

    Raises:
        FileError: It cannot be written.
    """
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with transaction(target.parent) as stage:
        stage.publish(stage.write("output", [data]), target.name)
        stage.commit()
