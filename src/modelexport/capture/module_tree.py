"""Read the module tree of a model or of an exported program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.jit._trace import TopLevelTracedModule

from modelexport.capture.recorder import _ANY_NUMBER, _ARGS_OF_CLASS
from modelexport.modules.tree import (
    Aliases,
    Link,
    Module,
    ModuleTree,
    find_aliases,
    join_path,
    parameter_counts,
)


def read_module_tree(model: nn.Module) -> ModuleTree:
    """Read the module tree of a model; the first name of a module is its path, the others are aliases."""
    path_of = {id(model): ""}
    found: dict[str, nn.Module] = {"": model}
    links: dict[str, list[Link]] = {}
    finished: list[str] = []
    # An explicit stack: models nest deeper than Python likes to recurse. Each module is entered once.
    stack = [(model, "", iter(list(model._modules.items())))]
    above = {id(model)}
    while stack:
        module, path, children = stack[-1]
        for name, child in children:
            if child is None or id(child) in above:
                continue
            own = path_of.setdefault(id(child), join_path(path, name))
            links.setdefault(own, []).append((path, name))
            if own not in found:
                found[own] = child
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
        for path, module in found.items()
    }
    held = {
        path: {id(p): p.numel() for _, p in _direct(module._parameters)}
        for path, module in found.items()
    }
    counts = parameter_counts(below, held)
    modules = {
        path: _describe(path, module, aliases[path], counts[path]) for path, module in found.items()
    }
    shapes = {
        join_path(path, name): tuple(tensor.shape)
        for path, module in found.items()
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


def forward_args(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, with * and ** where it takes any."""
    own = module.__dict__.get("forward")
    try:
        function = own if own is not None else type(module).forward
        if function in _ARGS_OF_CLASS:
            return _ARGS_OF_CLASS[function]
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, AttributeError):
        return ()
    if own is None:
        parameters = parameters[1:]
    names = tuple(str(p).partition(":")[0] if p.kind in _ANY_NUMBER else p.name for p in parameters)
    if own is None:
        _ARGS_OF_CLASS[function] = names
    return names


def named_args(module: nn.Module) -> dict[str, bool]:
    """The arguments of a module's forward that can be given by name, and whether each has to be given."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters
    return {
        name: item.default is item.empty for name, item in parameters.items() if item.kind in named
    }


_UNKNOWN = "torch.nn.Module"
"""A container is never called, so a program does not say what it was; like torch's own containers it is not shown."""


def read_program_tree(program: ExportedProgram) -> ModuleTree:
    """The module tree as the program's nodes and the names of its weights tell it."""
    classes: dict[str, str] = {"": _UNKNOWN}
    for stack in _module_stacks(program):
        for path, cls in stack.values():
            classes[path] = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    parameters = set(program.graph_signature.parameters)
    held: dict[str, dict[str, tuple[int, ...]]] = {}
    sizes: dict[str, dict[int, int]] = {}
    for name, tensor in (*program.state_dict.items(), *program.constants.items()):
        if isinstance(tensor, torch.Tensor):
            path, _, own = name.rpartition(".")
            held.setdefault(path, {})[own] = tuple(tensor.shape)
            if name in parameters:
                sizes.setdefault(path, {})[id(tensor)] = tensor.numel()
    children = _children([*classes, *held])
    modules: dict[str, Module] = {}
    stack_of_paths = [""]
    while stack_of_paths:
        path = stack_of_paths.pop()
        tensors = held.get(path, {})
        modules[path] = Module(
            path=path,
            qualified_class=classes.get(path, _UNKNOWN),
            children=tuple(children.get(path, {})),
            direct_parameters=tuple(
                name for name in tensors if join_path(path, name) in parameters
            ),
            direct_buffers=tuple(
                name for name in tensors if join_path(path, name) not in parameters
            ),
            forward_args=tuple(_arguments(program)) if not path else (),
        )
        stack_of_paths.extend(join_path(path, name) for name in reversed(children.get(path, {})))
    below = {path: [join_path(path, name) for name in children.get(path, {})] for path in modules}
    counts = parameter_counts(below, {path: sizes.get(path, {}) for path in modules})
    modules = {
        path: msgspec.structs.replace(m, parameter_count=counts[path])
        for path, m in modules.items()
    }
    shapes = {
        join_path(path, name): shape
        for path, tensors in held.items()
        for name, shape in tensors.items()
    }
    return ModuleTree(modules, shapes)


def _module_stacks(program: ExportedProgram) -> Iterator[Mapping[str, tuple[str, Any]]]:
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                yield node.meta.get("nn_module_stack") or {}


def _children(paths: list[str]) -> dict[str, dict[str, None]]:
    """The names below each path, in order of appearance; containers in between are filled in."""
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
