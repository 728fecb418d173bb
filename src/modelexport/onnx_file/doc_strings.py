"""Edit the doc_strings of the nodes of a model, and its metadata, without parsing the model."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelexport.onnx_file.wire import (
    BYTES,
    ENTRY_KEY,
    GRAPH_NODE,
    MODEL_FUNCTIONS,
    MODEL_GRAPH,
    VARINT,
    Buffer,
    Field,
    cut_short,
    delimited,
    edit_inside,
    entry,
    fields,
    header,
    messages,
    read_varint,
    replace_fields,
)

_MODEL_METADATA = 14
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE, _NODE_DOC = 5, 6
_BEFORE_DOC = frozenset(number << 3 | BYTES for number in range(1, _NODE_DOC))
_ATTRIBUTE_TYPE = 20
_GRAPH_FIELDS = {5: 6, 10: 11}
"""The field of an attribute that has its graphs, `g` or `graphs`, by the attribute's type."""
_MAY_HAVE_GRAPHS = re.compile(rb"\xa0(\x01[\x05\x0a\x80-\xff]|\x81)")
"""An attribute's type that has graphs, also where a number takes more bytes than it needs."""
_SMALL_NODE = 4096

DocEdit = Callable[[bytes | None], bytes | None]
"""Returns the doc_string to write for a node, given the one it has; None is no doc_string.

It is called once for each node, in file order, for a node before those of its subgraphs."""


def rewrite_doc_strings(
    data: Buffer,
    doc_edit: DocEdit,
    *,
    add_metadata: tuple[str, str] | None = None,
    rename_metadata: Callable[[str], str | None] | None = None,
) -> list[Buffer]:
    """Edit the doc_strings of all nodes of a model, and an entry of its metadata.

    Args:
        data: The file.
        doc_edit: Returns the new doc_string of each node.
        add_metadata: Key and value of an entry to add after those that the model has.
        rename_metadata: Returns the new key of an entry; None for an entry to remove.

    Returns:
        The model, in chunks.
    """
    added: list[Buffer] = []
    if add_metadata is not None:
        added = delimited(_MODEL_METADATA, entry(*add_metadata))

    def edit(field: Field) -> list[Buffer] | None:
        nonlocal added
        if field.is_bytes(MODEL_GRAPH):
            chunks = delimited(MODEL_GRAPH, _edit_nodes(data, field, GRAPH_NODE, doc_edit))
        elif field.is_bytes(MODEL_FUNCTIONS):
            inside = _edit_nodes(data, field, _FUNCTION_NODE, doc_edit)
            chunks = delimited(MODEL_FUNCTIONS, inside)
        elif rename_metadata is not None and field.is_bytes(_MODEL_METADATA):
            return _rename_entry(data, field, rename_metadata)
        elif added and field.number > _MODEL_METADATA:
            chunks = [data[field.start : field.end]]
        else:
            return None
        if field.number > _MODEL_METADATA:
            added, chunks = [], [*added, *chunks]
        return chunks

    return [*replace_fields(data, 0, len(data), edit), *added]


def _rename_entry(
    data: Buffer, entry: Field, rename: Callable[[str], str | None]
) -> list[Buffer] | None:
    old = _entry_key(data, entry)
    new = rename(old)
    if new is None or new == old:
        return [] if new is None else None
    key = delimited(ENTRY_KEY, [new.encode()])
    return delimited(
        _MODEL_METADATA,
        replace_fields(
            data, entry.payload, entry.end, lambda f: key if f.is_bytes(ENTRY_KEY) else None
        ),
    )


def _edit_nodes(data: Buffer, parent: Field, number: int, doc_edit: DocEdit) -> list[Buffer]:
    """Edit the nodes of a graph or function, which are its fields of this number."""
    chunks: list[Buffer] = []
    kept_from = parent.payload
    for node in messages(data, parent.payload, parent.end, number):
        if kept_from < node.start:
            chunks.append(data[kept_from : node.start])
        chunks += delimited(number, _edit_node(data, node, doc_edit))
        kept_from = node.end
    chunks.append(data[kept_from : parent.end])
    return chunks


def _edit_node(data: Buffer, node: Field, doc_edit: DocEdit) -> list[Buffer]:
    raw = data[node.payload : node.end]
    if len(raw) < _SMALL_NODE:
        raw = bytes(raw)  # faster to read than a view of the file
    start, payload, end = _doc_string_field(raw)
    # First its own doc_string, which stands behind its attributes, then those of its subgraphs.
    new = doc_edit(bytes(raw[payload:end]) if start < end else None)
    doc: list[Buffer] = [] if new is None else [header(_NODE_DOC, len(new)), new]
    subgraphs = _edit_subgraphs(raw, doc_edit) if _MAY_HAVE_GRAPHS.search(raw) else []
    if not subgraphs:
        chunks = [raw[:start], *doc, raw[end:]]
        return [b"".join(chunks)] if isinstance(raw, bytes) else chunks
    edits = [(start, end, doc), *subgraphs]
    chunks = []
    kept_from = 0
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0]):
        chunks += [raw[kept_from:start], *replacement]
        kept_from = end
    return [*chunks, raw[kept_from:]]


def _doc_string_field(node: Buffer) -> tuple[int, int, int]:
    """Find the doc_string of a node: where the field, its content and what follows begin.

    In a node without one, all three are the offset at which to insert it. An edit spends most of
    its time here, so fields of the usual kind are read in place.
    """
    position, size, insertion = 0, len(node), None
    while position + 1 < size and node[position] in _BEFORE_DOC and node[position + 1] < 0x80:
        position += 2 + node[position + 1]
    if position > size:
        raise cut_short()
    for field in fields(node, position, size) if position < size else ():
        if field.is_bytes(_NODE_DOC):
            return field.start, field.payload, field.end
        if field.number > _NODE_DOC and insertion is None:
            insertion = field.start
    offset = size if insertion is None else insertion
    return offset, offset, offset


def _edit_subgraphs(node: Buffer, doc_edit: DocEdit) -> list[tuple[int, int, list[Buffer]]]:
    """Edit the nodes of the subgraphs of a node; return the attributes to replace."""
    edits = []
    for field in fields(node, 0, len(node)):
        number = _graphs_field(node, field) if field.is_bytes(_NODE_ATTRIBUTE) else None
        if number is not None:
            attribute = edit_inside(
                node,
                field.payload,
                field.end,
                number,
                lambda graph: _edit_nodes(node, graph, GRAPH_NODE, doc_edit),
            )
            edits.append((field.start, field.end, delimited(_NODE_ATTRIBUTE, attribute)))
    return edits


def _graphs_field(data: Buffer, attribute: Field) -> int | None:
    """Return the number of the field that has the graphs of an attribute, by its type."""
    parts = list(fields(data, attribute.payload, attribute.end))
    types = [f for f in parts if f.number == _ATTRIBUTE_TYPE and f.kind == VARINT]
    if not types:
        return None
    number = _GRAPH_FIELDS.get(read_varint(data, types[-1].payload, types[-1].end)[0])
    return number if any(field.number == number for field in parts) else None


def _entry_key(data: Buffer, entry: Field) -> str:
    for field in fields(data, entry.payload, entry.end):
        if field.is_bytes(ENTRY_KEY):
            return bytes(data[field.payload : field.end]).decode("utf-8", "replace")
    return ""
