"""Write files all or nothing, also when the process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelexport.errors import ArgumentError, ArgumentTypeError, FileError, describe_type
from modelexport.onnx_file import recovery
from modelexport.onnx_file.wire import Buffer


class Transaction:
    """A work folder, and the moves that put its files where they belong."""

    def __init__(self, target_folder: Path, temp_dir: Path | None) -> None:
        name = f"{recovery.PREFIX}{secrets.token_hex(6)}"
        self._folder = target_folder.absolute()
        self._near = self._folder / name
        self._names: list[tuple[Path, str]] = []
        self._removed: list[str] = []
        self._held: list[int] = []
        self.work = self._near if temp_dir is None else temp_dir.absolute() / name
        self._watcher = _watcher(self.work, self._near)  # before there is anything to clear up
        try:
            self._make(self.work)
        except BaseException:
            self.clear()
            raise

    def _make(self, work: Path) -> None:
        """A folder that no other run takes for a dead one's."""
        with recovery.locked(work.parent) as alone:
            if alone:
                recovery.settle_dead(work.parent)
            work.mkdir()
            handle = recovery.hold(work)
        if handle is not None:
            self._held.append(handle)

    def subfolder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        return folder

    def write(self, name: str, pieces: Iterable[Buffer]) -> Path:
        """Write a new file into the work folder."""
        path = self.work / name
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        return path

    def place(self, path: Path, name: str) -> None:
        """On commit, move this file to the target folder under this name, after those placed before it.

        A name such as `weights/w.bin` puts it into a folder below, which is made if there is none.
        """
        if not recovery.stays_in(self._folder, name):
            raise FileError(
                f"{name} would lie outside {self._folder}", hint="choose another output folder"
            )
        self._names.append((path, name))

    def remove(self, name: str) -> None:
        """On commit, take this file of the target folder away, if there is one."""
        self._removed.append(name)

    def commit(self) -> None:
        """Move everything into position: all or nothing, for whoever interrupts or kills this run as well."""
        if self._near != self.work:
            self._make(self._near)
        for number, (path, _) in enumerate(self._names):
            shutil.move(path, self._near / str(number))
        names = [name for _, name in self._names]
        with recovery.locked(self._folder) as alone:
            if alone:
                recovery.settle_dead(self._folder)
            for name in names:
                if (self._folder / name).is_dir():
                    raise FileError(
                        f"{self._folder / name} is a folder", hint="choose another output name"
                    )
            before = self._keep(names)
            added = self._missing_folders(names)
            try:
                recovery.write_moves(self._near, names, self._removed)
                recovery.make_moves(self._near, names, self._removed)
            except OSError:
                self._undo(names, before)
                for folder in added:
                    with suppress(OSError):
                        folder.rmdir()
                recovery.forget_moves(self._near)
                raise
            except (
                BaseException
            ):  # interrupted: it is too late for that; `clear` does it if this is interrupted again
                recovery.make_moves(self._near, names, self._removed)
                recovery.forget_moves(self._near)
                raise
            recovery.forget_moves(self._near)

    def _keep(self, names: list[str]) -> set[str]:
        """Hold on to the files that will be replaced; which of the names were there."""
        before = {name for name in names if os.path.lexists(self._folder / name)}
        for number, name in enumerate(names):
            if name in before:
                with suppress(OSError):  # a file system without links
                    os.link(
                        self._folder / name, self._near / f"old-{number}", follow_symlinks=False
                    )
        return before

    def _missing_folders(self, names: list[str]) -> list[Path]:
        """The folders below the target folder that the moves make, inner ones first."""
        above = {folder for name in names for folder in (self._folder / name).parents}
        return sorted(
            (folder for folder in above if not folder.exists()), key=lambda f: -len(f.parts)
        )

    def _undo(self, names: list[str], before: set[str]) -> None:
        for number, name in enumerate(names):
            if (self._near / str(number)).exists():
                continue
            with suppress(OSError):
                if name in before:
                    os.replace(self._near / f"old-{number}", self._folder / name)
                else:
                    (self._folder / name).unlink()

    def clear(self) -> None:
        """Leave nothing behind."""
        if self._near.exists():
            with recovery.locked(self._folder):
                recovery.settle(self._near)
        shutil.rmtree(self.work, ignore_errors=True)
        for handle in self._held:
            os.close(handle)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()


def _watcher(*works: Path) -> subprocess.Popen[bytes] | None:
    """A process that clears up after this one if it is killed; without it, the next run in the folder does."""
    with suppress(OSError):
        return start_watcher(recovery.__file__, *dict.fromkeys(map(str, works)))
    return None


def start_watcher(file: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A Python file as a process whose input ends when this process does; no Ctrl-C and no package is for it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", file, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def check_output_path(output_path: object, suffix: str = ".onnx") -> Path:
    """The path of a file to write, if one with this ending can be written there."""
    if not isinstance(output_path, str | os.PathLike):
        raise ArgumentTypeError(
            f"the output path is {describe_type(output_path)}", hint="pass a path such as m.onnx"
        )
    target = Path(output_path)
    if suffix and target.suffix != suffix:
        hint = f"name it, for example, model{suffix}"
        raise ArgumentError(f"the output {target.name!r} does not end in {suffix}", hint=hint)
    try:
        if not target.parent.is_dir():
            hint = "create it, or choose another output"
            raise ArgumentError(f"the folder {target.parent} does not exist", hint=hint)
        if target.is_dir():
            raise ArgumentError(f"{target} is a folder", hint="choose another output name")
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"no file can have the name {target.name[:80]!r}", hint="choose another output name"
        ) from error
    return target


@contextmanager
def transaction(target_folder: Path, temp_dir: Path | None = None) -> Iterator[Transaction]:
    """A work folder for the time of the block; nothing of it is left, whatever happens."""
    if temp_dir is not None and not temp_dir.is_dir():
        raise ArgumentError(
            f"the temporary folder {temp_dir} does not exist", hint="create it, or choose another"
        )
    if not os.access(target_folder, os.W_OK):
        raise FileError(
            f"cannot write to {target_folder}", hint="choose a folder that you may write to"
        )
    try:
        stage = Transaction(target_folder, temp_dir)
    except OSError as error:
        raise FileError(
            f"cannot write to {temp_dir or target_folder}: {error.strerror}",
            hint="choose a folder that you may write to",
        ) from error
    try:
        yield stage
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write the output: {error.strerror or error}",
            hint="free some space, or choose another place",
        ) from error
    finally:
        stage.clear()


def write_file(target: Path, data: Buffer) -> None:
    """A whole file or none; what is no ordinary file, a pipe or a device, is written to as it is."""
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    with transaction(target.parent) as stage:
        stage.place(stage.write("output", [data]), target.name)
        stage.commit()
