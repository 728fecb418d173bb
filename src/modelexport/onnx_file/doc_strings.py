"""Edit the doc_strings of the nodes of a model file, and its metadata, without parsing it."""

from __future__ import annotations

from collections.abc import Callable

from modelexport.onnx_file.wire import (
    GRAPH_NODE,
    MODEL_FUNCTIONS,
    MODEL_GRAPH,
    MODEL_METADATA,
    Buffer,
    Field,
    delimited,
    fields,
    read_varint,
    replace_fields,
)

# Field numbers of onnx.proto, fixed by the ONNX specification.
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE, _NODE_DOC = 5, 6
_ATTRIBUTE_TYPE = 20
_GRAPH_FIELDS = {5: 6, 10: 11}
"""The field of an attribute that has its graphs, `g` or `graphs`, by the attribute's type."""
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VARINT = 0

DocEdit = Callable[[bytes | None], bytes | None]
"""Returns the doc_string to write for a node, given the one it has; None is no doc_string.

It is called once for each node, in file order, for a node before those of its subgraphs."""


def rewrite_doc_strings(
    data: Buffer,
    doc_edit: DocEdit,
    *,
    add_metadata: tuple[str, str] | None = None,
    drop_metadata: str | None = None,
) -> list[Buffer]:
    """Edit the doc_strings of all nodes of a model, and an entry of its metadata.

    Args:
        data: The file.
        doc_edit: Returns the new doc_string of each node.
        add_metadata: Key and value of an entry to add after those that the model has.
        drop_metadata: The key of entries to remove.

    Returns:
        The model, in chunks.
    """
    added: list[Buffer] = []
    if add_metadata is not None:
        key, value = (text.encode() for text in add_metadata)
        entry = [*delimited(_ENTRY_KEY, [key]), *delimited(_ENTRY_VALUE, [value])]
        added = delimited(MODEL_METADATA, entry)

    def edit(field: Field) -> list[Buffer] | None:
        nonlocal added
        if field.is_bytes(MODEL_GRAPH):
            chunks = delimited(MODEL_GRAPH, _edit_nodes(data, field, GRAPH_NODE, doc_edit))
        elif field.is_bytes(MODEL_FUNCTIONS):
            inside = _edit_nodes(data, field, _FUNCTION_NODE, doc_edit)
            chunks = delimited(MODEL_FUNCTIONS, inside)
        elif drop_metadata is not None and field.number == MODEL_METADATA:
            return [] if _entry_key(data, field) == drop_metadata else None
        elif added and field.number > MODEL_METADATA:
            chunks = [data[field.start : field.end]]
        else:
            return None
        if field.number > MODEL_METADATA:
            added, chunks = [], [*added, *chunks]
        return chunks

    return [*replace_fields(data, 0, len(data), edit), *added]


def _edit_nodes(data: Buffer, parent: Field, number: int, doc_edit: DocEdit) -> list[Buffer]:
    """Edit the nodes of a graph or function, which are its fields of this number."""
    return replace_fields(
        data,
        parent.body,
        parent.end,
        lambda field: (
            delimited(number, _edit_node(data, field, doc_edit)) if field.is_bytes(number) else None
        ),
    )


def _edit_node(data: Buffer, node: Field, doc_edit: DocEdit) -> list[Buffer]:
    parts = list(fields(data, node.body, node.end))
    old = next((field for field in parts if field.is_bytes(_NODE_DOC)), None)
    # First its own doc_string, which stands behind its attributes, then those of its subgraphs.
    new = doc_edit(None if old is None else bytes(data[old.body : old.end]))
    doc = [] if new is None else delimited(_NODE_DOC, [new])
    if old is None:
        offset = next((field.start for field in parts if field.number > _NODE_DOC), node.end)
        edits = [(offset, offset, doc)]
    else:
        edits = [(old.start, old.end, doc)]
    for field in parts:
        number = _graphs_field(data, field) if field.is_bytes(_NODE_ATTRIBUTE) else None
        if number is not None:
            attribute = _edit_attribute(data, field, number, doc_edit)
            edits.append((field.start, field.end, delimited(_NODE_ATTRIBUTE, attribute)))
    chunks: list[Buffer] = []
    kept_from = node.body
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0]):
        chunks += [data[kept_from:start], *replacement]
        kept_from = end
    return [*chunks, data[kept_from : node.end]]


def _graphs_field(data: Buffer, attribute: Field) -> int | None:
    """Return the number of the field that has the graphs of an attribute, by its type."""
    parts = list(fields(data, attribute.body, attribute.end))
    types = [f for f in parts if f.number == _ATTRIBUTE_TYPE and f.kind == _VARINT]
    if not types:
        return None
    number = _GRAPH_FIELDS.get(read_varint(data, types[-1].body, types[-1].end)[0])
    return number if any(field.number == number for field in parts) else None


def _edit_attribute(data: Buffer, attribute: Field, number: int, doc_edit: DocEdit) -> list[Buffer]:
    return replace_fields(
        data,
        attribute.body,
        attribute.end,
        lambda field: (
            delimited(number, _edit_nodes(data, field, GRAPH_NODE, doc_edit))
            if field.is_bytes(number)
            else None
        ),
    )


def _entry_key(data: Buffer, entry: Field) -> str:
    for field in fields(data, entry.body, entry.end):
        if field.is_bytes(_ENTRY_KEY):
            return bytes(data[field.body : field.end]).decode("utf-8", "replace")
    return ""
