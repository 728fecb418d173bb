"""Compare torch's own metadata with the map: coverage, correctness, and what survives other tools.

torch's dynamo exporter writes the modules of each operation to the node's metadata; the torchscript
exporter writes them to the node's name, which is read here with the help of the module tree.
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
"""The module path of each node, or None if it is unknown."""
Values = dict[str, np.ndarray]


def torch_module(node: onnx.NodeProto, modules: Collection[str]) -> str | None:
    """Return the module that torch's metadata names for a node, if it names one."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            scopes = ast.literal_eval(entry.value)  # modules from the root down, then the operation
            return scopes[-2] if len(scopes) > 1 and scopes[-2] in modules else None
    return _module_of_name(node.name, modules)


def _module_of_name(name: str, modules: Collection[str]) -> str | None:
    """Return the module of a name such as `/encoder/layer.0/output/Add`, as far as it exists."""
    if not name.startswith("/"):
        return None
    path = ""
    for segment in name.split("/")[1:-1]:
        child = next((child for child in _candidates(path, segment) if child in modules), None)
        if child is None:
            return path or None
        path = child
    return path


def _candidates(path: str, segment: str) -> Iterator[str]:
    """Yield the modules that a segment can stand for.

    It is a child, an element of a list whose name it repeats, or a later call of either, with a
    number.
    """
    numbered = _NUMBERED.fullmatch(segment)
    parent, _, own = path.rpartition(".")
    for name in (segment, *((numbered[1],) if numbered else ())):
        yield f"{path}.{name}" if path else name
        if own and name.startswith(f"{own}."):
            yield f"{parent}.{name}" if parent else name


def owners_by_torch(model: TaggedModel, modules: Collection[str]) -> Owners:
    """Return the module of each node by torch's metadata."""
    return [torch_module(node, modules) for node in model.graph.protos]


def owners_by_map(model: TaggedModel) -> Owners:
    """Return the module of each node by the map."""
    return [None if tag is None else tag.hierarchy_module for tag in model.tags]


class MetadataCounts(NamedTuple):
    """The coverage and correctness of torch's metadata and of the map in one file.

    Attributes:
        nodes: all nodes of the file.
        named: nodes for which torch names a module.
        tagged: nodes with a module in the map.
        modules: modules with a result of their own that a node of the file computes.
        located_by_torch: modules of which torch has every result at their nodes.
        located_by_map: the same for the map.
        judged: nodes whose modules, by torch and by the map, have all results in the map.
        same: judged nodes for which torch names the module of the map.
    """

    nodes: int
    named: int
    tagged: int
    modules: int
    located_by_torch: int
    located_by_map: int
    judged: int
    same: int


def count_metadata(path: Path, model: Any, inputs: Any) -> MetadataCounts:
    """Compare torch's metadata and the map of a file with the values in PyTorch."""
    exported = modelexport.load(path)
    returned, values = proof.pytorch_values(model, inputs), proof.onnx_values(path, inputs)
    torchs, ours = owners_by_torch(exported, exported.modules), owners_by_map(exported)
    results = {module: _own_results(exported, calls, values) for module, calls in returned.items()}
    results = {module: tensors for module, tensors in results.items() if tensors}
    located = modules_with_results(exported, ours, results, values)
    missed = set(results) - located
    judged = [pair for pair in zip(torchs, ours, strict=True) if not missed & set(pair)]
    return MetadataCounts(
        nodes=len(ours),
        named=sum(owner is not None for owner in torchs),
        tagged=sum(owner is not None for owner in ours),
        modules=len(results),
        located_by_torch=len(modules_with_results(exported, torchs, results, values)),
        located_by_map=len(located),
        judged=len(judged),
        same=sum(named == own for named, own in judged),
    )


def _own_results(
    exported: TaggedModel, calls: list[proof.Returned], values: Values
) -> list[np.ndarray]:
    """Return the tensors that a module computed itself and that a node of the file computes."""
    computed = [name for name in exported.graph.producer if name in values]
    own = [
        tensor
        for call in calls
        for tensor in call.given
        if not any(proof.same(tensor, other) for other in call.taken)
    ]
    return [tensor for tensor in own if proof.found(tensor, computed, values)]


def modules_with_results(
    exported: TaggedModel, owners: Owners, results: dict[str, list[np.ndarray]], values: Values
) -> set[str]:
    """Return the modules that have all their results at their nodes."""
    names: dict[str, set[str]] = {module: set() for module in results}
    for node, owner in zip(exported.graph.nodes, owners, strict=True):
        for module in results if owner is not None else ():
            if is_within(str(owner), module):
                names[module].update((*node.inputs, *node.outputs))
    return {
        module
        for module, tensors in results.items()
        if all(proof.found(tensor, list(names[module]), values) for tensor in tensors)
    }


class Survival(NamedTuple):
    """The nodes that still have a module in a file that another tool wrote.

    `torch`, `doc_strings` and `with_sidecar` count the nodes with a module by torch's metadata, by
    the doc_strings, and by the doc_strings or the sidecar of the original. `torch_moved` and
    `we_moved` count those whose module is not that of the same value's node in the original.
    """

    nodes: int
    torch: int
    doc_strings: int
    with_sidecar: int
    torch_moved: int
    we_moved: int


def count_survivors(original: Path, rewritten: Path) -> Survival:
    """Compare a rewritten file with the original."""
    before, after = modelexport.load(original), modelexport.load(rewritten)
    sidecar = before.sidecar
    modules = before.modules
    recorded = [None] * len(after.tags) if sidecar is None else recorded_tags(after.graph, sidecar)
    torchs, ours = owners_by_torch(after, modules), owners_by_map(after)
    has_module = [
        own is not None or record is not None for own, record in zip(ours, recorded, strict=True)
    ]
    return Survival(
        nodes=len(after.graph.nodes),
        torch=sum(owner is not None for owner in torchs),
        doc_strings=sum(owner is not None for owner in ours),
        with_sidecar=sum(has_module),
        torch_moved=_count_moved(before, owners_by_torch(before, modules), after, torchs),
        we_moved=_count_moved(before, owners_by_map(before), after, ours),
    )


def _count_moved(before: TaggedModel, owners: Owners, after: TaggedModel, now: Owners) -> int:
    """Count the nodes whose module changed."""
    earlier = {node.key: owner for node, owner in zip(before.graph.nodes, owners, strict=True)}
    pairs = [
        (owner, earlier.get(node.key)) for node, owner in zip(after.graph.nodes, now, strict=True)
    ]
    return sum(owner is not None and first is not None and owner != first for owner, first in pairs)
