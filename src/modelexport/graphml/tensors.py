"""Split tensors into a description and their values, and join them again, bit for bit.

Values are bytes in memory or a span of a file, which is never read into memory as a whole. A store
keeps the values of a GraphML file.
"""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.errors import FileError, FormatError
from modelexport.graphml.format import WRITE_AGAIN, StoredValues
from modelexport.onnx_file import wire

EXTERNAL = "external"
"""Stands for a field's name where the model has the values in a data file of its own."""

_CHUNK = 3 << 18  # divisible by three: base64 of successive chunks is base64 of the whole
_ALIGNMENT = 64
_SMALL = 1024
_PLAIN_FIELDS = {4: "float_data", 9: "raw_data", 10: "double_data"}
"""Fields of TensorProto that are raw bytes in a file as well."""
_INTEGER_FIELDS = {"int32_data": "<i4", "int64_data": "<i8", "uint64_data": "<u8"}
FIELDS = frozenset({*_PLAIN_FIELDS.values(), *_INTEGER_FIELDS, EXTERNAL})
_HAS_TENSORS = {
    AttributeProto.UNDEFINED,
    AttributeProto.TENSOR,
    AttributeProto.TENSORS,
    AttributeProto.SPARSE_TENSOR,
    AttributeProto.SPARSE_TENSORS,
}


class Span:
    """A range of bytes of a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self.path = path
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes in chunks.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it ends too early.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                left = self.length
                while left:
                    chunk = file.read(min(left, _CHUNK))
                    if not chunk:
                        raise FormatError(
                            f"{self.path} ends too early", hint="it was cut short; write it again"
                        )
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from error


Values = bytes | Span
Section = wire.Buffer | Span
"""A part of a serialized message."""


def read_chunks(sections: Iterable[Section]) -> Iterator[bytes]:
    """Read sections one after the other, those of files in chunks."""
    for section in sections:
        if isinstance(section, Span):
            yield from section.chunks()
        else:
            yield bytes(section)


def tensors_in(message: object) -> Iterator[tuple[str, TensorProto]]:
    """Iterate over the tensors of a message, each with its path there.

    Args:
        message: A tensor, a sparse tensor, or a node, whose attributes are searched.

    Yields:
        The path, as the field `at` of `StoredValues` has it, and the tensor.
    """
    if isinstance(message, TensorProto):
        yield "", message
    elif isinstance(message, onnx.SparseTensorProto):
        yield "values", message.values
        yield "indices", message.indices
    elif isinstance(message, onnx.NodeProto):
        for position, attribute in enumerate(message.attribute):
            if attribute.type in _HAS_TENSORS:
                for path, tensor in _attribute_tensors(attribute):
                    yield f"attribute.{position}.{path}", tensor


def _attribute_tensors(attribute: AttributeProto) -> Iterator[tuple[str, TensorProto]]:
    if attribute.HasField("t"):
        yield "t", attribute.t
    for number, tensor in enumerate(attribute.tensors):
        yield f"tensors.{number}", tensor
    if attribute.HasField("sparse_tensor"):
        for path, tensor in tensors_in(attribute.sparse_tensor):
            yield f"sparse_tensor.{path}", tensor
    for number, sparse in enumerate(attribute.sparse_tensors):
        for path, tensor in tensors_in(sparse):
            yield f"sparse_tensors.{number}.{path}", tensor


def split(data: bytes) -> tuple[bytes, dict[str, Values]]:
    """Take the values out of a serialized tensor; texts stay.

    Args:
        data: The serialized tensor.

    Returns:
        The tensor without its values, and these as raw bytes by the names of their fields.
    """
    kept: list[wire.Buffer] = []
    parts: dict[str, list[bytes]] = {}
    for field in wire.fields(data, 0, len(data)):
        name = _PLAIN_FIELDS.get(field.number)
        if name is None:
            kept.append(data[field.start : field.end])
        elif name == "raw_data":  # not a repeated field: protobuf takes the last
            parts[name] = [data[field.body : field.end]]
        else:
            parts.setdefault(name, []).append(data[field.body : field.end])
    values: dict[str, Values] = {name: b"".join(chunks) for name, chunks in parts.items()}
    tensor = TensorProto.FromString(b"".join(kept))
    for name, dtype in _INTEGER_FIELDS.items():
        integers = getattr(tensor, name)
        if integers:
            values[name] = np.array(integers, dtype).tobytes()
            tensor.ClearField(name)
    return tensor.SerializeToString(), values


def split_in_file(
    data: wire.Buffer, field: wire.Field, path: Path
) -> tuple[bytes, dict[str, Values]]:
    """Take the values that are raw bytes out of a tensor of a model file.

    Args:
        data: The model file.
        field: The field of the tensor.
        path: The path of the file.

    Returns:
        The tensor without these values, and the values as spans of the file.
    """
    kept: list[wire.Buffer] = []
    values: dict[str, Values] = {}
    for part in wire.fields(data, field.body, field.end):
        name = _PLAIN_FIELDS.get(part.number)
        if name is None:
            kept.append(data[part.start : part.end])
        elif name in values and name != "raw_data":  # in several parts, which are no span
            return bytes(data[field.body : field.end]), {}
        else:
            values[name] = Span(path, part.body, part.end - part.body)
    return b"".join(kept), values


def join(rest: bytes, values: dict[str, Values]) -> list[Section]:
    """Put values back into a serialized tensor.

    Args:
        rest: The tensor without its values.
        values: The values by the names of their fields.

    Returns:
        The serialized tensor in sections.

    Raises:
        FormatError: If values are cut short.
    """
    integers = {name: each for name, each in values.items() if name in _INTEGER_FIELDS}
    if integers:
        tensor = TensorProto.FromString(rest)
        for name, each in integers.items():
            data, dtype = b"".join(read_chunks([each])), np.dtype(_INTEGER_FIELDS[name])
            if len(data) % dtype.itemsize:
                raise FormatError(f"the values of {tensor.name!r} are cut short", hint=WRITE_AGAIN)
            getattr(tensor, name).extend(np.frombuffer(data, dtype).tolist())
        rest = tensor.SerializeToString()
    sections: list[Section] = []
    for number, name in _PLAIN_FIELDS.items():  # in the order in which protobuf writes them
        if name in values:
            position = wire.insertion_offset(rest, number)
            sections += [rest[:position], wire.header(number, len(values[name])), values[name]]
            rest = rest[position:]
    return [*sections, rest]


class Store(ABC):
    """Where the values of a GraphML file go."""

    mode: str
    file_name: str | None = None
    takes_all = False
    """Whether values in memory are taken, too, besides those in files."""

    def takes(self, field: str, values: Values, *, of_initializer: bool) -> bool:
        """Tell whether values go into this store; others stay in their message."""
        return isinstance(values, Span)

    @abstractmethod
    def put(
        self, at: str, field: str, values: Values, write: Callable[[str], object]
    ) -> StoredValues:
        """Store values.

        Args:
            at: The path of the tensor in its message.
            field: The name of the field.
            values: The values.
            write: Writes text into the GraphML file.

        Returns:
            Where they are now.
        """


class SidecarStore(Store):
    """A file of raw bytes at aligned offsets; equal spans of a source are stored once."""

    mode, takes_all = "sidecar", True

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file_name = name
        self._file = file
        self._end = 0
        self._known: dict[tuple[Path, int, int], StoredValues] = {}

    def takes(self, field: str, values: Values, *, of_initializer: bool) -> bool:
        """Take all values of an initializer, and large ones of an attribute."""
        return of_initializer or field == EXTERNAL or len(values) >= _SMALL

    def put(
        self, at: str, field: str, values: Values, write: Callable[[str], object]
    ) -> StoredValues:
        """Append values to the file."""
        span = (values.path, values.offset, values.length) if isinstance(values, Span) else None
        known = None if span is None else self._known.get(span)
        if known is not None:
            return msgspec.structs.replace(known, at=at, field=field)
        gap = -self._end % _ALIGNMENT
        self._file.write(bytes(gap))
        digest = hashlib.sha256()
        for chunk in read_chunks([values]):
            digest.update(chunk)
            self._file.write(chunk)
        stored = StoredValues(field, len(values), digest.hexdigest(), at, self._end + gap)
        self._end += gap + len(values)
        if span is not None:
            self._known[span] = stored
        return stored


class EmbeddedStore(Store):
    """Base64 in the GraphML file itself."""

    mode = "embedded"

    def put(
        self, at: str, field: str, values: Values, write: Callable[[str], object]
    ) -> StoredValues:
        """Write values in base64."""
        digest = hashlib.sha256()
        for chunk in read_chunks([values]):
            digest.update(chunk)
            write(base64.b64encode(chunk).decode())
        write(";")
        return StoredValues(field, len(values), digest.hexdigest(), at)


class ReferenceStore(Store):
    """Offsets in the original files, which must stay beside the GraphML file."""

    mode = "reference"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(
        self, at: str, field: str, values: Values, write: Callable[[str], object]
    ) -> StoredValues:
        """Note where the original has the values."""
        assert isinstance(values, Span)
        digest = hashlib.sha256()
        for chunk in values.chunks():
            digest.update(chunk)
        file = values.path.relative_to(self._folder).as_posix()
        return StoredValues(field, values.length, digest.hexdigest(), at, values.offset, file)
