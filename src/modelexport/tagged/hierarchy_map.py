"""The map as it is written: the tag of every node, the sidecar, and the bytes of a tagged file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec
import onnx

from modelexport.graph.flat import Graph
from modelexport.modules.record import Attribution, ModuleRecord, NodeTag
from modelexport.onnx_file import wire
from modelexport.onnx_file.doc_strings import rewrite_doc_strings
from modelexport.tagged.records import (
    METADATA_KEY,
    NAMESPACE_KEY,
    REPLACED,
    EmbeddedMap,
    ExportRecord,
    ModelRecord,
    Sidecar,
    decode_tag,
    encode_embedded,
    encode_sidecar,
    encode_tag,
    is_map_key,
    tags_digest,
)
from modelexport.tagged.tables import (
    complete_sidecar,
    consumer_tags,
    embedded_map,
    tags_of_node,
)


class HierarchyMap(msgspec.Struct, frozen=True, dict=True):
    """Everything that an export writes beside the baseline's own bytes."""

    node_tags: tuple[NodeTag | None, ...]
    """The tag of each node in the order of the graph; None for a node without one."""
    sidecar: Sidecar

    @functools.cached_property
    def sidecar_bytes(self) -> bytes:
        """The sidecar as it is written."""
        return encode_sidecar(self.sidecar)

    @property
    def embedded(self) -> EmbeddedMap:
        """The part of the map that goes into the model file itself."""
        digest = tags_digest(self.sidecar.nodes, self.node_tags)
        return embedded_map(self.sidecar, digest, self.sidecar_bytes)


def tagged_chunks(data: wire.Buffer, hierarchy: HierarchyMap) -> list[wire.Buffer]:
    """Return the bytes of a model with the map added, in chunks.

    Metadata of an earlier map stays in the file under another key, for `strip`.
    """
    tags = iter(hierarchy.node_tags)
    namespaces = (
        None if tag is None else tag.hierarchy_path.strip("/") for tag in hierarchy.node_tags
    )
    encoded: dict[int, bytes] = {}  # most nodes of a module share one object

    def edit_doc_string(old: bytes | None) -> bytes | None:
        tag = next(tags)
        if tag is None:
            return old
        doc_string = encoded.get(id(tag))
        if doc_string is None:
            doc_string = encoded[id(tag)] = encode_tag(tag)
        return doc_string

    embedded = (METADATA_KEY, encode_embedded(hierarchy.embedded))
    return rewrite_doc_strings(
        data,
        edit_doc_string,
        add_metadata=embedded,
        rename_metadata=lambda key: key + REPLACED if is_map_key(key) else key,
        node_entry=(NAMESPACE_KEY, namespaces) if hierarchy.sidecar.export.namespaces else None,
    )


def make_map(
    graph: Graph,
    attributions: Sequence[Attribution | None],
    tag_of: Mapping[str, str],
    model: ModelRecord,
    export: ExportRecord,
    modules: dict[str, ModuleRecord],
) -> HierarchyMap:
    """Build the map of a graph.

    Args:
        graph: The nodes.
        attributions: The module of each node; None for a node without a tag.
        tag_of: The tag that nodes of each module have, by module path.
        model: The record of the model.
        export: The record of the export.
        modules: The module records by path.
    """
    primary = [None if answer is None else tag_of[answer.path] for answer in attributions]
    consumers = consumer_tags(graph, primary)
    node_tags = _tag_nodes(graph, attributions, primary, consumers)
    sidecar = complete_sidecar(graph, node_tags, model, export, modules, consumers)
    return HierarchyMap(node_tags, sidecar)


def _tag_nodes(
    graph: Graph,
    attributions: Sequence[Attribution | None],
    primary: Sequence[str | None],
    consumers: Mapping[str, tuple[str, ...]],
) -> tuple[NodeTag | None, ...]:
    """Return the tag of each node, with the tags of the modules that consume its outputs."""
    node_tags: list[NodeTag | None] = []
    known: dict[tuple[tuple[str, ...], Attribution], NodeTag] = {}
    for node, proto, answer, tag in zip(
        graph.nodes, graph.protos, attributions, primary, strict=True
    ):
        if answer is None or tag is None:
            node_tags.append(None)
            continue
        tags = tags_of_node(node, tag, consumers)
        new = known.get((tags, answer))
        if new is None:
            new = known[tags, answer] = NodeTag(
                tags, tag, len(tags), str(answer.method), answer.path, answer.call, answer.covers
            )
        node_tags.append(_keep_doc_string(new, proto) if proto.HasField("doc_string") else new)
    return tuple(node_tags)


def _keep_doc_string(tag: NodeTag, proto: onnx.NodeProto) -> NodeTag:
    """Add the doc_string that a node had before, which may be an earlier tag."""
    doc = proto.doc_string
    if decode_tag(doc) is not None and encode_tag(tag) == doc.encode():
        return msgspec.structs.replace(tag, kept=True)
    return msgspec.structs.replace(tag, doc=doc)
