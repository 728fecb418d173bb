"""Output files are written in a temporary place and moved into position only when all are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modelexport.errors import ArgumentError, ArgumentTypeError, FileError
from modelexport.tagged.wire import Buffer

_PREFIX = ".modelexport-"


class Staging:
    """A work folder, and the moves that put its files where they belong."""

    def __init__(self, work: Path, target_folder: Path) -> None:
        self.work = work
        self._folder = target_folder
        self._moves: list[tuple[Path, Path]] = []

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
        """On commit, move this file to the target folder under this name, after those placed before it."""
        self._moves.append((path, self._folder / name))

    def commit(self) -> None:
        """Move everything into position: first all across file systems, then one rename each, in order."""
        near = self.work if _same_device(self.work, self._folder) else None
        if near is None:
            near = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder))
        try:
            ready = []
            for number, (path, target) in enumerate(self._moves):
                if near != self.work:
                    path = Path(shutil.move(path, near / str(number)))
                if target.is_dir():
                    raise FileError(f"{target} is a folder", hint="choose another output name")
                ready.append((path, target))
            for path, target in ready:
                os.replace(path, target)
        finally:
            if near != self.work:
                shutil.rmtree(near, ignore_errors=True)


def _same_device(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev


def check_target(output_path: object, suffix: str = ".onnx") -> Path:
    """The path of a file to write, if one with this ending can be written there."""
    if not isinstance(output_path, str | os.PathLike):
        raise ArgumentTypeError(f"the output path is a {type(output_path).__name__}", hint="pass a path such as m.onnx")
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
def staging(target_folder: Path, temp_dir: Path | None = None) -> Iterator[Staging]:
    """A work folder for the time of the block; nothing of it is left, whatever happens."""
    if temp_dir is not None and not temp_dir.is_dir():
        raise ArgumentError(f"the temporary folder {temp_dir} does not exist", hint="create it, or choose another")
    if not os.access(target_folder, os.W_OK):
        raise FileError(f"cannot write to {target_folder}", hint="choose a folder that you may write to")
    try:
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temp_dir or target_folder))
    except OSError as error:
        raise FileError(
            f"cannot write to {temp_dir or target_folder}: {error.strerror}",
            hint="choose a folder that you may write to",
        ) from error
    try:
        yield Staging(work, target_folder)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write the output: {error.strerror or error}", hint="free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
