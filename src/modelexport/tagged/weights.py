"""The initializers of a model file: their sizes without reading them, their content where it matters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.fingerprint import PACKED, content, tensor_content, tensor_head
from modelexport.tagged import wire
from modelexport.tagged.files import external_location, mapped, present_data_file


class Weight(msgspec.Struct, frozen=True, gc=False):
    """The size of one initializer, as it is declared."""

    name: str
    elements: int
    bytes: int


def declared_weights(proto: onnx.ModelProto) -> list[Weight]:
    """The initializers of the main graph, sparse ones by what they store."""
    found = [_weight(tensor.name, tensor) for tensor in proto.graph.initializer]
    for sparse in proto.graph.sparse_initializer:
        values, indices = _weight("", sparse.values), _weight("", sparse.indices)
        found.append(Weight(sparse.values.name, values.elements, values.bytes + indices.bytes))
    return found


def _weight(name: str, tensor: TensorProto) -> Weight:
    elements = math.prod(tensor.dims)
    return Weight(name, elements, (elements * _bits(tensor.data_type) + 7) // 8)


def _bits(data_type: int) -> int:
    """The bits that one value takes; 0 where that depends on the value."""
    if data_type in PACKED:
        return PACKED[data_type]
    if data_type == TensorProto.STRING:
        return 0
    try:
        return 8 * int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    except (KeyError, TypeError):
        return 0


def content_digests(data: wire.Buffer, proto: onnx.ModelProto, model: Path) -> dict[str, str]:
    """A digest of type, shape and values for each initializer; reads the weights, and data files beside the model."""
    digests: dict[str, str] = {}
    with DataFiles(model) as files:
        for tensor, field in zip(proto.graph.initializer, _initializers(data), strict=True):
            if external_location(tensor) is None:
                digests[tensor.name] = _inline_digest(data, tensor, field)
            else:
                digests[tensor.name] = _digest(tensor, files.values(tensor))
    for sparse in proto.graph.sparse_initializer:
        digests[sparse.values.name] = hashlib.sha256(content(sparse)).hexdigest()
    return digests


class DataFiles:
    """The data files of a model, mapped when a tensor in them is asked for."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._open = ExitStack()
        self._files: dict[str, wire.Buffer] = {}

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._open.close()

    def values(self, tensor: TensorProto) -> wire.Buffer:
        """The bytes of a tensor whose values lie in a data file."""
        location = external_location(tensor)
        if location is None:
            raise FormatError(f"the model does not say in which data file {tensor.name!r} is")
        if location not in self._files:
            self._files[location] = self._open.enter_context(mapped(present_data_file(self._model, location)))
        return _slice(tensor, self._files[location], location)


def weight_fields(data: wire.Buffer, path: Path) -> list[wire.Field]:
    """The initializers of the main graph, in the order of the file."""
    try:
        return list(_initializers(data))
    except FormatError as error:
        raise FormatError(f"{path} is not an ONNX model", hint="it is cut short, or another kind of file") from error


def _initializers(data: wire.Buffer) -> Iterator[wire.Field]:
    for graph in wire.graphs(data):
        yield from wire.initializers(data, graph)


def _inline_digest(data: wire.Buffer, tensor: TensorProto, field: wire.Field) -> str:
    raw = None if tensor.data_type in PACKED else wire.raw_data(data, field)
    if raw is not None:
        return _digest(tensor, raw)
    whole = TensorProto.FromString(bytes(data[field.body : field.end]))
    return hashlib.sha256(tensor_content(whole)).hexdigest()


def _digest(tensor: TensorProto, values: wire.Buffer) -> str:
    digest = hashlib.sha256(tensor_head(tensor))
    digest.update(values)
    return digest.hexdigest()


def _slice(tensor: TensorProto, data: wire.Buffer, location: str) -> wire.Buffer:
    offset, length = _place(tensor, len(data), location)
    return data[offset : offset + length]


def external_place(tensor: TensorProto, model: Path) -> tuple[Path, int, int]:
    """Where the values of a tensor lie in a data file: the file, offset and length."""
    location = external_location(tensor)
    if location is None:
        raise FormatError(f"the model does not say in which data file {tensor.name!r} is")
    path = present_data_file(model, location)
    return (path, *_place(tensor, path.stat().st_size, location))


def declared_place(tensor: TensorProto, location: str) -> tuple[int, int | None]:
    """Offset and length of a tensor's values in a data file as the model says them; no length means to its end."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(told.get("offset", 0))
        length = int(told["length"]) if "length" in told else None
    except ValueError as error:
        raise FormatError(f"the place of {tensor.name!r} in {location} is not a number") from error
    if not 0 <= offset < 1 << 62 or (length is not None and not 0 <= length < 1 << 62):
        raise FormatError(f"the place of {tensor.name!r} in {location} is not in any file")
    return offset, length


def _place(tensor: TensorProto, size: int, location: str) -> tuple[int, int]:
    offset, declared = declared_place(tensor, location)
    length = size - offset if declared is None else declared
    if length < 0 or offset + length > size:
        raise FormatError(f"{tensor.name!r} lies beyond the end of {location}", hint="the data file is cut short")
    return offset, length
