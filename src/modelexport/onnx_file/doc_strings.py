"""Edit the doc_strings of the nodes of a model, and its metadata, without parsing the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from modelexport.onnx_file.wire import (
    BYTES,
    ENTRY_KEY,
    ENTRY_VALUE,
    GRAPH_NODE,
    MODEL_FUNCTIONS,
    MODEL_GRAPH,
    NODE_METADATA,
    VARINT,
    Buffer,
    Field,
    cut_short,
    delimited,
    edit_inside,
    entry,
    fields,
    header,
    insertion_offset,
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
_Edits = list[tuple[int, int, list[Buffer]]]
"""What to write instead of the bytes between two offsets."""


def rewrite_doc_strings(
    data: Buffer,
    doc_edit: DocEdit,
    *,
    add_metadata: tuple[str, str] | None = None,
    rename_metadata: Callable[[str], str | None] | None = None,
    node_entry: tuple[str, Iterator[str | None]] | None = None,
) -> list[Buffer]:
    """Edit the doc_strings of all nodes of a model, and an entry of its metadata.

    Args:
        data: The file.
        doc_edit: Returns the new doc_string of each node.
        add_metadata: Key and value of an entry to add after those that the model has.
        rename_metadata: Returns the new key of an entry; None for an entry to remove.
        node_entry: The key of an entry of the metadata of nodes, and its new value for each node in
            the order of `doc_edit`; None for a node without the entry.

    Returns:
        The model, in chunks.
    """
    added: list[Buffer] = []
    editor = _NodeEditor(doc_edit, node_entry)
    if add_metadata is not None:
        added = delimited(_MODEL_METADATA, entry(*add_metadata))

    def edit(field: Field) -> list[Buffer] | None:
        nonlocal added
        if field.is_bytes(MODEL_GRAPH):
            chunks = delimited(MODEL_GRAPH, editor.edit_nodes(data, field, GRAPH_NODE))
        elif field.is_bytes(MODEL_FUNCTIONS):
            inside = editor.edit_nodes(data, field, _FUNCTION_NODE)
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


class _NodeEditor:
    """Edits nodes: their doc_string, and an entry of their metadata."""

    def __init__(self, doc_edit: DocEdit, entry: tuple[str, Iterator[str | None]] | None) -> None:
        self._doc_edit = doc_edit
        self._entry = entry

    def edit_nodes(self, data: Buffer, parent: Field, number: int) -> list[Buffer]:
        """Edit the nodes of a graph or function, which are its fields of this number."""
        chunks: list[Buffer] = []
        kept_from = parent.payload
        for node in messages(data, parent.payload, parent.end, number):
            if kept_from < node.start:
                chunks.append(data[kept_from : node.start])
            chunks += delimited(number, self._edit_node(data, node))
            kept_from = node.end
        chunks.append(data[kept_from : parent.end])
        return chunks

    def _edit_node(self, data: Buffer, node: Field) -> list[Buffer]:
        raw = data[node.payload : node.end]
        if len(raw) < _SMALL_NODE:
            raw = bytes(raw)  # faster to read than a view of the file
        start, payload, end = _doc_string_field(raw)
        # First its own doc_string, which stands behind its attributes, then those of its subgraphs.
        new = self._doc_edit(bytes(raw[payload:end]) if start < end else None)
        doc: list[Buffer] = [] if new is None else [header(_NODE_DOC, len(new)), new]
        others: _Edits = []
        if self._entry is not None:
            key, values = self._entry
            others = _edit_entry(raw, key, next(values))
        if _MAY_HAVE_GRAPHS.search(raw):
            others += self._edit_subgraphs(raw)
        if not others:
            chunks = [raw[:start], *doc, raw[end:]]
            return [b"".join(chunks)] if isinstance(raw, bytes) else chunks
        edits = [(start, end, doc), *others]
        chunks = []
        kept_from = 0
        for start, end, replacement in sorted(edits, key=lambda edit: edit[0]):
            chunks += [raw[kept_from:start], *replacement]
            kept_from = end
        return [*chunks, raw[kept_from:]]

    def _edit_subgraphs(self, node: Buffer) -> _Edits:
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
                    lambda graph: self.edit_nodes(node, graph, GRAPH_NODE),
                )
                edits.append((field.start, field.end, delimited(_NODE_ATTRIBUTE, attribute)))
        return edits


def _edit_entry(node: Buffer, key: str, value: str | None) -> _Edits:
    """Replace the entry of a key in the metadata of a node, or remove it."""
    edits: _Edits = [
        (field.start, field.end, [])
        for field in fields(node, 0, len(node))
        if field.is_bytes(NODE_METADATA) and _entry_key(node, field) == key
    ]
    if value is not None:
        offset = insertion_offset(node, NODE_METADATA)
        edits.append((offset, offset, delimited(NODE_METADATA, entry(key, value))))
    return edits


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


def model_metadata(data: Buffer, key: str) -> bytes | None:
    """Return the value of a metadata entry of a model; None if it has no such entry."""
    for field in fields(data, 0, len(data)):
        if field.is_bytes(_MODEL_METADATA) and _entry_key(data, field) == key:
            for part in fields(data, field.payload, field.end):
                if part.is_bytes(ENTRY_VALUE):
                    return bytes(data[part.payload : part.end])
    return None
