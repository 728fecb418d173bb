"""Loads the model that a command line names: a Hugging Face folder or hub name, a Python factory, or a `.pt2`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.baseline.calling import unwrapped
from modelexport.baseline.failure import explain
from modelexport.errors import SourceError, a_kind
from modelexport.source.hub import Head, Hub, load_model
from modelexport.source.program import load_program, refuse_file

_FACTORY = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
_FILE_FACTORY = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][\w.]*)")


class Source(NamedTuple):
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
) -> Source:
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
    if not there and (spec.startswith((".", "/", "~")) or spec.count("/") > 1) and not (in_file or in_module):
        raise SourceError(f"there is no folder or file {spec}", hint="check the path")
    if (there and path.is_dir()) or not (there or in_file or in_module or path.suffix == ".pt2"):
        hub = Hub(spec, revision, trust_remote_code)
        model, notes = load_model(hub, Head(task, model_class, random_weights))
        return Source(model, path.name if there else spec, hub=hub, notes=notes)
    _refuse_options(spec, task=task, model_class=model_class, revision=revision, random_weights=random_weights)
    if in_file is not None:
        file = Path(in_file["file"])
        with _importable(file.resolve().parent):
            return _from_factory(f"{file.name}:{in_file['name']}", in_file["name"], _import_file(file))
    if in_module is not None:
        with _importable(Path.cwd()):
            return _from_factory(spec, in_module["name"], _import(in_module["module"]))
    if path.suffix != ".pt2":
        raise refuse_file(path)
    return Source(load_program(path), path.name)


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
    with _told(repr(module_name)):
        try:
            return importlib.import_module(module_name)
        except ImportError as error:
            raise SourceError(
                f"cannot import {module_name!r}: {error}", hint="run from the folder that holds it, or install it"
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
    with _told(str(path)):
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
def _told(name: str) -> Iterator[None]:
    """Whatever a user's module raises while it is imported, in one line."""
    try:
        yield
    except SourceError:
        raise
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"importing {name} failed: {type(error).__name__}: {error}", hint="it has to be importable by itself"
        ) from error


def _from_factory(spec: str, name: str, module: ModuleType) -> Source:
    factory: Any = module
    try:
        for part in name.split("."):
            factory = getattr(factory, part)
    except AttributeError as error:
        raise SourceError(
            f"{module.__name__!r} has no {name!r}", hint="name a callable that returns a model"
        ) from error
    if isinstance(factory, nn.Module):
        return Source(unwrapped(factory), spec)
    if not callable(factory):
        raise SourceError(f"{spec} is {a_kind(factory)}, not a callable", hint="name a function or a class")
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"{spec} raised {explain(error).line}",
            hint="a factory is called without arguments" if isinstance(error, TypeError) else "mend the factory",
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{spec} returned {a_kind(model)}",
            hint="return a torch.nn.Module, or a tuple of a module and its example inputs",
        )
    return Source(unwrapped(model), spec, inputs)
