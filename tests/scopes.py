"""The module of each node as torch's exporters record it, read without any code of the package.

The dynamo exporter writes the module stack of each node into the node's metadata. The torchscript
exporter keeps the scope of each node in its graph until it writes the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx
import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import utils

from modelexport.tagged.model import TaggedModel

_SCOPES = "pkg.torch.onnx.name_scopes"
_REPEATED_CALL = re.compile(r"@\d+$")
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What torch writes for an operation of a program whose module it has lost."""


@dataclass(frozen=True)
class RecordedScopes:
    """The scopes that an exporter recorded while it exported a model."""

    model: nn.Module
    by_value: dict[str, str] = field(default_factory=dict)
    """The torchscript exporter's scope of each value; empty with dynamo, which writes its own."""

    @cached_property
    def names(self) -> dict[str, set[str]]:
        return _module_names(self.model)

    def modules_of(self, node: onnx.NodeProto) -> set[str] | None:
        """Return the modules that a node's scope may mean, by any of their names, if it has one."""
        scope = self.by_value.get(next(iter(node.output), ""), "")
        return dynamo_scope(node) or _modules_of(scope, self.names)


def dynamo_scope(node: onnx.NodeProto) -> set[str] | None:
    """Return the innermost module in the metadata of a node that the dynamo exporter wrote."""
    recorded = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    stack = ast.literal_eval(recorded)[:-1]  # the last item is the FX node
    modules = [module for module in stack if module != _NO_MODULE]
    return {_REPEATED_CALL.sub("", modules[-1])} if modules else None


@contextmanager
def recorded_scopes(model: nn.Module) -> Iterator[RecordedScopes]:
    """Record the scope of each node while the block exports the model, with either exporter."""
    recorded = RecordedScopes(model)
    graphs: list[Any] = []
    original = utils._model_to_graph

    def model_to_graph(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        graphs[:] = [result[0]]  # later passes change it until it is written
        return result

    utils._model_to_graph = model_to_graph
    try:
        yield recorded
        for graph in graphs:
            recorded.by_value.update(_scopes_in(graph.nodes()))
    finally:
        utils._model_to_graph = original


def _scopes_in(nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield from ((value.debugName(), node.scopeName()) for value in node.outputs())
        for block in node.blocks():
            yield from _scopes_in(block.nodes())


def _module_names(model: nn.Module) -> dict[str, set[str]]:
    """Group module paths by the tracer's name: the class, and the path without its containers."""
    names: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        start = max((i for i, part in enumerate(parts) if not part.isnumeric()), default=0)
        called = f"{torch.typename(type(module))}::{'.'.join(parts[start:])}"
        names.setdefault(called, set()).add(path)
    return names


def _modules_of(scope: str, names: dict[str, set[str]]) -> set[str] | None:
    """Return the modules of a scope: of those with its last name, the ones below its others."""
    if not scope:
        return None
    segments = re.split(r"/(?=[^/]*::)", scope)
    modules = names[segments[-1]]
    for segment in reversed(segments[:-1]):
        above = names[segment]
        below = {path for path in modules if any(_is_below(path, ancestor) for ancestor in above)}
        modules = below or modules  # a module may be called by one that does not contain it
    return modules


def _is_below(path: str, ancestor: str) -> bool:
    return not ancestor or path.startswith(f"{ancestor}.")


def differences(exported: TaggedModel, model: nn.Module, recorded: RecordedScopes) -> list[str]:
    """Return the nodes that neither belong to the module that was recorded nor cover it."""
    different: list[str] = []
    for (node, tag), proto in zip(exported.items(), exported.graph.protos, strict=True):
        scope = recorded.modules_of(proto)
        if tag is None or scope is None:
            continue
        accepted = {id(model.get_submodule(path)) for path in scope}
        stated = (tag.hierarchy_module, *tag.hierarchy_covers)
        if accepted.isdisjoint(id(model.get_submodule(path)) for path in stated):
            different.append(
                f"{node.key} ({node.op_type}): recorded in {sorted(scope)}, mapped to {stated}"
            )
    return different
