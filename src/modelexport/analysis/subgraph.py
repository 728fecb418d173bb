"""Which part of a graph is one module: its nodes, and the tensors that enter, stay inside and leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx

from modelexport.analysis.selection import Selection, tag_within
from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, a_kind
from modelexport.graph import Graph
from modelexport.hierarchy.tree import is_within
from modelexport.tagged import codec
from modelexport.tagged.files import StrPath, as_path
from modelexport.tagged.model import TaggedModel, load, recorded_tags
from modelexport.tagged.sidecar import ModuleRecord, Sidecar, read_sidecar


class ModuleSubgraph(msgspec.Struct, frozen=True):
    """One module's part of the graph; every entry is a tensor name, and a node goes by its first output.

    `operations` are the module's nodes with those of the modules below it, in the order of the file.
    `external_inputs` are tensors made elsewhere that they read, without weights; `internal_tensors` are
    made by them and read by no other; `boundary_operations` are those of the nodes whose results are read
    outside or are outputs of the graph. Fields can be had by key as well: `subgraph["operations"]`.
    """

    operations: tuple[str, ...]
    external_inputs: tuple[str, ...]
    internal_tensors: tuple[str, ...]
    boundary_operations: tuple[str, ...]

    def __getitem__(self, key: str) -> tuple[str, ...]:
        if key not in self.__struct_fields__:
            raise KeyError(key)
        found: tuple[str, ...] = getattr(self, key)
        return found


def extract_module_subgraph(
    onnx_model: onnx.ModelProto | StrPath,
    hierarchy_metadata: Sidecar | Mapping[str, Any] | StrPath | None,
    target_module: str,
) -> ModuleSubgraph:
    """The part of a graph that a module makes up.

    `hierarchy_metadata` is a sidecar: its path, its parsed JSON or the record; None takes the tags in the
    model itself, or those of its own sidecar. `target_module` is a tag or a module path; the root is "".
    """
    model = TaggedModel(Path(), onnx_model) if isinstance(onnx_model, onnx.ModelProto) else load(onnx_model)
    sidecar = _sidecar(hierarchy_metadata)
    tags = model.effective_tags if sidecar is None else recorded_tags(model.graph, sidecar)
    records = sidecar or model.records
    modules = {} if records is None else records.modules
    return _cut(model.graph, _members(tags, target_module, modules))


def _sidecar(metadata: Sidecar | Mapping[str, Any] | StrPath | None) -> Sidecar | None:
    if metadata is None or isinstance(metadata, Sidecar):
        return metadata
    if not isinstance(metadata, Mapping):
        return read_sidecar(as_path(metadata))
    try:
        return msgspec.convert(metadata, Sidecar)
    except msgspec.ValidationError as error:
        hint = "pass the sidecar's JSON as it was read"
        raise FormatError(f"the hierarchy metadata is not a sidecar: {error}", hint=hint) from error


def _members(tags: Sequence[codec.NodeTag | None], target: str, modules: Mapping[str, ModuleRecord]) -> set[int]:
    """The nodes of a module and of those below it."""
    if not isinstance(target, str):
        raise ArgumentTypeError(f"the module is {a_kind(target)}", hint="pass a tag or a module path")
    whole = target.rstrip("/")
    is_tag = target.startswith("/")
    members = {
        index
        for index, tag in enumerate(tags)
        if tag is not None
        and (tag_within(tag.hierarchy_path, whole) if is_tag else is_within(tag.hierarchy_module, target))
    }
    if not members and target not in modules and whole not in {record.tag for record in modules.values()}:
        seen = {tag.hierarchy_path for tag in tags if tag is not None}
        near = Selection(target, seen, dict(modules)).nearest()
        raise ArgumentError(f"no module is called {target!r}", hint=f"near it: {', '.join(near)}" if near else None)
    return members


def _cut(graph: Graph, members: set[int]) -> ModuleSubgraph:
    held, ends = set(graph.initializers), set(graph.outputs)
    for index, bodies in graph.bodies.items():
        for body in bodies:
            held.update(body.initializers)
            if index in members:
                held.update(body.inputs)
            else:
                ends.update(body.outputs)
    entering: dict[str, None] = {}
    internal: list[str] = []
    boundary: list[str] = []
    order = sorted(members)
    for index in order:
        node = graph.nodes[index]
        entering.update(
            (name, None) for name in node.inputs if name not in held and graph.producer.get(name) not in members
        )
        leaving = [
            name
            for name in node.outputs
            if name in ends or any(reader not in members for reader in graph.consumers.get(name, ()))
        ]
        internal += [name for name in node.outputs if name not in leaving]
        if leaving:
            boundary.append(node.key)
    operations = tuple(graph.nodes[index].key for index in order)
    return ModuleSubgraph(operations, tuple(entering), tuple(internal), tuple(boundary))
