"""Read the module tree of a model or of an exported program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

# Private: torch.jit imports this class but does not export it. It is the only compiled module that
# takes hooks. If torch moves it, importing this file fails.
from torch.jit._trace import TopLevelTracedModule

from modelexport.modules.tree import (
    Aliases,
    Link,
    Module,
    ModuleTree,
    find_aliases,
    join_path,
    parameter_counts,
)

# nn.Module's public iterators skip what is None and what was seen before, and recurse. The tree
# needs every name of every module in order, so it reads the dicts `_modules`, `_parameters` and
# `_buffers`, which are part of the pickled state of every module.


def read_module_tree(model: nn.Module) -> ModuleTree:
    """Read the module tree of a model.

    Args:
        model: The model.

    Returns:
        Its modules; the first name of a module is its path, the others are aliases.
    """
    path_of = {id(model): ""}
    by_path: dict[str, nn.Module] = {"": model}
    links: dict[str, list[Link]] = {}
    finished: list[str] = []
    # An explicit stack, because models nest deeper than Python can recurse. Each module is entered
    # once.
    stack = [(model, "", iter(list(model._modules.items())))]
    above = {id(model)}
    while stack:
        module, path, children = stack[-1]
        for name, child in children:
            if child is None or id(child) in above:
                continue
            own = path_of.setdefault(id(child), join_path(path, name))
            links.setdefault(own, []).append((path, name))
            if own not in by_path:
                by_path[own] = child
                above.add(id(child))
                stack.append((child, own, iter(list(child._modules.items()))))
                break
        else:
            stack.pop()
            above.remove(id(module))
            finished.append(path)
    aliases = find_aliases(links, reversed(finished))
    below = {
        path: [path_of[id(child)] for child in module._modules.values() if child is not None]
        for path, module in by_path.items()
    }
    held = {
        path: {id(p): p.numel() for _, p in _direct(module._parameters)}
        for path, module in by_path.items()
    }
    counts = parameter_counts(below, held)
    modules = {
        path: _describe(path, module, aliases[path], counts[path])
        for path, module in by_path.items()
    }
    shapes = {
        join_path(path, name): tuple(tensor.shape)
        for path, module in by_path.items()
        for name, tensor in (*_direct(module._parameters), *_direct(module._buffers))
    }
    return ModuleTree(modules, shapes)


def _direct(tensors: Mapping[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _describe(path: str, module: nn.Module, aliases: Aliases, parameter_count: int) -> Module:
    cls = type(module)
    return Module(
        path=path,
        qualified_class=f"{cls.__module__}.{cls.__name__}",
        children=tuple(name for name, child in module._modules.items() if child is not None),
        direct_parameters=tuple(name for name, _ in _direct(module._parameters)),
        direct_buffers=tuple(name for name, _ in _direct(module._buffers)),
        forward_args=forward_args(module),
        aliases=aliases.listed,
        more_aliases=aliases.more,
        parameter_count=parameter_count,
        opaque=isinstance(module, torch.jit.ScriptModule)
        and not isinstance(module, TopLevelTracedModule),
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARGS_BY_FORWARD: dict[Any, tuple[str, ...]] = {}
"""Cached by the `forward` of a class: reading a signature is slow, and a model has few classes."""


def forward_args(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward.

    Args:
        module: The module.

    Returns:
        The names, with * and ** in front of variadic ones; empty if they cannot be read.
    """
    own = module.__dict__.get("forward")
    try:
        function = own if own is not None else type(module).forward
        if function in _ARGS_BY_FORWARD:
            return _ARGS_BY_FORWARD[function]
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, AttributeError):
        return ()
    if own is None:
        parameters = parameters[1:]
    names = tuple(str(p).partition(":")[0] if p.kind in _VARIADIC else p.name for p in parameters)
    if own is None:
        _ARGS_BY_FORWARD[function] = names
    return names


def named_args(module: nn.Module) -> dict[str, bool]:
    """Return the arguments of a module's forward that can be passed by name.

    Args:
        module: The module.

    Returns:
        The names, each with whether it is required.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters
    return {
        name: item.default is item.empty for name, item in parameters.items() if item.kind in named
    }


_UNKNOWN = "torch.nn.Module"
"""The class of a container: it is never called, so a program has no record of it.

Like torch's own containers it is not shown.
"""


def read_program_tree(program: ExportedProgram) -> ModuleTree:
    """Read the module tree from the nodes of a program and the names of its tensors.

    Args:
        program: The exported program.

    Returns:
        Its modules.
    """
    classes = {"": _UNKNOWN}
    for stack in _module_stacks(program):
        for path, cls in stack.values():
            classes[path] = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    parameters = set(program.graph_signature.parameters)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in (*program.state_dict.items(), *program.constants.items()):
        if isinstance(tensor, torch.Tensor):
            path, _, own = name.rpartition(".")
            tensors.setdefault(path, {})[own] = tensor
    children = _children([*classes, *tensors])
    paths = list(_depth_first(children))
    held = {
        path: {
            id(tensor): tensor.numel()
            for name, tensor in tensors.get(path, {}).items()
            if join_path(path, name) in parameters
        }
        for path in paths
    }
    below = {path: [join_path(path, name) for name in children.get(path, ())] for path in paths}
    counts = parameter_counts(below, held)
    arguments = tuple(_arguments(program))
    modules = {
        path: Module(
            path=path,
            qualified_class=classes.get(path, _UNKNOWN),
            children=tuple(children.get(path, ())),
            direct_parameters=tuple(
                name for name in tensors.get(path, ()) if join_path(path, name) in parameters
            ),
            direct_buffers=tuple(
                name for name in tensors.get(path, ()) if join_path(path, name) not in parameters
            ),
            forward_args=() if path else arguments,
            parameter_count=counts[path],
        )
        for path in paths
    }
    shapes = {
        join_path(path, name): tuple(tensor.shape)
        for path, named in tensors.items()
        for name, tensor in named.items()
    }
    return ModuleTree(modules, shapes)


def _depth_first(children: dict[str, dict[str, None]]) -> Iterator[str]:
    """Yield the paths of a tree, each before those below it."""
    pending = [""]
    while pending:
        path = pending.pop()
        yield path
        pending.extend(join_path(path, name) for name in reversed(children.get(path, {})))


def _module_stacks(program: ExportedProgram) -> Iterator[Mapping[str, tuple[str, Any]]]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                # Undocumented: by call, the path and the class of each module around a node.
                yield node.meta.get("nn_module_stack") or {}


def _children(paths: list[str]) -> dict[str, dict[str, None]]:
    """Return the names below each path in order of appearance, with the containers in between."""
    children: dict[str, dict[str, None]] = {}
    for path in paths:
        while path:
            parent, _, name = path.rpartition(".")
            children.setdefault(parent, {}).setdefault(name)
            path = parent
    return children


def _arguments(program: ExportedProgram) -> Iterator[str]:
    for spec in program.graph_signature.input_specs:
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            yield str(getattr(spec.arg, "name", ""))
