"""Load a model from a hub name, a folder, a factory or an exported program."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.capture.failure import explain_failure
from modelexport.capture.model_state import silence_torch, swap_attributes, unwrap_model
from modelexport.errors import SourceError, describe_type, first_line
from modelexport.source.huggingface import Head, Hub, load_model

_FACTORY = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
_FILE_FACTORY = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)")


class LoadedModel(NamedTuple):
    """A model, where it came from, and the inputs that came with it (None: they are to be made)."""

    model: nn.Module | torch.export.ExportedProgram
    name: str
    inputs: Any | None = None
    hub: Hub | None = None
    notes: tuple[str, ...] = ()


def load_source(
    spec: str,
    *,
    task: str | None = None,
    model_class: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    random_weights: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """The model for `package.module:factory`, `file.py:factory`, a `.pt2`, a Hugging Face folder, or a hub name."""
    torch.manual_seed(seed)
    path = Path(spec)
    there = _exists(path)
    in_file = None if there else _FILE_FACTORY.fullmatch(spec)
    in_module = None if there else _FACTORY.fullmatch(spec)
    if not there and spec.endswith(":"):
        raise SourceError(
            f"the name of a factory is missing after the colon in {spec!r}",
            hint="name a callable that returns a model, as in path/to/file.py:make_model",
        )
    if (
        not there
        and (spec.startswith((".", "/", "~")) or spec.count("/") > 1)
        and not (in_file or in_module)
    ):
        raise SourceError(f"there is no folder or file {spec}", hint="check the path")
    if (there and path.is_dir()) or not (there or in_file or in_module or path.suffix == ".pt2"):
        hub = Hub(spec, revision, trust_remote_code)
        model, notes = load_model(hub, Head(task, model_class, random_weights))
        return LoadedModel(model, path.name if there else spec, hub=hub, notes=notes)
    _refuse_options(
        spec, task=task, model_class=model_class, revision=revision, random_weights=random_weights
    )
    if in_file is not None:
        file = Path(in_file["file"])
        with _importable(file.resolve().parent):
            return _from_factory(
                f"{file.name}:{in_file['name']}", in_file["name"], _import_file(file)
            )
    if in_module is not None:
        with _importable(Path.cwd()):
            return _from_factory(spec, in_module["name"], _import(in_module["module"]))
    if path.suffix != ".pt2":
        raise refuse_file(path)
    return LoadedModel(load_program(path), path.name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file could have
        return False


def _refuse_options(spec: str, **options: object) -> None:
    for name, value in options.items():
        if value:
            raise SourceError(
                f"--{name.replace('_', '-')} is for Hugging Face models, and {spec} is none",
                hint="leave it out, or name a folder or a model of the hub",
            )


def _import(module_name: str) -> ModuleType:
    with _import_failure(repr(module_name)):
        try:
            return importlib.import_module(module_name)
        except ImportError as error:
            raise SourceError(
                f"cannot import {module_name!r}: {error}",
                hint="run from the folder that holds it, or install it",
            ) from error


def _import_file(path: Path) -> ModuleType:
    """A Python file as a module; what lies beside it can be imported by it."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}", hint="name it as path/to/file.py:factory")
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"{path.stem}_factory" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"cannot import {path}", hint="name a Python file")
    module = importlib.util.module_from_spec(spec)
    with _import_failure(str(path)):
        sys.modules[name] = module  # classes look their module up by its name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name)
            raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _import_failure(name: str) -> Iterator[None]:
    """Whatever a user's module raises while it is imported, in one line."""
    try:
        yield
    except SourceError:
        raise
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"importing {name} failed: {type(error).__name__}: {error}",
            hint="it has to be importable by itself",
        ) from error


def _from_factory(spec: str, name: str, module: ModuleType) -> LoadedModel:
    factory: Any = module
    try:
        for part in name.split("."):
            factory = getattr(factory, part)
    except AttributeError as error:
        raise SourceError(
            f"{module.__name__!r} has no {name!r}", hint="name a callable that returns a model"
        ) from error
    if isinstance(factory, nn.Module):
        return LoadedModel(unwrap_model(factory), spec)
    if not callable(factory):
        raise SourceError(
            f"{spec} is {describe_type(factory)}, not a callable", hint="name a function or a class"
        )
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"{spec} raised {explain_failure(error).line}",
            hint="a factory is called without arguments"
            if isinstance(error, TypeError)
            else "mend the factory",
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{spec} returned {describe_type(model)}",
            hint="return a torch.nn.Module, or a tuple of a module and its example inputs",
        )
    return LoadedModel(unwrap_model(model), spec, inputs)


_INSTEAD = "write a function that builds the model and loads its weights, and name it as path/to/file.py:function"


def refuse_file(path: Path) -> SourceError:
    """Why a file that is no `.pt2` cannot be a source, and what to do instead."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        return SourceError(f"cannot read {path}: {error.strerror}", hint=_INSTEAD)
    if path.suffix == ".onnx":
        return SourceError(
            f"{path} is an ONNX file already", hint="analyze, validate and compare read it"
        )
    if path.suffix == ".safetensors":
        return SourceError(
            f"{path} holds weights and no model",
            hint="name the folder that holds it and config.json",
        )
    if head[:1] == b"\x80" or head[:2] == b"PK":
        return SourceError(
            f"{path} is a pickle, and opening one runs whatever code is in it",
            hint=f"{_INSTEAD}; or save a program with torch.export.save as .pt2",
        )
    return SourceError(
        f"{path} is a file",
        hint="name a Hugging Face folder, a hub name, a .pt2 or file.py:factory",
    )


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
            f"{path} holds compiled code, which is not loaded",
            hint="save the program itself with torch.export.save",
        )
    try:
        with _nothing_unpickled(path), silence_torch(verbose=False):
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
        swap_attributes(torch, load=tensors_only),
        swap_attributes(_package, pickle=NoPickle),
        swap_attributes(torch._C, _pickle_load_obj=refuse),
    ):
        yield
