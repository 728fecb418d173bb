"""What torch's own metadata tells of modules, against the map: how much of the graph, how right, and what survives.

torch's dynamo exporter writes the modules around each operation into the node's metadata; the torchscript exporter
has them in the node's name. Both are read here as well as they can be, by someone who knows the module tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

import modelexport
import proof
from modelexport.modules.tree import is_within
from modelexport.tagged.model import TaggedModel, recorded_tags

SCOPES = "pkg.torch.onnx.name_scopes"
_NUMBERED = re.compile(r"(.+)_\d+")

Owners = Sequence[str | None]
"""For each node the path of its module; None where nothing is told."""
Values = dict[str, np.ndarray]


def torch_says(node: onnx.NodeProto, modules: Collection[str]) -> str | None:
    """The module that torch's metadata gives a node to, or None where it names none."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            scopes = ast.literal_eval(
                entry.value
            )  # the modules from the root down, and last the operation
            return scopes[-2] if len(scopes) > 1 and scopes[-2] in modules else None
    return _by_name(node.name, modules)


def _by_name(name: str, modules: Collection[str]) -> str | None:
    """The module that a name such as `/encoder/layer.0/output/Add` stands for, or the last one in it that exists."""
    if not name.startswith("/"):
        return None
    path = ""
    for segment in name.split("/")[1:-1]:
        found = next((step for step in _steps(path, segment) if step in modules), None)
        if found is None:
            return path or None
        path = found
    return path


def _steps(path: str, segment: str) -> Iterator[str]:
    """Where a segment can lead: to a child, into a list whose name it repeats, or to a later call of either."""
    numbered = _NUMBERED.fullmatch(segment)
    parent, _, own = path.rpartition(".")
    for name in (segment, *((numbered[1],) if numbered else ())):
        yield f"{path}.{name}" if path else name
        if own and name.startswith(f"{own}."):
            yield f"{parent}.{name}" if parent else name


def by_torch(model: TaggedModel, modules: Collection[str]) -> Owners:
    return [torch_says(node, modules) for node in model.graph.protos]


def by_map(model: TaggedModel) -> Owners:
    return [None if tag is None else tag.hierarchy_module for tag in model.tags]


class Told(NamedTuple):
    """How much torch's metadata tells of one file, and how right it and the map are.

    `named` nodes are those that torch's metadata gives to some module, `tagged` those that the map does. `values`
    counts the modules that made a value of their own in PyTorch which a node of the file computes; `placed_by_torch`
    and `placed_by_map` those of them whose every such value is at the nodes that are said to be theirs, or those of
    a module below. `judged` are the nodes at which the map can judge: neither its module nor the one that torch
    names is one whose value the map misplaces. Of these, torch names the map's module at `same`.
    """

    nodes: int
    named: int
    tagged: int
    values: int
    placed_by_torch: int
    placed_by_map: int
    judged: int
    same: int


def told(path: Path, model: Any, inputs: Any) -> Told:
    exported = modelexport.load(path)
    returned, values = proof.pytorch_values(model, inputs), proof.onnx_values(path, inputs)
    torchs, ours = by_torch(exported, exported.modules), by_map(exported)
    made = {module: _made(exported, calls, values) for module, calls in returned.items()}
    made = {module: tensors for module, tensors in made.items() if tensors}
    by_us = placed(exported, ours, made, values)
    misplaced = set(made) - by_us
    judged = [pair for pair in zip(torchs, ours, strict=True) if not misplaced & set(pair)]
    return Told(
        nodes=len(ours),
        named=sum(owner is not None for owner in torchs),
        tagged=sum(owner is not None for owner in ours),
        values=len(made),
        placed_by_torch=len(placed(exported, torchs, made, values)),
        placed_by_map=len(by_us),
        judged=len(judged),
        same=sum(named == own for named, own in judged),
    )


def _made(exported: TaggedModel, calls: list[proof.Returned], values: Values) -> list[np.ndarray]:
    """The tensors that a module made itself and that a node of the file computes."""
    computed = [name for name in exported.graph.producer if name in values]
    own = [
        t
        for call in calls
        for t in call.given
        if not any(proof.same(t, other) for other in call.taken)
    ]
    return [tensor for tensor in own if proof.found(tensor, computed, values)]


def placed(
    exported: TaggedModel, owners: Owners, made: dict[str, list[np.ndarray]], values: Values
) -> set[str]:
    """The modules that have all values that they made at their nodes."""
    tensors: dict[str, set[str]] = {module: set() for module in made}
    for node, owner in zip(exported.graph.nodes, owners, strict=True):
        for module in made if owner is not None else ():
            if is_within(str(owner), module):
                tensors[module].update((*node.inputs, *node.outputs))
    return {
        module
        for module, wanted in made.items()
        if all(proof.found(value, list(tensors[module]), values) for value in wanted)
    }


class Survived(NamedTuple):
    """What is left of either map in a file that another tool wrote.

    Each is a count of nodes: those that torch's metadata, our doc_strings, or our doc_strings and the sidecar of
    the original give to a module. `torch_moved` and `we_moved` are those of them that are given to another module
    than the same tensor's node was before.
    """

    nodes: int
    torch: int
    doc_strings: int
    with_sidecar: int
    torch_moved: int
    we_moved: int


def survived(original: Path, rewritten: Path) -> Survived:
    before, after = modelexport.load(original), modelexport.load(rewritten)
    sidecar = before.sidecar
    modules = before.modules
    recorded = [None] * len(after.tags) if sidecar is None else recorded_tags(after.graph, sidecar)
    torchs, ours = by_torch(after, modules), by_map(after)
    either = [
        own is not None or record is not None for own, record in zip(ours, recorded, strict=True)
    ]
    return Survived(
        nodes=len(after.graph.nodes),
        torch=sum(owner is not None for owner in torchs),
        doc_strings=sum(owner is not None for owner in ours),
        with_sidecar=sum(either),
        torch_moved=_moved(before, by_torch(before, modules), after, torchs),
        we_moved=_moved(before, by_map(before), after, ours),
    )


def _moved(before: TaggedModel, owners: Owners, after: TaggedModel, now: Owners) -> int:
    was = {node.key: owner for node, owner in zip(before.graph.nodes, owners, strict=True)}
    pairs = [(owner, was.get(node.key)) for node, owner in zip(after.graph.nodes, now, strict=True)]
    return sum(owner is not None and first is not None and owner != first for owner, first in pairs)
