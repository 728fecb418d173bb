"""Read the module tree of a model or of an exported program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram

# Private: torch.jit imports this class but does not export it. It is the only compiled module that
# takes hooks. If torch moves it, importing this file fails.
from torch.jit._trace import TopLevelTracedModule

from modelexport.modules.tree import (
    Aliases,
    Link,
    ModuleInfo,
    ModuleTree,
    find_aliases,
    join_path,
    parameter_counts,
)

_T = TypeVar("_T")

# nn.Module's public iterators skip what is None and what was seen before, and recurse. The tree
# needs every name of every module in order, so it reads the dicts `_modules`, `_parameters` and
# `_buffers`, which are part of the pickled state of every module.


def read_module_tree(model: nn.Module) -> ModuleTree:
    """Read the module tree of a model.

    The first name of a module is its path, the others are aliases.
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
        path: [path_of[id(child)] for child in _present(module._modules).values()]
        for path, module in by_path.items()
    }
    held = {
        path: {id(tensor): tensor.numel() for tensor in _present(module._parameters).values()}
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
        for name, tensor in _present({**module._parameters, **module._buffers}).items()
    }
    return ModuleTree(modules, shapes)


def _present(entries: Mapping[str, _T | None]) -> dict[str, _T]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def _describe(path: str, module: nn.Module, aliases: Aliases, parameter_count: int) -> ModuleInfo:
    cls = type(module)
    return ModuleInfo(
        path=path,
        qualified_class=f"{cls.__module__}.{cls.__name__}",
        children=tuple(_present(module._modules)),
        direct_parameters=tuple(_present(module._parameters)),
        direct_buffers=tuple(_present(module._buffers)),
        forward_args=forward_args(module),
        aliases=aliases.listed,
        more_aliases=aliases.more,
        parameter_count=parameter_count,
        opaque=isinstance(module, torch.jit.ScriptModule)
        and not isinstance(module, TopLevelTracedModule),
    )


def forward_args(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward.

    Variadic ones have * or ** in front. There are none if the signature cannot be read.
    """
    own = module.__dict__.get("forward")
    try:
        return _class_args(type(module).forward) if own is None else _argument_names(own)
    except (TypeError, ValueError, AttributeError):
        return ()


@functools.cache  # reading a signature is slow, and a model has few classes
def _class_args(function: Any) -> tuple[str, ...]:
    return _argument_names(function)[1:]


def _argument_names(function: Any) -> tuple[str, ...]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(str(p).partition(":")[0] if p.kind in variadic else p.name for p in parameters)


def named_args(module: nn.Module) -> dict[str, bool]:
    """Return forward's arguments that can be passed by name, each with whether it is required."""
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
    """Read the module tree from the nodes of a program and the names of its tensors."""
    classes = {"": _UNKNOWN}
    for stack in _module_stacks(program):
        for path, cls in stack.values():
            classes[path] = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    # Plain modules with the same names and tensors have the same tree, but for two facts.
    stand_ins = {"": nn.Module()}
    for path in classes:
        _add_stand_in(stand_ins, path)
    parameters = set(program.graph_signature.parameters)
    for name, tensor in (*program.state_dict.items(), *program.constants.items()):
        if isinstance(tensor, torch.Tensor):
            path, _, own = name.rpartition(".")
            module = _add_stand_in(stand_ins, path)
            tensors: dict[str, Any] = module._parameters if name in parameters else module._buffers
            tensors[own] = tensor
    arguments = tuple(
        str(getattr(spec.arg, "name", ""))
        for spec in program.graph_signature.input_specs
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT
    )
    tree = read_module_tree(stand_ins[""])
    modules = {
        path: msgspec.structs.replace(
            module,
            qualified_class=classes.get(path, _UNKNOWN),
            forward_args=() if path else arguments,
        )
        for path, module in tree.modules.items()
    }
    return ModuleTree(modules, tree.tensor_shapes)


def _add_stand_in(stand_ins: dict[str, nn.Module], path: str) -> nn.Module:
    """Add a plain module for a path, and for the containers above it, unless it is there."""
    parent = ""
    for name in path.split(".") if path not in stand_ins else ():
        child = join_path(parent, name)
        if child not in stand_ins:
            stand_ins[child] = stand_ins[parent]._modules[name] = nn.Module()
        parent = child
    return stand_ins[path]


def _module_stacks(program: ExportedProgram) -> Iterator[Mapping[str, tuple[str, Any]]]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                # Undocumented: by call, the path and the class of each module around a node.
                yield node.meta.get("nn_module_stack") or {}
