"""A tensor taken apart into what describes it and its values, and put together again, bit for bit.

The values may be bytes at hand or a stretch of a file, which is never read into memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.errors import FileError, FormatError
from modelexport.onnx_file import wire
from modelexport.onnx_file.initializer_data import external_span

CHUNK = 3 << 18
"""Divisible by three: base64 of one chunk after the other is that of the whole."""
EXTERNAL = "external"
"""Stands where a field's name does, for values that the model has in a data file of its own."""

_PLAIN_FIELDS = {4: "float_data", 9: "raw_data", 10: "double_data"}
"""Fields that are raw bytes in the file as well."""
_PLAIN_NUMBERS = {name: number for number, name in _PLAIN_FIELDS.items()}
_INTEGER_FIELDS = {"int32_data": "<i4", "int64_data": "<i8", "uint64_data": "<u8"}
FIELDS = frozenset({*_PLAIN_NUMBERS, *_INTEGER_FIELDS, EXTERNAL})


class Span:
    """A stretch of a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self.path = path
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def chunks(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                left = self.length
                while left:
                    piece = file.read(min(left, CHUNK))
                    if not piece:
                        raise FormatError(
                            f"{self.path} ends too early", hint="it was cut short; write it again"
                        )
                    left -= len(piece)
                    yield piece
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from error


Values = bytes | Span


def chunks(values: Values) -> Iterator[bytes]:
    return values.chunks() if isinstance(values, Span) else iter((values,))


def in_memory(values: Values) -> bytes:
    return b"".join(chunks(values))


def tensors_in(message: object) -> Iterator[tuple[str, TensorProto]]:
    """The tensors of a node's own attributes, of a sparse tensor, or a tensor itself, each with its place."""
    if isinstance(message, TensorProto):
        yield "", message
    elif isinstance(message, onnx.SparseTensorProto):
        yield "values", message.values
        yield "indices", message.indices
    elif isinstance(message, onnx.NodeProto):
        for place, attribute in enumerate(message.attribute):
            if attribute.type in _HOLD_TENSORS or not attribute.type:
                for at, tensor in _attribute_tensors(attribute):
                    yield f"attribute.{place}.{at}", tensor


_HOLD_TENSORS = {
    AttributeProto.TENSOR,
    AttributeProto.TENSORS,
    AttributeProto.SPARSE_TENSOR,
    AttributeProto.SPARSE_TENSORS,
}


def _attribute_tensors(attribute: AttributeProto) -> Iterator[tuple[str, TensorProto]]:
    if attribute.HasField("t"):
        yield "t", attribute.t
    for number, tensor in enumerate(attribute.tensors):
        yield f"tensors.{number}", tensor
    sparse = (
        [("sparse_tensor", attribute.sparse_tensor)] if attribute.HasField("sparse_tensor") else []
    )
    sparse += [
        (f"sparse_tensors.{number}", found) for number, found in enumerate(attribute.sparse_tensors)
    ]
    for at, found in sparse:
        yield f"{at}.values", found.values
        yield f"{at}.indices", found.indices


def split(data: bytes) -> tuple[bytes, dict[str, Values]]:
    """A serialised tensor without its values, and these as raw bytes by the name of their field; texts stay."""
    kept: list[wire.Buffer] = []
    found: dict[str, list[bytes]] = {}
    for field in wire.fields(data, 0, len(data)):
        name = _PLAIN_FIELDS.get(field.number)
        if name is None:
            kept.append(data[field.start : field.end])
        elif name == "raw_data":
            found[name] = [
                data[field.body : field.end]
            ]  # of a field that stands twice, protobuf takes the last
        else:
            found.setdefault(name, []).append(data[field.body : field.end])
    values: dict[str, Values] = {name: b"".join(parts) for name, parts in found.items()}
    tensor = TensorProto.FromString(b"".join(kept))
    for name, kind in _INTEGER_FIELDS.items():
        integers = getattr(tensor, name)
        if integers:
            values[name] = np.array(integers, kind).tobytes()
            tensor.ClearField(name)
    return tensor.SerializeToString(), values


def split_in_file(
    data: wire.Buffer, field: wire.Field, path: Path
) -> tuple[bytes, dict[str, Values]]:
    """A tensor of a model file without the values that are raw bytes there, and these as stretches of that file."""
    kept: list[wire.Buffer] = []
    values: dict[str, Values] = {}
    for part in wire.fields(data, field.body, field.end):
        name = _PLAIN_FIELDS.get(part.number)
        if name is None:
            kept.append(data[part.start : part.end])
        elif (
            name in values and name != "raw_data"
        ):  # in several pieces, which nobody does: nothing is a stretch
            return bytes(data[field.body : field.end]), {}
        else:
            values[name] = Span(path, part.body, part.end - part.body)
    return b"".join(kept), values


def external_values(tensor: TensorProto, model: Path) -> Span:
    """The values of a tensor that lie in a data file of the model."""
    return Span(*external_span(tensor, model))


Piece = wire.Buffer | Span


def joined(rest: bytes, values: dict[str, Values]) -> list[Piece]:
    """The serialised tensor again, in pieces; what lies in the model's own data file stays there."""
    integers = {name: found for name, found in values.items() if name in _INTEGER_FIELDS}
    if integers:
        tensor = TensorProto.FromString(rest)
        for name, found in integers.items():
            data = in_memory(found)
            kind = np.dtype(_INTEGER_FIELDS[name])
            if len(data) % kind.itemsize:
                raise FormatError(
                    f"the values of {tensor.name!r} are cut short", hint="write the GraphML again"
                )
            getattr(tensor, name).extend(np.frombuffer(data, kind).tolist())
        rest = tensor.SerializeToString()
    pieces: list[Piece] = [rest]
    for number, name in _PLAIN_FIELDS.items():
        if name in values:
            pieces = _with_field(pieces, number, values[name])
    return pieces


def _with_field(pieces: list[Piece], number: int, values: Values) -> list[Piece]:
    """A field put behind those with lower numbers; they are in the last piece, which is bytes."""
    *done, rest = pieces
    added: list[Piece] = [wire.header(number, len(values)), values]
    if not isinstance(rest, bytes | memoryview):
        return [*pieces, *added]
    place = wire.place_of(rest, number)
    return [*done, rest[:place], *added, rest[place:]]
