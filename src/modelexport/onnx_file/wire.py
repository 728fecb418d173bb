"""The protobuf wire format of an ONNX file: walk and replace fields without parsing the model.

A model is edited as a list of chunks. Those that do not change are slices of the file, so that
initializer data is never copied. New fields are written where a protobuf library writes them, so
that a file which such a library reads and writes again keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError

Buffer = bytes | memoryview

# Field numbers of onnx.proto, fixed by the ONNX specification.
MODEL_GRAPH, MODEL_METADATA, MODEL_FUNCTIONS = 7, 14, 25
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_OUTPUT = 1, 5, 12
_VALUE_NAME = 1
_TENSOR_RAW = 9
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11})
_SMALL_TENSOR = 1024

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message: its number, wire type, and where it and its content are."""

    number: int
    kind: int
    start: int
    body: int
    end: int

    def is_bytes(self, number: int) -> bool:
        """Whether the field has this number and is length-delimited, as messages are.

        Args:
            number: The field number.

        Returns:
            Whether it is.
        """
        return self.number == number and self.kind == _BYTES


def fields(data: Buffer, position: int, end: int) -> Iterator[Field]:
    """Iterate over the fields of a message.

    Args:
        data: The file.
        position: The offset at which the message begins.
        end: The offset at which it ends.

    Yields:
        The fields, in file order.

    Raises:
        FormatError: It is not a message, or cut short.
    """
    while position < end:
        start = position
        key, position = read_varint(data, position, end)
        kind = key & 7
        if kind == _BYTES:
            length, position = read_varint(data, position, end)
            body, position = position, position + length
        elif kind == _VARINT:
            body = position
            _, position = read_varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            body, position = position, position + (8 if kind == _FIXED64 else 4)
        else:
            raise FormatError(
                "the file is not an ONNX model", hint="it has a field of an unknown kind"
            )
        if position > end:
            raise _cut_short()
        yield Field(key >> 3, kind, start, body, position)


def replace_fields(
    data: Buffer, start: int, end: int, edit: Callable[[Field], list[Buffer] | None]
) -> list[Buffer]:
    """Copy a message with some of its fields replaced.

    Args:
        data: The file.
        start: The offset at which the message begins.
        end: The offset at which it ends.
        edit: Returns the chunks to write instead of a field; None to keep it.

    Returns:
        The message, in chunks.
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


def _edit_graph(data: Buffer, edit: Callable[[Field], list[Buffer]]) -> list[Buffer]:
    """Copy a model with another content of its main graph."""
    return replace_fields(
        data,
        0,
        len(data),
        lambda field: delimited(MODEL_GRAPH, edit(field)) if field.is_bytes(MODEL_GRAPH) else None,
    )


def without_payload(data: Buffer, known: Sequence[Field] | None = None) -> bytes:
    """Copy a model without the data of initializers above 1 KiB; names, types and shapes stay.

    Args:
        data: The file.
        known: The fields of all initializers, where the caller has them already.

    Returns:
        The bytes of the model.
    """

    def edit(graph: Field) -> list[Buffer]:
        chunks: list[Buffer] = []
        kept_from = graph.body
        for field in initializers(data, graph) if known is None else known:
            if field.end - field.body <= _SMALL_TENSOR or not graph.body <= field.start < graph.end:
                continue
            chunks.append(data[kept_from : field.start])
            chunks += delimited(GRAPH_INITIALIZER, without_values(data, field))
            kept_from = field.end
        chunks.append(data[kept_from : graph.end])
        return chunks

    return b"".join(_edit_graph(data, edit))


def without_values(data: Buffer, tensor: Field) -> list[Buffer]:
    """Copy a tensor without its data.

    Args:
        data: The file.
        tensor: The field of the tensor.

    Returns:
        The tensor, in chunks.
    """
    return replace_fields(
        data, tensor.body, tensor.end, lambda field: [] if field.number in _TENSOR_DATA else None
    )


def graphs(data: Buffer) -> Iterator[Field]:
    """Iterate over the fields of the main graph.

    Args:
        data: The file.

    Returns:
        The fields; more than one only in files that were concatenated.
    """
    return (field for field in fields(data, 0, len(data)) if field.is_bytes(MODEL_GRAPH))


def initializers(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the initializers of a graph.

    Args:
        data: The file.
        graph: The field of the graph.

    Returns:
        The fields of the initializers, in file order.
    """
    return (f for f in fields(data, graph.body, graph.end) if f.is_bytes(GRAPH_INITIALIZER))


def nodes(data: Buffer, graph: Field) -> Iterator[Field]:
    """Iterate over the nodes of a graph.

    Args:
        data: The file.
        graph: The field of the graph.

    Returns:
        The fields of the nodes, in file order.
    """
    return (f for f in fields(data, graph.body, graph.end) if f.is_bytes(GRAPH_NODE))


def raw_data(data: Buffer, tensor: Field) -> Buffer | None:
    """Return the raw data of a tensor.

    Args:
        data: The file.
        tensor: The field of the tensor.

    Returns:
        The bytes; None where the data is not stored as raw bytes.
    """
    for field in fields(data, tensor.body, tensor.end):
        if field.is_bytes(_TENSOR_RAW):
            return data[field.body : field.end]
    return None


def with_initializers(data: Buffer, added: list[Buffer]) -> list[Buffer]:
    """Add initializers to the main graph of a model.

    Args:
        data: The file.
        added: The fields of the initializers, as `initializer` returns them.

    Returns:
        The model, in chunks.
    """

    def edit(field: Field) -> list[Buffer]:
        graph = data[field.body : field.end]
        offset = insertion_offset(graph, GRAPH_INITIALIZER)
        return [graph[:offset], *added, graph[offset:]]

    return _edit_graph(data, edit)


def insertion_offset(message: Buffer, number: int) -> int:
    """Find where a protobuf library would write a field.

    Args:
        message: The message.
        number: The number of the field.

    Returns:
        The offset in the message.
    """
    return next(
        (f.start for f in fields(message, 0, len(message)) if f.number > number), len(message)
    )


def with_outputs(data: Buffer, names: Iterable[str]) -> list[Buffer]:
    """Declare values of the main graph of a model as further outputs.

    Args:
        data: The file.
        names: The names of the values.

    Returns:
        The model, in chunks.
    """
    added = [
        chunk
        for name in names
        for chunk in delimited(GRAPH_OUTPUT, delimited(_VALUE_NAME, [name.encode()]))
    ]
    return _edit_graph(data, lambda graph: [data[graph.body : graph.end], *added])


def initializer(tensor: bytes) -> bytes:
    """Wrap a serialised tensor as an initializer of a graph.

    Args:
        tensor: The tensor.

    Returns:
        The field.
    """
    return b"".join(delimited(GRAPH_INITIALIZER, [tensor]))


def delimited(number: int, content: list[Buffer]) -> list[Buffer]:
    """Wrap chunks in a length-delimited field.

    Args:
        number: The number of the field.
        content: Its content.

    Returns:
        The field, in chunks.
    """
    return [header(number, sum(map(len, content))), *content]


def header(number: int, length: int) -> bytes:
    """Return the bytes before the content of a length-delimited field.

    Args:
        number: The number of the field.
        length: The length of its content.

    Returns:
        Key and length.
    """
    return _varint(number << 3 | _BYTES) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Read an integer.

    Args:
        data: The file.
        position: Where the integer begins.
        end: Where the message ends.

    Returns:
        The integer, and the offset behind it.

    Raises:
        FormatError: The message ends before the integer.
    """
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
