"""A tagged file: its nodes, its map, and which tags are in effect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from modelexport.errors import FileError, FormatError, first_line, plural
from modelexport.graph.flat import Graph, Node, StoredNodes, flatten
from modelexport.graph.nested import TagReader, node_key
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    external_files,
    open_mapped,
    parse_model,
)
from modelexport.tagged.records import (
    FORMAT,
    FUNCTIONS_KEY,
    METADATA_KEY,
    EmbeddedMap,
    NodeRecord,
    Sidecar,
    decode_embedded,
    decode_tag,
    read_sidecar,
    sidecar_path,
)


class MapInEffect(NamedTuple):
    """Where the tags of a file are, and the records that go with them."""

    source: str | None
    """`file`, `sidecar`, or None where no tag is in effect."""
    records: EmbeddedMap | Sidecar | None
    sidecar: Sidecar | None
    """The sidecar, where its tags are in effect."""
    refused: str | None
    """Why the sidecar beside the file is not used, where it was needed."""


def map_in_effect(
    path: Path, proto: onnx.ModelProto, is_tagged: bool, graph: Callable[[], Graph]
) -> MapInEffect:
    """Decide which tags are in effect for a file.

    These are the tags of its nodes; for a file without any, those of its sidecar if that describes
    this very graph. A tagged file without readable metadata takes the module records of a sidecar
    that describes its nodes.

    Args:
        path: The file; an empty path for a model that is in memory only.
        proto: The model.
        is_tagged: Whether any of its nodes has a tag.
        graph: Returns the flat view of the model. It is called only where it is needed.
    """
    embedded = _readable_metadata(proto)
    own = "file" if is_tagged else None
    if (own and embedded is not None) or not path.name or not sidecar_path(path).exists():
        return MapInEffect(own, embedded, None, None)
    try:
        sidecar = read_sidecar(sidecar_path(path))
    except (FormatError, FileError) as error:
        reason = f"it cannot be read: {first_line(error.__cause__ or error)}"
        return MapInEffect(own, embedded, None, reason)
    nodes = graph()
    mismatch = mismatch_reason(sidecar, nodes, exact=own is None)
    if mismatch is not None:
        return MapInEffect(own, embedded, None, mismatch)
    return MapInEffect(own or "sidecar", embedded or sidecar, None if own else sidecar, None)


def mismatch_reason(sidecar: Sidecar, graph: Graph, exact: bool = False) -> str | None:
    """Say why a sidecar belongs to another file; None if it may belong to this one.

    Args:
        sidecar: The sidecar.
        graph: The nodes of the file.
        exact: Whether it has to be of this very graph, not only name most of the nodes.
    """
    if sidecar.format != FORMAT:
        return f"its format is {sidecar.format!r}"
    if exact:
        same = topology_digest(graph, node_digests(graph)) == sidecar.statistics.topology
        return None if same else "it is of another graph"
    known, total = sum(node.key in sidecar.nodes for node in graph.nodes), len(graph.nodes)
    if 2 * known >= total:
        return None
    return f"it describes {known} of the file's {plural(total, 'node')}"


class TaggedModel:
    """A model file with its map, as `load` returns it.

    Args:
        path: The file that it was read from; an empty path for a model that is in memory only.
        proto: The model, without the data of large initializers.
        nodes: The nodes of its main graph, where `proto` is without them. Their names need not be
            UTF-8.

    Attributes:
        path: The file.
        proto: The model.
        graph: All nodes, flat and in file order.
        tags: The tag of each node; None for a node without a tag.

    Raises:
        FormatError: A name is not UTF-8.
    """

    def __init__(
        self, path: Path, proto: onnx.ModelProto, nodes: StoredNodes | None = None
    ) -> None:
        self.path = path
        self.proto = proto
        self.graph: Graph = flatten(proto, nodes)
        if nodes is None and self.graph.non_utf8_names:
            raise FormatError(f"{path} has names that are not UTF-8", hint="write it again")
        decode = functools.cache(decode_tag)  # most nodes of a module have equal tags
        self.tags: list[NodeTag | None] = [decode(node.doc_string) for node in self.graph.protos]

    @functools.cached_property
    def embedded(self) -> EmbeddedMap | None:
        """The model-level metadata; None in a file without a map.

        Raises:
            FormatError: It is damaged.
        """
        return _metadata(self.proto)

    @property
    def readable_metadata(self) -> EmbeddedMap | None:
        """The model-level metadata; None where there is none that can be read."""
        return _readable_metadata(self.proto)

    @functools.cached_property
    def in_effect(self) -> MapInEffect:
        """Where the tags that are in effect for this file are."""
        return map_in_effect(self.path, self.proto, self.is_tagged, lambda: self.graph)

    @functools.cached_property
    def effective_tags(self) -> Sequence[NodeTag | None]:
        """The tag in effect of each node: its own, or in a file without tags the sidecar's."""
        sidecar = self.in_effect.sidecar
        return self.tags if sidecar is None else recorded_tags(self.graph, sidecar)

    @functools.cached_property
    def sidecar(self) -> Sidecar | None:
        """The sidecar beside the file; None where there is none.

        Raises:
            FormatError: It is damaged.
        """
        return read_sidecar(sidecar_path(self.path)) if self.has_sidecar else None

    @property
    def data_files(self) -> list[str]:
        """The names of the data files of the model, relative to its folder.

        Raises:
            FormatError: A name leads out of the folder.
        """
        return external_files(self.proto) if self.graph.has_external_data else []

    @property
    def has_metadata(self) -> bool:
        """Whether the model has metadata of a map, readable or not."""
        return any(entry.key == METADATA_KEY for entry in self.proto.metadata_props)

    @property
    def has_module_functions(self) -> bool:
        """Whether its modules are local functions, as `to_functions` writes them."""
        return has_module_functions(self.proto)

    @property
    def has_sidecar(self) -> bool:
        """Whether there is a sidecar, readable or not."""
        return sidecar_path(self.path).exists()

    @property
    def records(self) -> EmbeddedMap | Sidecar | None:
        """The records of the export, of the file or its sidecar; None where neither is usable."""
        return self.in_effect.records

    @property
    def modules(self) -> dict[str, ModuleRecord]:
        """The module records by path."""
        return {} if self.records is None else self.records.modules

    @property
    def is_tagged(self) -> bool:
        """Whether any node has a tag."""
        return any(tag is not None for tag in self.tags)

    @property
    def coverage(self) -> float:
        """The share of nodes that have a tag."""
        return sum(tag is not None for tag in self.tags) / len(self.tags) if self.tags else 1.0

    def items(self) -> Iterator[tuple[Node, NodeTag | None]]:
        """Iterate over the nodes, each with its tag."""
        return zip(self.graph.nodes, self.tags, strict=True)


def require_tags(model: TaggedModel) -> None:
    """Refuse a file whose nodes have no tags in effect.

    Raises:
        FormatError: It has none.
    """
    if not any(model.effective_tags):
        raise no_map_error(model.path, model.in_effect)


def require_records(model: TaggedModel) -> EmbeddedMap | Sidecar:
    """Return the records of a file; refuse one without them, or without tags.

    Raises:
        FormatError: It has none.
    """
    require_tags(model)
    if model.records is None:
        raise no_map_error(model.path, model.in_effect, "no records of its modules")
    return model.records


def no_map_error(path: Path, effective: MapInEffect, lacks: str = "no tags") -> FormatError:
    """Return the error for a file that lacks its map, with why its sidecar does not help."""
    reason = ""
    if effective.refused is not None:
        reason = f", and {sidecar_path(path).name} cannot be used: {effective.refused}"
    hint = "pass a file that modelexport exported or retagged, with its sidecar if it is clean"
    return FormatError(f"{path.name or 'the model'} has {lacks}{reason}", hint=hint)


def has_module_functions(proto: onnx.ModelProto) -> bool:
    """Return whether the modules of a model are local functions, as `to_functions` writes them."""
    return any(entry.key == FUNCTIONS_KEY for entry in proto.metadata_props)


def _metadata(proto: onnx.ModelProto) -> EmbeddedMap | None:
    for entry in proto.metadata_props:
        if entry.key == METADATA_KEY:
            return decode_embedded(entry.value)
    return None


def _readable_metadata(proto: onnx.ModelProto) -> EmbeddedMap | None:
    with suppress(FormatError):
        return _metadata(proto)
    return None


def load(path: StrPath) -> TaggedModel:
    """Read an ONNX file, tagged or not, without the data of its large initializers.

    Args:
        path: The file. Its data files are not opened.

    Returns:
        The model with its map.

    Raises:
        FileError: The file cannot be read.
        FormatError: It is not an ONNX model.
    """
    path = as_path(path)
    with open_mapped(path) as data:
        return TaggedModel(path, parse_model(data, path))


def recorded_tags(
    graph: Graph, sidecar: Sidecar, own: Sequence[NodeTag | None] | None = None
) -> list[NodeTag | None]:
    """Return the tags that a sidecar records for the nodes of a file, by their keys.

    Args:
        graph: The nodes.
        sidecar: The sidecar.
        own: The tags that the nodes have. Where one equals what is recorded, it is returned itself.
    """
    records = sidecar.nodes
    recorded = [recorded_tag(records.get(node.key)) for node in graph.nodes]
    if own is None:
        return recorded
    return [
        tag if tag is not None and _without_doc(tag) == record else record
        for tag, record in zip(own, recorded, strict=True)
    ]


def _without_doc(tag: NodeTag) -> NodeTag:
    return tag if tag.doc is None else msgspec.structs.replace(tag, doc=None)


def recorded_tag(record: NodeRecord | None) -> NodeTag | None:
    """Return the tag that a node record stands for; None for a node without a tag or a record."""
    if record is None or record.tag is None or record.module is None or record.method is None:
        return None
    tags = record.tags
    return NodeTag(
        tags, record.tag, len(tags), record.method, record.module, record.call, record.covers or ()
    )


def tags_from_doc_strings() -> TagReader:
    """Return a function that reads the tags of a graph's nodes from their doc_strings."""
    decode = functools.cache(decode_tag)
    return lambda prefix, nodes: [decode(node.doc_string) for node in nodes]


def tags_from_records(tags: Mapping[str, NodeTag | None]) -> TagReader:
    """Return a function that looks up the tags of a graph's nodes by their keys."""
    return lambda prefix, nodes: [
        tags.get(node_key(prefix, index, node)) for index, node in enumerate(nodes)
    ]
