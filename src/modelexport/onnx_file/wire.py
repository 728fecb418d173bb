"""The protobuf wire format of an ONNX file: walk and replace fields without parsing the model.

A model is edited as a list of chunks. Those that do not change are slices of the file, so that
initializer data is never copied. New fields are written where a protobuf library writes them, so
that a file which such a library reads and writes again keeps its bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from modelexport.errors import FormatError

Buffer = bytes | memoryview

# Field numbers of onnx.proto, fixed by the ONNX specification.
MODEL_GRAPH, MODEL_FUNCTIONS = 7, 25
GRAPH_NODE, GRAPH_INITIALIZER, _GRAPH_OUTPUT = 1, 5, 12
NODE_METADATA = 9
ENTRY_KEY, ENTRY_VALUE = 1, 2
_VALUE_NAME = 1
_TENSOR_RAW, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 9, 13, 14
_EXTERNAL = 1
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11})
_SMALL_TENSOR = 1024
_LARGE_TENSOR = 1 << 16

VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5


class Field(msgspec.Struct, frozen=True, gc=False):
    """One field of a message: its number, wire type, and where it and its content are."""

    number: int
    kind: int
    start: int
    payload: int
    end: int

    def is_bytes(self, number: int) -> bool:
        """Whether the field has this number and is length-delimited, as messages are."""
        return self.number == number and self.kind == BYTES


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
        key, position = read_varint(data, position, end)
        kind = key & 7
        if kind == BYTES:
            length, position = read_varint(data, position, end)
            payload, position = position, position + length
        elif kind == VARINT:
            payload = position
            _, position = read_varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            payload, position = position, position + (8 if kind == _FIXED64 else 4)
        else:
            hint = "it has a field of an unknown kind"
            raise FormatError("the file is not an ONNX model", hint=hint)
        if position > end:
            raise cut_short()
        yield Field(key >> 3, kind, start, payload, position)


def graphs(data: Buffer) -> Iterator[Field]:
    """Iterate over the main graph: one field, but several in files that were concatenated."""
    return messages(data, 0, len(data), MODEL_GRAPH)


def initializers(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the fields of the initializers of a graph, in file order."""
    return messages(data, graph.payload, graph.end, GRAPH_INITIALIZER)


def nodes(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the fields of the nodes of a graph, in file order."""
    return messages(data, graph.payload, graph.end, GRAPH_NODE)


def messages(data: Buffer, position: int, end: int, number: int) -> Iterator[Field]:
    """Iterate over the messages in the fields of one number below 16, faster than `fields`."""
    wanted = number << 3 | BYTES
    while position < end:
        start, key = position, data[position]
        if key & 0x87 != BYTES:
            field = next(fields(data, position, end))
            position = field.end
            if field.is_bytes(number):
                yield field
            continue
        payload = position + 2
        length = data[position + 1] if payload < end else 0x80
        if length > 0x7F:  # more than one byte; most nodes with a tag need two
            if payload < end and data[payload] <= 0x7F:
                length, payload = length & 0x7F | data[payload] << 7, position + 3
            else:
                length, payload = read_varint(data, position + 1, end)
        position = payload + length
        if position > end:
            raise cut_short()
        if key == wanted:
            yield Field(number, BYTES, start, payload, position)


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


def edit_inside(
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

    return b"".join(edit_inside(data, 0, len(data), MODEL_GRAPH, edit))


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

    return edit_inside(data, 0, len(data), MODEL_GRAPH, edit)


def with_outputs(data: Buffer, names: Iterable[str]) -> list[Buffer]:
    """Copy a model, in chunks, with more values of its main graph declared as outputs."""
    values = [delimited(_VALUE_NAME, [name.encode()]) for name in names]
    added = [chunk for value in values for chunk in delimited(_GRAPH_OUTPUT, value)]
    return edit_inside(
        data, 0, len(data), MODEL_GRAPH, lambda graph: [data[graph.payload : graph.end], *added]
    )


def with_node_metadata(data: Buffer, key: str, values: Sequence[str | None]) -> list[Buffer]:
    """Copy a model, in chunks, with an entry in the metadata of nodes of its main graph.

    Args:
        data: The file.
        key: The key of the entry.
        values: The value for each node, in file order; None for a node that gets no entry.
    """
    remaining = iter(values)

    def edit_node(node: Field) -> list[Buffer]:
        value = next(remaining)
        # The metadata is the last field of a node.
        added = [] if value is None else delimited(NODE_METADATA, entry(key, value))
        return [data[node.payload : node.end], *added]

    return edit_inside(
        data,
        0,
        len(data),
        MODEL_GRAPH,
        lambda graph: edit_inside(data, graph.payload, graph.end, GRAPH_NODE, edit_node),
    )


def with_external_data(data: Buffer, location: str) -> list[Buffer]:
    """Copy a model, in chunks, whose large initializers refer to their bytes in the file itself.

    A runtime then maps the data of the file, instead of a copy of the whole model.

    Args:
        data: The file.
        location: Its name, as external data refers to it.
    """

    def edit(graph: Field) -> list[Buffer]:
        return replace_fields(data, graph.payload, graph.end, edit_initializer)

    def edit_initializer(field: Field) -> list[Buffer] | None:
        if not field.is_bytes(GRAPH_INITIALIZER) or field.end - field.payload < _LARGE_TENSOR:
            return None
        parts = fields(data, field.payload, field.end)
        raw = next((part for part in parts if part.is_bytes(_TENSOR_RAW)), None)
        if raw is None:
            return None
        entries = {"location": location, "offset": raw.payload, "length": raw.end - raw.payload}
        added = [
            chunk
            for key, value in entries.items()
            for chunk in delimited(_TENSOR_EXTERNAL, entry(key, str(value)))
        ]
        is_external = [_varint(_TENSOR_LOCATION << 3 | VARINT), _varint(_EXTERNAL)]
        tensor = [*without_values(data, field), *added, *is_external]
        return delimited(GRAPH_INITIALIZER, tensor)

    return edit_inside(data, 0, len(data), MODEL_GRAPH, edit)


def entry(key: str, value: str) -> list[Buffer]:
    """Return the content of an entry of metadata or external data."""
    return [*delimited(ENTRY_KEY, [key.encode()]), *delimited(ENTRY_VALUE, [value.encode()])]


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


@functools.lru_cache(maxsize=1 << 14)
def header(number: int, length: int) -> bytes:
    """Return key and length, the bytes before the content of a length-delimited field."""
    return _varint(number << 3 | BYTES) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Read an integer; return it and the offset behind it."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        if byte < 0x80:
            return value | byte << shift, position
        value |= (byte & 0x7F) << shift
        shift += 7
    raise cut_short()


def cut_short() -> FormatError:
    """Return the error for a message that ends too early."""
    return FormatError(
        "the file is not a whole ONNX model",
        hint="it is cut short or of another kind; write it again",
    )
