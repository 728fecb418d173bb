"""The protobuf wire format of an ONNX file: walk and replace fields without parsing the model.

A model is edited as a list of chunks. Those that do not change are slices of the file, so that
initializer data is never copied. New fields are written where a protobuf library writes them, so
that a file which such a library reads and writes again keeps its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError

Buffer = bytes | memoryview

# Field numbers of onnx.proto, fixed by the ONNX specification.
MODEL_GRAPH, _MODEL_METADATA, MODEL_FUNCTIONS = 7, 14, 25
GRAPH_NODE, GRAPH_INITIALIZER, _GRAPH_OUTPUT = 1, 5, 12
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE, _NODE_DOC = 5, 6
_ATTRIBUTE_TYPE = 20
_GRAPH_FIELDS = {5: 6, 10: 11}
"""The field of an attribute that has its graphs, `g` or `graphs`, by the attribute's type."""
_MAY_HAVE_GRAPHS = re.compile(rb"\xa0(\x01[\x05\x0a\x80-\xff]|\x81)")
"""An attribute's type that has graphs, also where a number takes more bytes than it needs."""
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_NAME = 1
_TENSOR_RAW = 9
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11})
_SMALL_TENSOR = 1024
_SMALL_NODE = 4096

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

DocEdit = Callable[[bytes | None], bytes | None]
"""Returns the doc_string to write for a node, given the one it has; None is no doc_string.

It is called once for each node, in file order, for a node before those of its subgraphs."""


class Field(NamedTuple):
    """One field of a message: its number, wire type, and where it and its content are."""

    number: int
    kind: int
    start: int
    payload: int
    end: int

    def is_bytes(self, number: int) -> bool:
        """Whether the field has this number and is length-delimited, as messages are."""
        return self.number == number and self.kind == _BYTES


def fields(data: Buffer, position: int, end: int) -> Iterator[Field]:
    """Iterate over the fields of a message, in file order.

    Args:
        data: The file.
        position: The offset at which the message begins.
        end: The offset at which it ends.

    Raises:
        FormatError: It is not a message, or cut short.
    """
    while position < end:
        start = position
        key, position = _read_varint(data, position, end)
        kind = key & 7
        if kind == _BYTES:
            length, position = _read_varint(data, position, end)
            payload, position = position, position + length
        elif kind == _VARINT:
            payload = position
            _, position = _read_varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            payload, position = position, position + (8 if kind == _FIXED64 else 4)
        else:
            hint = "it has a field of an unknown kind"
            raise FormatError("the file is not an ONNX model", hint=hint)
        if position > end:
            raise _cut_short()
        yield Field(key >> 3, kind, start, payload, position)


def graphs(data: Buffer) -> Iterator[Field]:
    """Iterate over the main graph: one field, but several in files that were concatenated."""
    return (field for field in fields(data, 0, len(data)) if field.is_bytes(MODEL_GRAPH))


def initializers(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the fields of the initializers of a graph, in file order."""
    return (f for f in fields(data, graph.payload, graph.end) if f.is_bytes(GRAPH_INITIALIZER))


def nodes(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the fields of the nodes of a graph, in file order."""
    return (f for f in fields(data, graph.payload, graph.end) if f.is_bytes(GRAPH_NODE))


def raw_data(data: Buffer, tensor: Field) -> Buffer | None:
    """Return the raw data of a tensor; None where its data is not stored as raw bytes."""
    for field in fields(data, tensor.payload, tensor.end):
        if field.is_bytes(_TENSOR_RAW):
            return data[field.payload : field.end]
    return None


def replace_fields(
    data: Buffer, start: int, end: int, edit: Callable[[Field], list[Buffer] | None]
) -> list[Buffer]:
    """Copy a message, in chunks, with some of its fields replaced.

    Args:
        data: The file.
        start: The offset at which the message begins.
        end: The offset at which it ends.
        edit: Returns the chunks to write instead of a field; None to keep it.
    """
    chunks: list[Buffer] = []
    kept_from = start
    for field in fields(data, start, end):
        replacement = edit(field)
        if replacement is None:
            continue
        if kept_from < field.start:
            chunks.append(data[kept_from : field.start])
        chunks += replacement
        kept_from = field.end
    if kept_from < end:
        chunks.append(data[kept_from:end])
    return chunks


def _edit_inside(
    data: Buffer, start: int, end: int, number: int, edit: Callable[[Field], list[Buffer]]
) -> list[Buffer]:
    """Copy a message with other contents of the messages that are its fields of one number."""
    return replace_fields(
        data,
        start,
        end,
        lambda field: delimited(number, edit(field)) if field.is_bytes(number) else None,
    )


def without_payload(data: Buffer, known: Sequence[Field] | None = None) -> bytes:
    """Copy a model without the data of initializers above 1 KiB; names, types and shapes stay.

    Args:
        data: The file.
        known: The fields of all initializers, where the caller has them already.
    """

    def edit(graph: Field) -> list[Buffer]:
        chunks: list[Buffer] = []
        kept_from = graph.payload
        for field in initializers(data, graph) if known is None else known:
            is_large = field.end - field.payload > _SMALL_TENSOR
            if is_large and graph.payload <= field.start < graph.end:
                chunks.append(data[kept_from : field.start])
                chunks += delimited(GRAPH_INITIALIZER, without_values(data, field))
                kept_from = field.end
        return [*chunks, data[kept_from : graph.end]]

    return b"".join(_edit_inside(data, 0, len(data), MODEL_GRAPH, edit))


def without_values(data: Buffer, tensor: Field) -> list[Buffer]:
    """Copy a tensor, in chunks, without its data."""
    return replace_fields(
        data, tensor.payload, tensor.end, lambda field: [] if field.number in _TENSOR_DATA else None
    )


def with_initializers(data: Buffer, added: list[Buffer]) -> list[Buffer]:
    """Copy a model, in chunks, with more initializers, given as `initializer` returns them."""

    def edit(field: Field) -> list[Buffer]:
        graph = data[field.payload : field.end]
        offset = insertion_offset(graph, GRAPH_INITIALIZER)
        return [graph[:offset], *added, graph[offset:]]

    return _edit_inside(data, 0, len(data), MODEL_GRAPH, edit)


def with_outputs(data: Buffer, names: Iterable[str]) -> list[Buffer]:
    """Copy a model, in chunks, with more values of its main graph declared as outputs."""
    values = [delimited(_VALUE_NAME, [name.encode()]) for name in names]
    added = [chunk for value in values for chunk in delimited(_GRAPH_OUTPUT, value)]
    return _edit_inside(
        data, 0, len(data), MODEL_GRAPH, lambda graph: [data[graph.payload : graph.end], *added]
    )


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
        key, value = (text.encode() for text in add_metadata)
        entry = [*delimited(_ENTRY_KEY, [key]), *delimited(_ENTRY_VALUE, [value])]
        added = delimited(_MODEL_METADATA, entry)

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
    key = delimited(_ENTRY_KEY, [new.encode()])
    return delimited(
        _MODEL_METADATA,
        replace_fields(
            data, entry.payload, entry.end, lambda f: key if f.is_bytes(_ENTRY_KEY) else None
        ),
    )


def _edit_nodes(data: Buffer, parent: Field, number: int, doc_edit: DocEdit) -> list[Buffer]:
    """Edit the nodes of a graph or function, which are its fields of this number."""
    return _edit_inside(
        data, parent.payload, parent.end, number, lambda node: _edit_node(data, node, doc_edit)
    )


def _edit_node(data: Buffer, node: Field, doc_edit: DocEdit) -> list[Buffer]:
    raw = data[node.payload : node.end]
    if len(raw) < _SMALL_NODE:
        raw = bytes(raw)  # faster to read than a view of the file
    start, end = _doc_string_field(raw)
    # First its own doc_string, which stands behind its attributes, then those of its subgraphs.
    new = doc_edit(bytes(_content(raw, start, end)) if start < end else None)
    edits = [(start, end, [] if new is None else delimited(_NODE_DOC, [new]))]
    if _MAY_HAVE_GRAPHS.search(raw):
        edits += _edit_subgraphs(raw, doc_edit)
    chunks: list[Buffer] = []
    kept_from = 0
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0]):
        chunks += [raw[kept_from:start], *replacement]
        kept_from = end
    return [*chunks, raw[kept_from:]]


def _doc_string_field(node: Buffer) -> tuple[int, int]:
    """Return where the doc_string field of a node begins and ends, or twice where to insert it.

    An edit spends most of its time here, so fields of the usual kind are read in place.
    """
    position, size, insertion = 0, len(node), -1
    while position < size:
        start, key = position, node[position]
        if key & 0x87 == _BYTES and position + 1 < size and node[position + 1] < 0x80:
            number = key >> 3
            position += 2 + node[position + 1]
            is_doc = number == _NODE_DOC
        else:
            field = next(fields(node, position, size))
            number, position, is_doc = field.number, field.end, field.is_bytes(_NODE_DOC)
        if is_doc and position <= size:
            return start, position
        if number > _NODE_DOC and insertion < 0:
            insertion = start
    if position > size:
        raise _cut_short()
    return (size, size) if insertion < 0 else (insertion, insertion)


def _content(data: Buffer, start: int, end: int) -> Buffer:
    """Return the content of the length-delimited field between two offsets."""
    return data[next(fields(data, start, end)).payload : end]


def _edit_subgraphs(node: Buffer, doc_edit: DocEdit) -> list[tuple[int, int, list[Buffer]]]:
    """Edit the nodes of the subgraphs of a node; return the attributes to replace."""
    edits = []
    for field in fields(node, 0, len(node)):
        number = _graphs_field(node, field) if field.is_bytes(_NODE_ATTRIBUTE) else None
        if number is not None:
            attribute = _edit_inside(
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
    types = [f for f in parts if f.number == _ATTRIBUTE_TYPE and f.kind == _VARINT]
    if not types:
        return None
    number = _GRAPH_FIELDS.get(_read_varint(data, types[-1].payload, types[-1].end)[0])
    return number if any(field.number == number for field in parts) else None


def _entry_key(data: Buffer, entry: Field) -> str:
    for field in fields(data, entry.payload, entry.end):
        if field.is_bytes(_ENTRY_KEY):
            return bytes(data[field.payload : field.end]).decode("utf-8", "replace")
    return ""


def insertion_offset(message: Buffer, number: int) -> int:
    """Find the offset in a message at which a protobuf library would write a field."""
    return next(
        (f.start for f in fields(message, 0, len(message)) if f.number > number), len(message)
    )


def initializer(tensor: bytes) -> bytes:
    """Wrap a serialised tensor as an initializer of a graph."""
    return b"".join(delimited(GRAPH_INITIALIZER, [tensor]))


def delimited(number: int, content: list[Buffer]) -> list[Buffer]:
    """Wrap chunks in a length-delimited field of this number."""
    return [header(number, sum(map(len, content))), *content]


def header(number: int, length: int) -> bytes:
    """Return key and length, the bytes before the content of a length-delimited field."""
    return _varint(number << 3 | _BYTES) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Read an integer; return it and the offset behind it."""
    if position < end and data[position] < 0x80:
        return data[position], position + 1
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            break
    raise _cut_short()


def _cut_short() -> FormatError:
    return FormatError(
        "the file is not a whole ONNX model",
        hint="it is cut short or of another kind; write it again",
    )
