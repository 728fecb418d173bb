"""Load a model from a hub name, a folder, a factory or an exported program."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.capture.failure import explain_failure
from modelexport.capture.model_state import unwrap_model
from modelexport.errors import SourceError, describe_type
from modelexport.option_values import spell_option
from modelexport.options import SourceOptions
from modelexport.source.huggingface import Head, Hub, load_model
from modelexport.source.programs import SAVE_PROGRAM, load_program

_FACTORY = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")
_FILE_FACTORY = re.compile(r"(?P<module>.+\.py):(?P<name>[A-Za-z_][\w.]*)")
_WRITE_FACTORY = (
    "write a function that builds the model and loads its weights, "
    "and name it as path/to/file.py:function"
)


class LoadedModel(NamedTuple):
    """A model, its name, and the inputs that came with it; None if they have to be made."""

    model: nn.Module | torch.export.ExportedProgram
    name: str
    inputs: Any | None = None
    hub: Hub | None = None
    notes: tuple[str, ...] = ()


def open_source(
    spec: str,
    options: SourceOptions,
    trust_remote_code: bool,
    seed: int,
    on_step: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Load the model that a command line names, with the options that an export records."""
    names = ("task", "model_class", "revision", "random_weights")
    chosen = {name: getattr(options, name) for name in names}
    return load_source(
        spec, trust_remote_code=trust_remote_code, seed=seed, on_step=on_step, **chosen
    )


def load_source(
    spec: str,
    *,
    task: str | None = None,
    model_class: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    random_weights: bool = False,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Load the model that a command line names; the seed is that of random weights.

    `on_step` is called before the hub is asked, which may take long.

    Raises:
        SourceError: There is no such model, or it cannot be loaded.
    """
    torch.manual_seed(seed)
    path = Path(spec)
    exists = _exists(path)
    factory = None if exists else _FILE_FACTORY.fullmatch(spec) or _FACTORY.fullmatch(spec)
    if not exists and factory is None:
        _check_spelling(spec)
    if path.is_dir() if exists else factory is None and path.suffix != ".pt2":
        if not exists:
            on_step(f"load {spec} from the Hugging Face hub: there is no such folder")
        hub = Hub(spec, revision, trust_remote_code)
        model, notes = load_model(hub, Head(task, model_class, random_weights))
        return LoadedModel(model, path.name if exists else spec, hub=hub, notes=notes)
    for option, value in (
        ("task", task),
        ("model_class", model_class),
        ("revision", revision),
        ("random_weights", random_weights),
    ):
        if value:
            raise SourceError(
                f"{spell_option(option)} is for Hugging Face models, and {spec} is not one",
                hint="leave it out, or name a folder or a model of the hub",
            )
    if factory is not None:
        return _load_factory(factory["module"], factory["name"])
    if path.suffix != ".pt2":
        raise _unsupported_file(path)
    return LoadedModel(load_program(path), path.name)


def _exists(path: Path) -> bool:
    """Return whether there is such a file, also for text that cannot be a file name."""
    try:
        return path.exists()
    except OSError:
        return False


def _check_spelling(spec: str) -> None:
    """Raise for text that is meant as a factory or a path, so as not to ask the hub for it."""
    if spec.endswith(":"):
        raise SourceError(
            f"the name of a factory is missing after the colon in {spec!r}",
            hint="name a callable that returns a model, as in path/to/file.py:make_model",
        )
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise SourceError(f"there is no folder or file {spec}", hint="check the path")


def _load_factory(module_name: str, name: str) -> LoadedModel:
    """Call a factory in a Python file or an installed module."""
    path = Path(module_name)
    is_file = path.suffix == ".py"
    spec = f"{path.name if is_file else module_name}:{name}"
    # The factory may import its neighbours when it is called, not only when it is imported.
    with _importable(path.resolve().parent if is_file else Path.cwd()):
        module = _import_file(path) if is_file else _import_module(module_name)
        return _call_factory(spec, name, module)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder on the import path."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _import_module(name: str) -> ModuleType:
    """Import a module by name."""
    with _import_errors(repr(name)):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise SourceError(
                f"cannot import {name!r}: {error}",
                hint="run from the folder that holds it, or install it",
            ) from error


def _import_file(path: Path) -> ModuleType:
    """Import a Python file, under a name that hides no other module."""
    if not path.is_file():
        raise SourceError(f"there is no file {path}", hint="name it as path/to/file.py:factory")
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"{path.stem}_factory" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"cannot import {path}", hint="name a Python file")
    module = importlib.util.module_from_spec(spec)
    with _import_errors(str(path)):
        sys.modules[name] = module  # dataclasses and pickle look up a class's module by name
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name)
            raise
    return module


@contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Report whatever a module raises while it is imported as a SourceError."""
    try:
        yield
    except SourceError:
        raise
    except (Exception, SystemExit) as error:
        raise SourceError(
            f"importing {name} failed: {type(error).__name__}: {error}",
            hint="it has to be importable by itself",
        ) from error


def _call_factory(spec: str, name: str, module: ModuleType) -> LoadedModel:
    """Get the model from a callable, or from a name that is a model itself."""
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
        result = factory()
    except (Exception, SystemExit) as error:
        needs_arguments = isinstance(error, TypeError)
        raise SourceError(
            f"{spec} raised {explain_failure(error).line}",
            hint="a factory is called without arguments" if needs_arguments else "fix the factory",
        ) from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{spec} returned {describe_type(model)}",
            hint="return a torch.nn.Module, or a tuple of a module and its example inputs",
        )
    return LoadedModel(unwrap_model(model), spec, inputs)


def _unsupported_file(path: Path) -> SourceError:
    """Build the error for a file that is not a `.pt2`, with what to do instead."""
    try:
        with path.open("rb") as file:
            magic = file.read(2)
    except OSError as error:
        return SourceError(f"cannot read {path}: {error.strerror}", hint=_WRITE_FACTORY)
    if path.suffix == ".onnx":
        return SourceError(
            f"{path} is an ONNX file already", hint="analyze, validate and compare read it"
        )
    if path.suffix == ".safetensors":
        return SourceError(
            f"{path} holds weights and no model",
            hint="name the folder that holds it and config.json",
        )
    if magic[:1] == b"\x80" or magic == b"PK":  # a pickle, or the zip archive of torch.save
        return SourceError(
            f"{path} is a pickle, and opening one runs whatever code is in it",
            hint=f"{_WRITE_FACTORY}; or {SAVE_PROGRAM} as .pt2",
        )
    return SourceError(
        f"{path} is a file",
        hint="name a Hugging Face folder, a hub name, a .pt2 or file.py:factory",
    )
