"""Load programs of torch.export from `.pt2` files without running code from them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Private by its name only: the registry that torch.export documents for custom classes.
from torch.utils import _pytree

from modelexport.capture.model_state import silence_torch, swap_attributes
from modelexport.capture.program_names import placeholder_inputs
from modelexport.capture.pytrees import attribute_paths, cache_registrations
from modelexport.errors import SourceError, first_line

SAVE_PROGRAM = "save a program with torch.export.save"
_MAX_REASON = 300


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load a `.pt2` file with torch's reader, and nothing enabled that could run code from it.

    Raises:
        SourceError: There is no such file, or it cannot be loaded.
    """
    if not path.is_file():
        raise SourceError(f"there is no file {path}", hint=SAVE_PROGRAM)
    try:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any("/aotinductor/" in name for name in archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise SourceError(f"{path} is not a .pt2 archive: {error}", hint=SAVE_PROGRAM) from error
    if is_compiled:
        raise SourceError(
            f"{path} holds compiled code, which is not loaded",
            hint="save the program itself with torch.export.save",
        )
    try:
        with _no_unpickling(path), _checked_objects(path), silence_torch(verbose=False):
            program = torch.export.load(path)
    except SourceError:
        raise
    except Exception as error:  # readers of archives, JSON and tensors raise unrelated types
        raise SourceError(
            f"torch {torch.__version__} cannot load {path}: {first_line(error)[:_MAX_REASON]}",
            hint="it may be of another version of torch, or damaged; "
            "save it again with torch.export.save",
        ) from error
    if any(isinstance(leaf, _StandIn) for leaf in _pytree.tree_leaves(program.example_inputs)):
        try:
            program.example_inputs = _rebuild_inputs(program)
        except Exception:  # torch compares them with the signature
            program.example_inputs = None
    return program


@contextmanager
def _no_unpickling(path: Path) -> Iterator[None]:
    """Let torch's reader load plain tensors only: it falls back to pickle for some parts."""
    from torch.export.pt2_archive import _package

    load = torch.load

    def refuse(*_: Any, **__: Any) -> Any:
        raise SourceError(
            f"{path} holds pickled objects, and opening them runs whatever code is in them",
            hint="save a program whose weights, constants and example inputs are plain tensors",
        )

    def load_tensors(file: Any, *args: Any, **options: Any) -> Any:
        options = {**options, "weights_only": True}
        try:
            return load(file, *args, **options)
        except pickle.UnpicklingError:
            names = _object_names(file)
        if not names:
            return refuse()
        with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
            return load(file, *args, **options)

    class NoPickle:
        loads = load = staticmethod(refuse)

    # Every way in which torch's reader unpickles: torch.load, pickle itself, and its C++ reader.
    with (
        swap_attributes(torch, load=load_tensors),
        swap_attributes(_package, pickle=NoPickle),
        swap_attributes(torch._C, _pickle_load_obj=refuse),
    ):
        yield


class _StandIn:
    """Stands in for an object that is pickled among example inputs: it only has its attributes."""

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore what the class would be called with."""


def _object_names(file: Any) -> list[str]:
    """List the classes that a file of tensors names; none if some are of untrusted packages."""
    if hasattr(file, "seek"):
        file.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if hasattr(file, "seek"):
        file.seek(0)
    return names if all(name.partition(".")[0] == _TRUSTED for name in names) else []


def _rebuild_inputs(program: torch.export.ExportedProgram) -> Any:
    """Return the example inputs of a program with objects in place of stand-ins.

    The objects are those that the program's signature describes. None if they do not fit.
    """
    held = dict(attribute_paths(program.example_inputs))
    expected = placeholder_inputs(program)
    path_of = {id(item): path for path, item in attribute_paths(expected)}
    paths = [path_of.get(id(leaf)) for leaf in _pytree.tree_leaves(expected)]
    if any(path is None or path not in held for path in paths):
        return None
    leaves = [held[path] for path in paths if path is not None]
    return _pytree.tree_unflatten(leaves, program.call_spec.in_spec)


@contextmanager
def _checked_objects(path: Path) -> Iterator[None]:
    """Register the classes of objects, such as caches, that a program takes or returns.

    torch rebuilds these objects from their descriptions in the file, which are JSON.
    """
    # Private: torch reads every description here. If torch renames it, entering the block fails.
    from torch._export.serde import serialize

    read: Any = getattr(serialize, "treespec_loads")  # noqa: B009  # torch does not export it

    def treespec_loads(text: str) -> Any:
        _, root = json.loads(text)
        pending = [root]
        for description in pending:
            pending.extend(description["children_spec"])
            name = description["type"]
            if name is not None and not _register_class(name):
                raise SourceError(
                    f"{path} takes or returns a {name}, which is not registered as a pytree",
                    hint="in Python, register the class, load the program with torch.export.load "
                    "and pass it to export_model",
                )
            if name is not None and not _is_harmless(json.loads(description["context"])):
                raise SourceError(
                    f"{path} describes a {name} that would run other code when it is rebuilt",
                    hint="if you trust the file, load it with torch.export.load in Python "
                    "and pass the program to export_model",
                )
        return read(text)

    with swap_attributes(serialize, treespec_loads=treespec_loads):
        yield


_TRUSTED = "transformers"
"""The package whose modules are imported for the classes that a program names."""


def _register_class(name: str) -> bool:
    """Return whether a class of this serialized name is registered, if need be by its package."""
    known = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if name in known:
        return True
    module = name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
    if module.partition(".")[0] != _TRUSTED or importlib.util.find_spec(_TRUSTED) is None:
        return False
    try:
        importlib.import_module(module)  # this registers what models return
    except ImportError:
        return False
    # One class can be registered in one way only, and the ways differ in names and descriptions.
    for register in () if name in known else cache_registrations():
        before = set(_pytree.SUPPORTED_NODES)
        register()
        if name in known:
            break
        for cls in set(_pytree.SUPPORTED_NODES) - before:
            _pytree._deregister_pytree_node(cls)
    return name in known


_CONTAINERS = {f"builtins:{cls.__name__}" for cls in (dict, list, tuple, set, frozenset)}
_CONTAINERS.add("collections:OrderedDict")


def _is_harmless(description: Any) -> bool:
    """Return whether rebuilding an object calls no class but containers and parts of caches.

    transformers describes the parts of a cache by a kind, `_t`, and the path of a class, `p`. It
    imports that path and calls the class of containers, whatever it is. If transformers changes
    these keys, programs with caches are rejected by its own reader.
    """
    if isinstance(description, list):
        return all(map(_is_harmless, description))
    if not isinstance(description, dict):
        return True
    if "_t" in description and "p" in description:
        is_container = description["p"] in _CONTAINERS
        is_made_empty = description["_t"] in ("obj", "type")
        if not (_is_cache_part(description["p"]) if is_made_empty else is_container):
            return False
    return all(map(_is_harmless, description.values()))


def _is_cache_part(path: str) -> bool:
    """Return whether a path names a class beside a registered one of the trusted package."""
    module, _, name = path.partition(":")
    beside = {cls.__module__ for cls in _pytree.SUPPORTED_NODES}
    if module not in beside or module.partition(".")[0] != _TRUSTED:
        return False
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and found.__module__ == module
