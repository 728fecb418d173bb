"""Loads the model that a command line names: a Hugging Face folder or hub name, or a Python factory."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from modelexport.errors import SourceError

_FACTORY = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<name>[A-Za-z_][\w.]*)")


class Source(NamedTuple):
    """A model, where it came from, and the inputs that came with it (None: they are to be made)."""

    model: nn.Module
    name: str
    inputs: Any | None = None
    folder: str | None = None


def load_source(spec: str) -> Source:
    """The model for `package.module:factory`, a local Hugging Face folder, or a hub name."""
    if not Path(spec).exists() and (match := _FACTORY.fullmatch(spec)):
        return _from_factory(spec, match["module"], match["name"])
    return _from_hugging_face(spec)


def _from_factory(spec: str, module_name: str, name: str) -> Source:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise SourceError(
            f"cannot import {module_name!r}: {error}", hint="run from the folder that holds it, or install it"
        ) from error
    except Exception as error:
        raise SourceError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise SourceError(f"{module_name!r} has no {name!r}", hint="name a callable that returns a model") from error
    return _call_factory(spec, found)


def _call_factory(spec: str, factory: Any) -> Source:
    if not callable(factory):
        raise SourceError(f"{spec} is a {type(factory).__name__}, not a callable", hint="name a function or a class")
    try:
        made = factory()
    except Exception as error:
        raise SourceError(
            f"{spec} raised {type(error).__name__}: {error}", hint="it is called without arguments"
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{spec} returned a {type(model).__name__}",
            hint="return a torch.nn.Module, or a tuple of a module and its example inputs",
        )
    return Source(model, spec, inputs)


def _from_hugging_face(spec: str) -> Source:
    transformers = import_transformers()
    folder = Path(spec)
    if folder.is_file():
        raise SourceError(f"{spec} is a file", hint="name a Hugging Face folder, a hub name, or package.module:factory")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise SourceError(f"the folder {spec} has no config.json", hint="save a model there with save_pretrained")
    try:
        model = transformers.AutoModel.from_pretrained(spec)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise SourceError(
            f"cannot load {spec!r}: {_first_line(error)}",
            hint="it is no local folder with a model, and no model of that name can be had from the hub",
        ) from error
    return Source(model, folder.name, folder=spec)


def import_transformers() -> Any:
    """transformers, with its own progress bars and notes turned off."""
    try:
        import transformers
    except ImportError as error:
        raise SourceError(
            "transformers is not installed", hint="pip install 'modelexport[hf]', or name a package.module:factory"
        ) from error
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    return transformers


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
