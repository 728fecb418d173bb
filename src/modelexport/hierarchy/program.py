"""Reads the module tree off a program that torch.export has made, whose modules are gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.export import ExportedProgram

from modelexport.hierarchy.tree import Module, ModuleTree, join, parameter_counts

_UNKNOWN = "torch.nn.Module"
"""A container is never called, so a program does not say what it was; like torch's own containers it is not shown."""


def scan_program(program: ExportedProgram) -> ModuleTree:
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
            direct_parameters=tuple(name for name in tensors if join(path, name) in parameters),
            direct_buffers=tuple(name for name in tensors if join(path, name) not in parameters),
            forward_args=tuple(_arguments(program)) if not path else (),
        )
        stack_of_paths.extend(join(path, name) for name in reversed(children.get(path, {})))
    below = {path: [join(path, name) for name in children.get(path, {})] for path in modules}
    counts = parameter_counts(below, {path: sizes.get(path, {}) for path in modules})
    modules = {path: msgspec.structs.replace(m, parameter_count=counts[path]) for path, m in modules.items()}
    shapes = {join(path, name): shape for path, tensors in held.items() for name, shape in tensors.items()}
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
