"""A tagged file: its nodes, its map, and which tags are in effect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import onnx

from modelexport.errors import FileError, FormatError, first_line, plural
from modelexport.graph import flat
from modelexport.graph.nested import Label, node_key
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.onnx_file.model_file import StrPath, as_path, open_mapped, parse_model
from modelexport.tagged.records import (
    FORMAT,
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
    path: Path, proto: onnx.ModelProto, is_tagged: bool, flat: Callable[[], flat.Graph]
) -> MapInEffect:
    """Decide which tags hold for a file: its own, else those of its sidecar if that is of this very graph.

    A file that has tags but no readable metadata takes the module records of a sidecar that knows its nodes.
    """
    embedded = _readable(proto)
    own = "file" if is_tagged else None
    if (own and embedded is not None) or not path.name or not sidecar_path(path).exists():
        return MapInEffect(own, embedded, None, None)
    try:
        sidecar = read_sidecar(sidecar_path(path))
    except (FormatError, FileError) as error:
        return MapInEffect(
            own, embedded, None, f"it cannot be read: {first_line(error.__cause__ or error)}"
        )
    nodes = flat()
    reason = mismatch_reason(sidecar, nodes) if own else _other_graph(sidecar, nodes)
    if reason is not None:
        return MapInEffect(own, embedded, None, reason)
    return MapInEffect(own or "sidecar", embedded or sidecar, None if own else sidecar, None)


def mismatch_reason(sidecar: Sidecar, flat: flat.Graph) -> str | None:
    """Say why a sidecar is of another file, judged by the names of the nodes; None if it may be of this one."""
    if sidecar.format != FORMAT:
        return f"its format is {sidecar.format!r}"
    known, total = sum(node.key in sidecar.nodes for node in flat.nodes), len(flat.nodes)
    return None if 2 * known >= total else f"it knows {known} of the file's {plural(total, 'node')}"


def _other_graph(sidecar: Sidecar, flat: flat.Graph) -> str | None:
    """Say why a sidecar cannot give tags to a file without any; None if it is of the same graph."""
    if sidecar.format != FORMAT:
        return f"its format is {sidecar.format!r}"
    return (
        None
        if topology_digest(flat, node_digests(flat)) == sidecar.statistics.topology
        else "it is of another graph"
    )


class TaggedModel:
    """A file as `load` gives it.

    `path` is where it was read; `proto` has everything but the values of large weights; `graph` has all nodes laid
    flat, in the order of the file; `tags` has what each of them says, None for a node without a tag.

    Names have to be text, but for one who brings the nodes, which then are copied and not looked into.
    """

    def __init__(
        self, path: Path, proto: onnx.ModelProto, nodes: flat.StoredNodes | None = None
    ) -> None:
        self.path = path
        self.proto = proto
        self.graph = flat.flatten(proto, nodes)
        if nodes is None and self.graph.odd_names:
            raise FormatError(f"{path} has names that are not UTF-8", hint="write it again")
        decode = functools.cache(decode_tag)  # the nodes of one module mostly say the same
        self.tags = [decode(node.doc_string) for node in self.graph.protos]

    @functools.cached_property
    def embedded(self) -> EmbeddedMap | None:
        """The model-level metadata, or None in a file without tags."""
        return embedded_in(self.proto)

    @property
    def readable_metadata(self) -> EmbeddedMap | None:
        """The model-level metadata, or None where there is none that can be read."""
        return _readable(self.proto)

    @functools.cached_property
    def in_effect(self) -> MapInEffect:
        """Where the tags that hold for this file are."""
        return map_in_effect(self.path, self.proto, self.is_tagged, lambda: self.graph)

    @functools.cached_property
    def effective_tags(self) -> Sequence[NodeTag | None]:
        """The tag of each node that holds: its own, or for a file without any the one in the file's sidecar."""
        sidecar = self.in_effect.sidecar
        return self.tags if sidecar is None else recorded_tags(self.graph, sidecar)

    @functools.cached_property
    def sidecar(self) -> Sidecar | None:
        """The sidecar beside the file, or None where there is none."""
        path = sidecar_path(self.path)
        return read_sidecar(path) if self.has_sidecar else None

    @property
    def has_metadata(self) -> bool:
        """Whether the model's metadata has an entry of ours, readable or not."""
        return any(entry.key == METADATA_KEY for entry in self.proto.metadata_props)

    @property
    def has_sidecar(self) -> bool:
        """Whether there is a sidecar, readable or not."""
        return sidecar_path(self.path).exists()

    @property
    def records(self) -> EmbeddedMap | Sidecar | None:
        """What was recorded at export: from the file itself, else from its sidecar; None where neither can be used."""
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

    def items(self) -> Iterator[tuple[flat.Node, NodeTag | None]]:
        """Each node with its tag."""
        return zip(self.graph.nodes, self.tags, strict=True)


def embedded_in(proto: onnx.ModelProto) -> EmbeddedMap | None:
    """The metadata of ours that a model has, or None."""
    for entry in proto.metadata_props:
        if entry.key == METADATA_KEY:
            return decode_embedded(entry.value)
    return None


def _readable(proto: onnx.ModelProto) -> EmbeddedMap | None:
    with suppress(FormatError):
        return embedded_in(proto)
    return None


def load(path: StrPath) -> TaggedModel:
    """Read an ONNX file, tagged or not; the weights inside it are stepped over, a data file is not opened."""
    path = as_path(path)
    with open_mapped(path) as data:
        return TaggedModel(path, parse_model(data, path))


def recorded_tags(
    flat: flat.Graph, sidecar: Sidecar, own: Sequence[NodeTag | None] | None = None
) -> list[NodeTag | None]:
    """What the sidecar says of each node of a file, found by its first output.

    Where a node's own tag says the same, it is that very object.
    """
    records = sidecar.nodes
    tags: list[NodeTag | None] = []
    for node, tag in zip(flat.nodes, own or [None] * len(flat.nodes), strict=True):
        record = records.get(node.key)
        tags.append(tag if tag is not None and _says(record, tag) else recorded_tag(record))
    return tags


def _says(record: NodeRecord | None, tag: NodeTag) -> bool:
    return (
        record is not None
        and record.module == tag.hierarchy_module
        and record.tag == tag.hierarchy_path
        and record.tags == tag.hierarchy_tags
        and record.method == tag.hierarchy_method
        and record.call == tag.hierarchy_call
        and (record.covers or ()) == tag.hierarchy_covers
        and tag.hierarchy_count == len(record.tags)
    )


def recorded_tag(record: NodeRecord | None) -> NodeTag | None:
    if record is None or record.tag is None or record.module is None or record.method is None:
        return None
    tags = record.tags
    return NodeTag(
        tags, record.tag, len(tags), record.method, record.module, record.call, record.covers or ()
    )


def tags_from_doc_strings() -> Label:
    """Tags as they stand in the nodes."""
    decode = functools.cache(decode_tag)
    return lambda prefix, nodes: [decode(node.doc_string) for node in nodes]


def tags_from_records(tags: Mapping[str, NodeTag | None]) -> Label:
    """Tags from elsewhere, by the key of the node."""
    return lambda prefix, nodes: [
        tags.get(node_key(prefix, place, node)) for place, node in enumerate(nodes)
    ]
