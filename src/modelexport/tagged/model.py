"""A tagged model as it is read back: the graph, its tags and its modules, without torch or weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import onnx

from modelexport import graph
from modelexport.errors import FileError, FormatError
from modelexport.tagged import codec
from modelexport.tagged.files import StrPath, as_path, mapped, parse
from modelexport.tagged.sidecar import (
    METADATA_KEY,
    Embedded,
    ModuleRecord,
    NodeRecord,
    Sidecar,
    decode_embedded,
    read_sidecar,
    sidecar_path,
)


class TaggedModel:
    """A file as `load` gives it.

    `path` is where it was read; `proto` has everything but the values of large weights; `graph` has all nodes laid
    flat, in the order of the file; `tags` has what each of them says, None for a node without a tag.

    Names have to be text, but for one who brings the nodes, which then are copied and not looked into.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto, nodes: graph.StoredNodes | None = None) -> None:
        self.path = path
        self.proto = proto
        self.graph = graph.flatten(proto, nodes)
        if nodes is None and self.graph.odd_names:
            raise FormatError(f"{path} has names that are not UTF-8", hint="write it again")
        decode = functools.cache(codec.decode)  # the nodes of one module mostly say the same
        self.tags = [decode(node.doc_string) for node in self.graph.protos]

    @functools.cached_property
    def embedded(self) -> Embedded | None:
        """The model-level metadata, or None in a file without tags."""
        return embedded_in(self.proto)

    @property
    def readable_metadata(self) -> Embedded | None:
        """The model-level metadata, or None where there is none that can be read."""
        with suppress(FormatError):
            return self.embedded
        return None

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

    @functools.cached_property
    def records(self) -> Embedded | Sidecar | None:
        """What was recorded at export: from the file itself, else from the sidecar; None where neither can be read."""
        with suppress(FormatError, FileError):
            return self.readable_metadata or self.sidecar
        return None

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

    def items(self) -> Iterator[tuple[graph.Node, codec.NodeTag | None]]:
        """Each node with its tag."""
        return zip(self.graph.nodes, self.tags, strict=True)


def embedded_in(proto: onnx.ModelProto) -> Embedded | None:
    """The metadata of ours that a model has, or None."""
    for entry in proto.metadata_props:
        if entry.key == METADATA_KEY:
            return decode_embedded(entry.value)
    return None


def load(path: StrPath) -> TaggedModel:
    """Read an ONNX file, tagged or not; the weights inside it are stepped over, a data file is not opened."""
    path = as_path(path)
    with mapped(path) as data:
        return TaggedModel(path, parse(data, path))


def recorded_tags(
    flat: graph.Graph, sidecar: Sidecar, own: Sequence[codec.NodeTag | None] | None = None
) -> list[codec.NodeTag | None]:
    """What the sidecar says of each node of a file, found by its first output.

    Where a node's own tag says the same, it is that very object.
    """
    records = sidecar.nodes
    tags: list[codec.NodeTag | None] = []
    for node, tag in zip(flat.nodes, own or [None] * len(flat.nodes), strict=True):
        record = records.get(node.key)
        tags.append(tag if tag is not None and _says(record, tag) else recorded_tag(record))
    return tags


def _says(record: NodeRecord | None, tag: codec.NodeTag) -> bool:
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


def recorded_tag(record: NodeRecord | None) -> codec.NodeTag | None:
    if record is None or record.tag is None or record.module is None or record.method is None:
        return None
    tags = record.tags
    return codec.NodeTag(tags, record.tag, len(tags), record.method, record.module, record.call, record.covers or ())
