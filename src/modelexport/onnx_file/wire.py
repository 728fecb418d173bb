"""The protobuf wire format of an ONNX file: walk, edit and splice fields without parsing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError

Buffer = bytes | memoryview

# Field numbers of onnx.proto, fixed by the ONNX specification.
_MODEL_GRAPH, _MODEL_METADATA, _MODEL_FUNCTIONS = 7, 14, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_OUTPUT = 1, 5, 12
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE, _NODE_DOC = 5, 6
_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_TYPE = 6, 11, 20
_GRAPHS_OF_TYPE = {5: _ATTRIBUTE_GRAPH, 10: _ATTRIBUTE_GRAPHS}
_ENTRY_KEY = 1
_TENSOR_RAW = 9
_SMALL_TENSOR = 1024
_TENSOR_PAYLOAD = frozenset({4, 5, 6, 7, 9, 10, 11})

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

DocEdit = Callable[[bytes | None], bytes | None]
"""Given a node's doc_string (None: it has none), the one to write (None: none). Called once a node, in file order."""


class Field(NamedTuple):
    number: int
    kind: int
    start: int
    body: int
    end: int


def fields(data: Buffer, position: int, end: int) -> Iterator[Field]:
    """The fields of the message that lies between two offsets."""
    while position < end:
        start = position
        key, position = _read_varint(data, position, end)
        kind = key & 7
        if kind == _BYTES:
            length, position = _read_varint(data, position, end)
            body, position = position, position + length
        elif kind == _VARINT:
            body = position
            _, position = _read_varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            body, position = position, position + (8 if kind == _FIXED64 else 4)
        else:
            raise FormatError(
                "the file is not an ONNX model", hint="it has a field of an unknown kind"
            )
        if position > end:
            raise FormatError(
                "the file is not a whole ONNX model", hint="it ends in the middle; write it again"
            )
        yield Field(key >> 3, kind, start, body, position)


def without_payload(data: Buffer, weights: Sequence[Field] | None = None) -> bytes:
    """The same model with every initializer above 1 KiB emptied of its values; names, types and shapes stay.

    `weights` are the fields of all initializers, where they are known already.
    """
    parts: list[Buffer] = []
    for field in fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH and field.kind == _BYTES:
            found = initializers(data, field) if weights is None else weights
            parts += delimited(_MODEL_GRAPH, _emptied_graph(data, field, found))
        else:
            parts.append(data[field.start : field.end])
    return b"".join(parts)


def _emptied_graph(data: Buffer, graph: Field, weights: Iterable[Field]) -> list[Buffer]:
    parts: list[Buffer] = []
    kept_from = graph.body
    for field in weights:
        if field.end - field.body <= _SMALL_TENSOR or not graph.body <= field.start < graph.end:
            continue
        parts.append(data[kept_from : field.start])
        parts += delimited(_GRAPH_INITIALIZER, without_values(data, field))
        kept_from = field.end
    parts.append(data[kept_from : graph.end])
    return parts


def without_values(data: Buffer, tensor: Field) -> list[Buffer]:
    """A tensor without its values, in pieces."""
    pieces: list[Buffer] = []
    kept_from = tensor.body
    for number, start, _, end in _short_fields(data, tensor.body, tensor.end):
        if number in _TENSOR_PAYLOAD:
            if kept_from < start:
                pieces.append(data[kept_from:start])
            kept_from = end
    if kept_from < tensor.end:
        pieces.append(data[kept_from : tensor.end])
    return pieces


def _short_fields(data: Buffer, position: int, end: int) -> list[tuple[int, int, int, int]]:
    """Number, start, body and end of each field: `fields` in one loop, for messages that a file has many of."""
    found = []
    while position < end:
        start = position
        key = data[position]
        position += 1
        if key > 0x7F or (key & 7 != _BYTES and key & 7 != _VARINT):
            field = next(fields(data, start, end))
            position = field.end
            found.append((field.number, start, field.body, position))
            continue
        value, body = _read_varint(data, position, end)
        if key & 7 == _BYTES:
            position = body + value
            if position > end:
                raise FormatError(
                    "the file is not a whole ONNX model",
                    hint="it ends in the middle; write it again",
                )
        else:
            body, position = position, body
        found.append((key >> 3, start, body, position))
    return found


def graphs(data: Buffer) -> Iterator[Field]:
    """The field of the main graph; more than one only in files that were put together by hand."""
    return (f for f in fields(data, 0, len(data)) if f.number == _MODEL_GRAPH and f.kind == _BYTES)


def initializers(data: Buffer, graph: Field) -> Iterator[Field]:
    """The initializers of a graph. The same walk as `fields`, in one loop: a graph has a field for every node."""
    position, end = graph.body, graph.end
    wanted = _GRAPH_INITIALIZER << 3 | _BYTES
    while position < end:
        start = position
        key = data[position]
        if key & 7 != _BYTES or key > 0x7F:  # none of the fields that a graph has many of
            position = next(fields(data, position, end)).end
            continue
        length, body = _read_varint(data, position + 1, end)
        position = body + length
        if position > end:
            raise FormatError(
                "the file is not a whole ONNX model", hint="it ends in the middle; write it again"
            )
        if key == wanted:
            yield Field(_GRAPH_INITIALIZER, _BYTES, start, body, position)


def nodes(data: Buffer, graph: Field) -> Iterator[Field]:
    """The nodes of a graph."""
    return (
        f
        for f in fields(data, graph.body, graph.end)
        if f.number == _GRAPH_NODE and f.kind == _BYTES
    )


def raw_data(data: Buffer, tensor: Field) -> Buffer | None:
    """A tensor's values, where they are stored as plain bytes."""
    for number, start, body, end in _short_fields(data, tensor.body, tensor.end):
        if number == _TENSOR_RAW and data[start] & 7 == _BYTES:
            return data[body:end]
    return None


def with_initializers(data: Buffer, added: list[Buffer]) -> list[Buffer]:
    """The model with these fields, as `initializer` makes them, put where a protobuf library would write them."""
    pieces: list[Buffer] = []
    for field in fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH and field.kind == _BYTES:
            inside = spliced(data[field.body : field.end], _GRAPH_INITIALIZER, added)
            pieces += delimited(_MODEL_GRAPH, inside)
        else:
            pieces.append(data[field.start : field.end])
    return pieces


def spliced(message: Buffer, number: int, added: list[Buffer]) -> list[Buffer]:
    """A message with these fields put where a protobuf library would write the ones of this number."""
    place = place_of(message, number)
    return [message[:place], *added, message[place:]]


def place_of(message: Buffer, number: int) -> int:
    """Where in a message a protobuf library would write a field of this number."""
    return next(
        (f.start for f in fields(message, 0, len(message)) if f.number > number), len(message)
    )


def with_outputs(data: Buffer, names: Iterable[str]) -> list[Buffer]:
    """The model with these tensors of its main graph as further outputs."""
    added = [
        piece for name in names for piece in delimited(_GRAPH_OUTPUT, delimited(1, [name.encode()]))
    ]
    pieces: list[Buffer] = []
    for field in fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH and field.kind == _BYTES:
            pieces += delimited(_MODEL_GRAPH, [data[field.body : field.end], *added])
        else:
            pieces.append(data[field.start : field.end])
    return pieces


def initializer(tensor: bytes) -> bytes:
    """A serialised tensor as an initializer of a graph."""
    return b"".join(delimited(_GRAPH_INITIALIZER, [tensor]))


def rewrite(
    data: Buffer,
    doc_edit: DocEdit,
    *,
    add_metadata: tuple[str, str] | None = None,
    drop_metadata: str | None = None,
) -> list[Buffer]:
    """The model with its nodes' doc_strings edited, as pieces to write one after the other.

    Pieces that did not change are slices of `data`, so weights are never copied. Metadata is
    added after what there is, or dropped by its key. What is new stands where a protobuf library
    would write it, so that a file which such a library read and wrote again has the same bytes.
    """
    pieces: list[Buffer] = []
    added: list[Buffer] = [] if add_metadata is None else _entry(*add_metadata)
    for field in fields(data, 0, len(data)):
        if field.number > _MODEL_METADATA:
            pieces += added
            added = []
        if field.number == _MODEL_GRAPH and field.kind == _BYTES:
            pieces += delimited(_MODEL_GRAPH, _edited_nodes(data, field, _GRAPH_NODE, doc_edit))
        elif field.number == _MODEL_FUNCTIONS and field.kind == _BYTES:
            pieces += delimited(
                _MODEL_FUNCTIONS, _edited_nodes(data, field, _FUNCTION_NODE, doc_edit)
            )
        elif (
            drop_metadata is not None
            and field.number == _MODEL_METADATA
            and _key(data, field) == drop_metadata
        ):
            continue
        else:
            pieces.append(data[field.start : field.end])
    return pieces + added


def _entry(key: str, value: str) -> list[Buffer]:
    return delimited(
        _MODEL_METADATA, [*delimited(1, [key.encode()]), *delimited(2, [value.encode()])]
    )


def _edited_nodes(data: Buffer, parent: Field, node_field: int, doc_edit: DocEdit) -> list[Buffer]:
    pieces: list[Buffer] = []
    kept_from = parent.body
    for field in fields(data, parent.body, parent.end):
        if field.number == node_field and field.kind == _BYTES:
            if kept_from < field.start:
                pieces.append(data[kept_from : field.start])
            pieces += delimited(node_field, _edited_node(data, field, doc_edit))
            kept_from = field.end
    if kept_from < parent.end:
        pieces.append(data[kept_from : parent.end])
    return pieces


def _edited_node(data: Buffer, node: Field, doc_edit: DocEdit) -> list[Buffer]:
    parts = list(fields(data, node.body, node.end))
    old = next((f for f in parts if f.number == _NODE_DOC and f.kind == _BYTES), None)
    new = doc_edit(None if old is None else bytes(data[old.body : old.end]))
    docs = [] if new is None else delimited(_NODE_DOC, [new])
    if old is None:
        place = next((f.start for f in parts if f.number > _NODE_DOC), node.end)
        edits = [(place, place, docs)]
    else:
        edits = [(old.start, old.end, docs)]
    for field in parts:
        graphs_in = (
            _graphs_in(data, field)
            if field.number == _NODE_ATTRIBUTE and field.kind == _BYTES
            else None
        )
        if graphs_in is not None:
            body = delimited(_NODE_ATTRIBUTE, _edited_attribute(data, field, graphs_in, doc_edit))
            edits.append((field.start, field.end, body))
    pieces: list[Buffer] = []
    kept_from = node.body
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0]):
        pieces += [data[kept_from:start], *replacement]
        kept_from = end
    return [*pieces, data[kept_from : node.end]]


def _graphs_in(data: Buffer, attribute: Field) -> int | None:
    """Which field of an attribute has graphs, by the type that it says it is of."""
    parts = list(fields(data, attribute.body, attribute.end))
    types = [f for f in parts if f.number == _ATTRIBUTE_TYPE and f.kind == _VARINT]
    number = (
        _GRAPHS_OF_TYPE.get(_read_varint(data, types[-1].body, types[-1].end)[0]) if types else None
    )
    return number if any(f.number == number for f in parts) else None


def _edited_attribute(
    data: Buffer, attribute: Field, graphs_in: int, doc_edit: DocEdit
) -> list[Buffer]:
    pieces: list[Buffer] = []
    for field in fields(data, attribute.body, attribute.end):
        if field.number == graphs_in and field.kind == _BYTES:
            pieces += delimited(field.number, _edited_nodes(data, field, _GRAPH_NODE, doc_edit))
        else:
            pieces.append(data[field.start : field.end])
    return pieces


def _key(data: Buffer, entry: Field) -> str:
    for field in fields(data, entry.body, entry.end):
        if field.number == _ENTRY_KEY and field.kind == _BYTES:
            return bytes(data[field.body : field.end]).decode("utf-8", "replace")
    return ""


def delimited(number: int, body: list[Buffer]) -> list[Buffer]:
    """A length-delimited field around these pieces."""
    return [header(number, sum(map(len, body))), *body]


def header(number: int, length: int) -> bytes:
    """What stands before the bytes of a length-delimited field."""
    return _varint(number << 3 | _BYTES) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
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
    raise FormatError(
        "the file is not a whole ONNX model",
        hint="it is cut short or of another kind; write it again",
    )
