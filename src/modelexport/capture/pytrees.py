"""Objects that hold tensors, such as caches: register them as pytrees, and name what they hold.

torch flattens the objects among inputs and outputs by the registry of `torch.utils._pytree`. What
is registered there can be exported, whatever its class.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# Private by its name only: the registry that torch.export documents for custom classes.
from torch.utils import _pytree

_PLAIN = (Mapping, tuple, list)
"""Containers that torch flattens by itself."""
_OPAQUE = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool),
    *(type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType),
)
"""Values whose attributes are no part of the object that refers to them."""


def register_caches(model: nn.Module | None = None) -> None:
    """Let transformers register its caches as pytrees, if it is in use.

    Registration lasts as long as the process, as after an export by transformers itself. A class
    that is registered already stays as it is.

    Args:
        model: A model, whose own classes of caches are registered as well.
    """
    if "transformers.cache_utils" not in sys.modules:  # then there is no cache
        return
    register = next(cache_registrations(model), None)
    if register is not None:
        register()


def cache_registrations(model: nn.Module | None = None) -> Iterator[Callable[[], None]]:
    """Yield the ways in which the installed transformers registers its caches, newest first."""
    # Both are undocumented. If transformers moves them, caches are dropped from outputs and
    # rejected as inputs, as all objects that are not registered.
    try:
        from transformers.exporters import exporter_dynamo
    except ImportError:  # an older version
        pass
    else:
        yield lambda: _register_cache_classes(exporter_dynamo, model)
    try:
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:
        return
    yield register_dynamic_cache_export_support


def _register_cache_classes(exporter: Any, model: nn.Module | None) -> None:
    """Register every class of caches, and those that the model's own files define."""
    pending = exporter.Cache.__subclasses__()
    for cls in pending:
        pending.extend(cls.__subclasses__())
        exporter.register_pytree_node(cls)
    for module in () if model is None else model.modules():
        if isinstance(module, exporter.PreTrainedModel):
            exporter.register_cache_pytrees_for_model(module)


def is_tree(value: object) -> bool:
    """Return whether a value is an object of a class that is registered as a pytree."""
    return type(value) in _pytree.SUPPORTED_NODES and not isinstance(value, _PLAIN)


def holds_tree(value: object) -> bool:
    """Return whether a value is a registered object or contains one."""
    if isinstance(value, _PLAIN):
        return any(map(holds_tree, value.values() if isinstance(value, Mapping) else value))
    return is_tree(value)


def flatten_tree(value: object) -> dict[str, Any] | None:
    """Flatten a registered object.

    Args:
        value: The object.

    Returns:
        Its leaves in the order of the registry, by name; None if it cannot be flattened. A name is
        the path of the attribute that holds the leaf, as in `layers.0.keys`, so that it does not
        depend on who registered the class. Where leaves are in no attribute, names are the keys of
        the registration, or numbers.
    """
    try:
        leaves = _pytree.tree_leaves(value)
    except Exception:  # whatever a registered function raises, this object cannot be flattened
        return None
    paths: dict[int, deque[str]] = {}
    for path, item in attribute_paths(value):
        paths.setdefault(id(item), deque()).append(path)
    names = [paths[id(leaf)].popleft() if paths.get(id(leaf)) else "" for leaf in leaves]
    if not all(names):
        names = _key_names(value, len(leaves))
    return dict(zip(names, leaves, strict=True))


def attribute_paths(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a value holds in its attributes and items, however nested, with the path to it."""
    seen: set[int] = set()

    def visit(item: object, path: str) -> Iterator[tuple[str, object]]:
        children: Mapping[Any, Any] = {}
        if isinstance(item, Mapping):
            children = item
        elif isinstance(item, tuple | list):
            children = dict(enumerate(item))
        elif not isinstance(item, _OPAQUE) and hasattr(item, "__dict__"):
            children = vars(item)
        if not children:
            yield path, item
        elif id(item) not in seen:
            seen.add(id(item))
            for key, child in children.items():
                yield from visit(child, f"{path}.{key}" if path else str(key))

    return visit(value, "")


def named_tensors(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, with the path to each, as in `cache.layers.0.keys`."""
    for path, item in attribute_paths(value):
        if isinstance(item, torch.Tensor):
            yield path, item


def _key_names(value: object, count: int) -> list[str]:
    """Return the names of leaves by the keys of the registration, or else numbers."""
    numbers = [str(number) for number in range(count)]
    try:
        paths = [path for path, _ in _pytree.tree_leaves_with_path(value)]
    except Exception:  # the registration has no function for keys, or it fails
        return numbers
    names = [".".join(map(_key_text, path)) for path in paths]
    return names if len(set(names)) == count else numbers


def _key_text(key: object) -> str:
    """Return a key of a path without the punctuation that Python needs."""
    fields = (getattr(key, field, None) for field in ("key", "idx", "name"))
    return str(next((field for field in fields if field is not None), key))


def named_leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a value, however nested, with names that begin with that of the value.

    Items of mappings, tuples and lists are named as torch names them (`pair_0`), and what an
    object holds by its attributes (`cache.layers.0.keys`).
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(f"{name}_{key}", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from named_leaves(f"{name}_{index}", item)
    elif is_tree(value):
        for path, leaf in (flatten_tree(value) or {}).items():
            yield f"{name}.{path}", leaf
    else:
        yield name, value


def without_trees(value: Any) -> Any:
    """Return a value with tuples of tensors in place of registered objects."""
    if is_tree(value):
        leaves = _pytree.tree_leaves(value)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if isinstance(value, Mapping):
        return {key: without_trees(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = map(without_trees, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value
