"""The part of a graph that a module makes up: its nodes, and the values that enter and leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import NodeTag
from modelexport.modules.tree import Ancestry, is_within
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load, recorded_tags
from modelexport.tagged.records import Sidecar, read_sidecar


class ModuleSubgraph(msgspec.Struct, frozen=True):
    """One module's part of the graph, as names of values; a node goes by its first output.

    Fields can be read by key as well: `subgraph["operations"]`.
    """

    operations: tuple[str, ...]
    """The nodes of the module and of the modules below it, in file order."""
    external_inputs: tuple[str, ...]
    """The values that they consume and do not produce, without initializers."""
    internal_tensors: tuple[str, ...]
    """The values that they produce and only they consume."""
    boundary_operations: tuple[str, ...]
    """Those of the nodes with an output that is consumed outside, or is a graph output."""

    def __getitem__(self, key: str) -> tuple[str, ...]:
        if key not in self.__struct_fields__:
            raise KeyError(key)
        value: tuple[str, ...] = getattr(self, key)
        return value


@keyword_aliases(onnx_model="path", target_module="module")
def extract_module_subgraph(
    path: onnx.ModelProto | StrPath,
    hierarchy_metadata: Sidecar | Mapping[str, Any] | StrPath | None,
    module: str,
) -> ModuleSubgraph:
    """Find the part of a graph that a module makes up.

    Args:
        path: The path of a tagged model, or the model itself.
        hierarchy_metadata: The sidecar, as its path, its parsed JSON or the record; None to use
            the tags in the model, or those of the sidecar beside it.
        module: A tag, a module path ("" is the root), an alias, or a glob of one match.

    Returns:
        The names of the module's nodes and values.

    Raises:
        ArgumentError: If there is no such module.
        FormatError: If the model or the sidecar is malformed.
    """
    model = TaggedModel(Path(), path) if isinstance(path, onnx.ModelProto) else load(path)
    sidecar = _read_metadata(hierarchy_metadata)
    tags = model.effective_tags if sidecar is None else recorded_tags(model.graph, sidecar)
    modules = model.modules if sidecar is None else sidecar.modules
    found = ModuleIndex(modules, tags).find(module).path
    values = BoundaryValues(model.graph, tags, Ancestry(modules))
    leaving = values.outputs.get(found, {})
    nodes = [
        node
        for node, tag in zip(model.graph.nodes, tags, strict=True)
        if tag is not None and is_within(tag.hierarchy_module, found)
    ]
    outputs = [name for node in nodes for name in node.outputs]
    return ModuleSubgraph(
        operations=tuple(node.key for node in nodes),
        external_inputs=tuple(values.inputs.get(found, ())),
        internal_tensors=tuple(name for name in outputs if name not in leaving),
        boundary_operations=tuple(n.key for n in nodes if any(o in leaving for o in n.outputs)),
    )


def _read_metadata(metadata: Sidecar | Mapping[str, Any] | StrPath | None) -> Sidecar | None:
    if metadata is None or isinstance(metadata, Sidecar):
        return metadata
    if not isinstance(metadata, Mapping):
        return read_sidecar(as_path(metadata))
    try:
        return msgspec.convert(metadata, Sidecar)
    except msgspec.ValidationError as error:
        hint = "pass the sidecar's JSON as it was read"
        raise FormatError(f"the hierarchy metadata is not a sidecar: {error}", hint=hint) from error


class BoundaryValues:
    """The values that enter and leave each module, in file order, without initializers.

    The inputs of a nested subgraph come from the node that holds it, and its outputs go there.

    Attributes:
        inputs: By module path, the values that it consumes and does not produce.
        outputs: By module path, the values that it produces and that are consumed elsewhere.
    """

    def __init__(
        self,
        graph: Graph,
        tags: Sequence[NodeTag | None],
        ancestry: Ancestry,
        constants: Iterable[str] = (),
    ) -> None:
        """Compute the boundaries of all modules at once, without the given constants."""
        self.inputs: dict[str, dict[str, None]] = {}
        self.outputs: dict[str, dict[str, None]] = {}
        self._ancestry = ancestry
        modules = [None if tag is None else tag.hierarchy_module for tag in tags]
        producers = {
            name: modules[index] for index, node in enumerate(graph.nodes) for name in node.outputs
        }
        provided = {*graph.initializers, *constants}
        nested = [(index, inner) for index, held in graph.subgraphs.items() for inner in held]
        for index, subgraph in nested:
            provided.update(subgraph.initializers)
            producers.update(dict.fromkeys(subgraph.inputs, modules[index]))
        for index, node in enumerate(graph.nodes):
            for name in node.inputs:
                if name not in provided:
                    self._add_edge(name, producers.get(name), modules[index])
        ends: list[tuple[str, str | None]] = [(name, None) for name in graph.outputs]
        ends += [(name, modules[index]) for index, subgraph in nested for name in subgraph.outputs]
        for name, consumer in ends:
            if name in producers:
                self._add_edge(name, producers[name], consumer)

    def _add_edge(self, name: str, producer: str | None, consumer: str | None) -> None:
        """Add a value to the modules that hold either its producer or its consumer, not both."""
        if producer == consumer:
            return
        sources = set() if producer is None else {*self._ancestry.of(producer)}
        targets = set() if consumer is None else {*self._ancestry.of(consumer)}
        for path in sources - targets:
            self.outputs.setdefault(path, {})[name] = None
        for path in targets - sources:
            self.inputs.setdefault(path, {})[name] = None
