"""Opens saved `ExportedProgram`s, and says why other files are not opened. Nothing is ever unpickled."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from modelexport.baseline.calling import quiet, swapped
from modelexport.errors import SourceError, first_line

_INSTEAD = "write a function that builds the model and loads its weights, and name it as path/to/file.py:function"


def refuse_file(path: Path) -> SourceError:
    """Why a file that is no `.pt2` cannot be a source, and what to do instead."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        return SourceError(f"cannot read {path}: {error.strerror}", hint=_INSTEAD)
    if path.suffix == ".onnx":
        return SourceError(f"{path} is an ONNX file already", hint="analyze, validate and compare read it")
    if path.suffix == ".safetensors":
        return SourceError(f"{path} holds weights and no model", hint="name the folder that holds it and config.json")
    if head[:1] == b"\x80" or head[:2] == b"PK":
        return SourceError(
            f"{path} is a pickle, and opening one runs whatever code is in it",
            hint=f"{_INSTEAD}; or save a program with torch.export.save as .pt2",
        )
    return SourceError(f"{path} is a file", hint="name a Hugging Face folder, a hub name, a .pt2 or file.py:factory")


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The program in a `.pt2` file, by torch's own reader with everything off that could run code from the file."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}", hint="save a program with torch.export.save")
    try:
        with zipfile.ZipFile(path) as archive:
            compiled = [name for name in archive.namelist() if "/aotinductor/" in name]
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(
            f"{path} is no .pt2 archive: {error}", hint="save a program with torch.export.save"
        ) from error
    if compiled:
        raise SourceError(
            f"{path} holds compiled code, which is not loaded", hint="save the program itself with torch.export.save"
        )
    try:
        with _nothing_unpickled(path), quiet(verbose=False):
            return torch.export.load(path)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(
            f"torch {torch.__version__} cannot load {path}: {first_line(error)[:300]}",
            hint="it may be of another version of torch, or damaged; save it again with torch.export.save",
        ) from error


@contextmanager
def _nothing_unpickled(path: Path) -> Iterator[None]:
    """torch's reader falls back to pickle for some parts: let it load plain tensors only."""
    from torch.export.pt2_archive import _package

    restricted = torch.load

    def refuse(*_: Any, **__: Any) -> Any:
        raise SourceError(
            f"{path} holds pickled objects, and opening them runs whatever code is in them",
            hint="save a program whose weights, constants and example inputs are plain tensors",
        )

    def tensors_only(file: Any, *args: Any, **options: Any) -> Any:
        try:
            return restricted(file, *args, **{**options, "weights_only": True})
        except pickle.UnpicklingError:
            return refuse()

    class NoPickle:
        loads = load = staticmethod(refuse)

    with (
        swapped(torch, load=tensors_only),
        swapped(_package, pickle=NoPickle),
        swapped(torch._C, _pickle_load_obj=refuse),
    ):
        yield
