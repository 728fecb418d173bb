"""What torch's exporters record of where each node ran, read without any code of the package.

The dynamo exporter writes the module stack of each node into the node's metadata. The torchscript
exporter keeps the scope of each node in its graph until it writes the file.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import utils

from modelexport.tagged.model import TaggedModel

_SCOPES = "pkg.torch.onnx.name_scopes"
_REPEATED_CALL = re.compile(r"@\d+$")

Recorded = Callable[[onnx.NodeProto], set[str] | None]
"""The modules that a node's recorded scope may mean, by any of their names; None without a scope."""


def dynamo_scope(node: onnx.NodeProto) -> set[str] | None:
    """Return the innermost module in the metadata of a node that the dynamo exporter wrote."""
    recorded = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    modules = ast.literal_eval(recorded)[:-1]  # the last item is the FX node
    return {_REPEATED_CALL.sub("", modules[-1])} if modules else None


@contextmanager
def recorded_scopes(model: nn.Module) -> Iterator[Recorded]:
    """Record the scope of each node while the block exports the model, with either exporter."""
    graphs: list[Any] = []
    original = utils._model_to_graph

    def model_to_graph(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        graphs[:] = [result[0]]  # later passes change it until it is written
        return result

    @functools.cache
    def scopes() -> dict[str, str]:
        return dict(_scopes_in(graphs[0].nodes())) if graphs else {}

    names = _module_names(model)
    utils._model_to_graph = model_to_graph
    try:
        yield (
            lambda node: (
                dynamo_scope(node)
                or _modules_of(scopes().get(next(iter(node.output), ""), ""), names)
            )
        )
    finally:
        utils._model_to_graph = original


def _scopes_in(nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield from ((value.debugName(), node.scopeName()) for value in node.outputs())
        for block in node.blocks():
            yield from _scopes_in(block.nodes())


def _module_names(model: nn.Module) -> dict[str, set[str]]:
    """Group module paths by what the tracer calls them: the class, and the name without its containers."""
    names: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        start = max((i for i, part in enumerate(parts) if not part.isnumeric()), default=0)
        called = f"{torch.typename(type(module))}::{'.'.join(parts[start:])}"
        names.setdefault(called, set()).add(path)
    return names


def _modules_of(scope: str, names: dict[str, set[str]]) -> set[str] | None:
    """Return the modules of a scope; where several have its last name, those below the modules before it."""
    if not scope:
        return None
    segments = re.split(r"/(?=[^/]*::)", scope)
    found = names[segments[-1]]
    for segment in reversed(segments[:-1]):
        above = names[segment]
        below = {path for path in found if any(_is_below(path, ancestor) for ancestor in above)}
        found = below or found  # a module may be called by one that does not contain it
    return found


def _is_below(path: str, ancestor: str) -> bool:
    return not ancestor or path.startswith(f"{ancestor}.")


def differences(exported: TaggedModel, model: nn.Module, recorded: Recorded) -> list[str]:
    """Return the nodes whose module is not the recorded one and whose covered modules do not include it."""
    found: list[str] = []
    for (node, tag), proto in zip(exported.items(), exported.graph.protos, strict=True):
        scope = recorded(proto)
        if tag is None or scope is None:
            continue
        accepted = {id(model.get_submodule(path)) for path in scope}
        stated = (tag.hierarchy_module, *tag.hierarchy_covers)
        if accepted.isdisjoint(id(model.get_submodule(path)) for path in stated):
            found.append(
                f"{node.key} ({node.op_type}): recorded in {sorted(scope)}, mapped to {stated}"
            )
    return found
