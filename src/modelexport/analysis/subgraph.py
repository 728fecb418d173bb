"""The part of a graph that one module makes up, and the values that cross its boundary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx

from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, describe_type
from modelexport.graph.flat import Graph
from modelexport.modules.lookup import Selection, is_tag_within
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry, is_within
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.tagged.model import TaggedModel, load, recorded_tags
from modelexport.tagged.records import Sidecar, read_sidecar


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
    model = (
        TaggedModel(Path(), onnx_model)
        if isinstance(onnx_model, onnx.ModelProto)
        else load(onnx_model)
    )
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


def _members(
    tags: Sequence[NodeTag | None], target: str, modules: Mapping[str, ModuleRecord]
) -> set[int]:
    """The nodes of a module and of those below it."""
    if not isinstance(target, str):
        raise ArgumentTypeError(
            f"the module is {describe_type(target)}", hint="pass a tag or a module path"
        )
    whole = target.rstrip("/")
    is_tag = target.startswith("/")
    members = {
        index
        for index, tag in enumerate(tags)
        if tag is not None
        and (
            is_tag_within(tag.hierarchy_path, whole)
            if is_tag
            else is_within(tag.hierarchy_module, target)
        )
    }
    if (
        not members
        and target not in modules
        and whole not in {record.tag for record in modules.values()}
    ):
        seen = {tag.hierarchy_path for tag in tags if tag is not None}
        near = Selection(target, seen, dict(modules)).nearest()
        raise ArgumentError(
            f"no module is called {target!r}", hint=f"near it: {', '.join(near)}" if near else None
        )
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
            (name, None)
            for name in node.inputs
            if name not in held and graph.producer.get(name) not in members
        )
        leaving = [
            name
            for name in node.outputs
            if name in ends
            or any(reader not in members for reader in graph.consumers.get(name, ()))
        ]
        internal += [name for name in node.outputs if name not in leaving]
        if leaving:
            boundary.append(node.key)
    operations = tuple(graph.nodes[index].key for index in order)
    return ModuleSubgraph(operations, tuple(entering), tuple(internal), tuple(boundary))


def initializer_owners(
    graph: Graph, tags: Sequence[NodeTag | None], lineage: Ancestry
) -> dict[str, str | None]:
    """For each initializer the lowest module that holds all nodes which read it; None where none has a tag."""
    owners: dict[str, str | None] = {}
    for name in graph.initializers:
        readers = [
            tag.hierarchy_module
            for i in graph.consumers.get(name, ())
            if (tag := tags[i]) is not None
        ]
        owners[name] = (
            None if not readers else readers[0] if len(readers) == 1 else lineage.common(readers)
        )
    return owners


class BoundaryValues:
    """The tensors that enter and leave each module, in the order of the file; weights and what is `held` do not count.

    What a body is given comes from the node that holds it, and what it gives back goes there.
    """

    def __init__(
        self,
        graph: Graph,
        tags: Sequence[NodeTag | None],
        lineage: Ancestry,
        held: Iterable[str] = (),
    ) -> None:
        self.inputs: dict[str, dict[str, None]] = {}
        self.outputs: dict[str, dict[str, None]] = {}
        self._lineage = lineage
        weights = {*graph.initializers, *held}
        modules = [None if tag is None else tag.hierarchy_module for tag in tags]
        made_by = {
            name: modules[index] for index, node in enumerate(graph.nodes) for name in node.outputs
        }
        for index, bodies in graph.bodies.items():
            for body in bodies:
                weights.update(body.initializers)
                made_by.update(dict.fromkeys(body.inputs, modules[index]))
        for index, node in enumerate(graph.nodes):
            for name in node.inputs:
                if name not in weights:
                    self._add(name, made_by.get(name), modules[index])
        ends: list[tuple[str, str | None]] = [(name, None) for name in graph.outputs]
        ends += [
            (name, modules[i])
            for i, bodies in graph.bodies.items()
            for body in bodies
            for name in body.outputs
        ]
        for name, reader in ends:
            if name in made_by:
                self._add(name, made_by[name], reader)

    def _add(self, name: str, source: str | None, reader: str | None) -> None:
        """A tensor leaves every module that holds its producer and not its reader, and the other way round."""
        if source == reader:
            return
        left = () if source is None else self._lineage.of(source)
        right = () if reader is None else self._lineage.of(reader)
        shared = 0
        for first, second in zip(left, right, strict=False):
            if first != second:
                break
            shared += 1
        for path in left[shared:]:
            self.outputs.setdefault(path, {})[name] = None
        for path in right[shared:]:
            self.inputs.setdefault(path, {})[name] = None
