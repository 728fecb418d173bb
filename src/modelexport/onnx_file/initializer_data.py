"""The data of initializers: how large it is, and where in a data file it lies."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import msgspec
import onnx
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.onnx_file.model_file import external_location, open_mapped, require_data_file
from modelexport.onnx_file.wire import Buffer

PACKED: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
"""Element types of which several share a byte, with the bits of one."""
_MAX_OFFSET = 1 << 62


class InitializerSize(msgspec.Struct, frozen=True, gc=False):
    """The size of one initializer, as declared by its type and shape."""

    name: str
    elements: int
    bytes: int


def initializer_sizes(proto: onnx.ModelProto) -> list[InitializerSize]:
    """Return the sizes of the initializers of the main graph.

    Args:
        proto: The model.

    Returns:
        The sizes, of sparse initializers those of the elements that they store.
    """
    sizes = [
        InitializerSize(tensor.name, math.prod(tensor.dims), _byte_size(tensor))
        for tensor in proto.graph.initializer
    ]
    for sparse in proto.graph.sparse_initializer:
        values = sparse.values
        stored = _byte_size(values) + _byte_size(sparse.indices)
        sizes.append(InitializerSize(values.name, math.prod(values.dims), stored))
    return sizes


def _byte_size(tensor: TensorProto) -> int:
    elements: int = math.prod(tensor.dims)
    return (elements * _bits(tensor.data_type) + 7) // 8


def _bits(data_type: int) -> int:
    """Return the bits of one element; 0 where that depends on its value."""
    if data_type in PACKED:
        return PACKED[data_type]
    if data_type == TensorProto.STRING:
        return 0
    try:
        return 8 * int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    except (KeyError, TypeError):
        return 0


class DataFiles:
    """The data files of a model, each mapped when a tensor in it is first requested.

    Args:
        model: The model file.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._open = ExitStack()
        self._files: dict[str, Buffer] = {}

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()
        self._open.close()

    def values(self, tensor: TensorProto) -> Buffer:
        """Return the data of a tensor that is in a data file.

        Args:
            tensor: The tensor.

        Returns:
            Its bytes.

        Raises:
            FileError: The data file is missing.
            FormatError: The data lies beyond its end.
        """
        location = _require_location(tensor)
        if location not in self._files:
            self._files[location] = self._open.enter_context(
                open_mapped(require_data_file(self._model, location))
            )
        data = self._files[location]
        offset, length = _span(tensor, len(data), location)
        return data[offset : offset + length]


def _require_location(tensor: TensorProto) -> str:
    location = external_location(tensor)
    if location is None:
        raise FormatError(f"the model does not say in which data file {tensor.name!r} is")
    return location


def external_span(tensor: TensorProto, model: Path) -> tuple[Path, int, int]:
    """Find the data of a tensor that is in a data file.

    Args:
        tensor: The tensor.
        model: The model file.

    Returns:
        The data file, and offset and length in it.

    Raises:
        FileError: The data file is missing.
        FormatError: The data lies beyond its end.
    """
    location = _require_location(tensor)
    path = require_data_file(model, location)
    return (path, *_span(tensor, path.stat().st_size, location))


def declared_span(tensor: TensorProto, location: str) -> tuple[int, int | None]:
    """Return where in a data file a tensor's data lies, according to the model.

    Args:
        tensor: The tensor.
        location: The name of the data file.

    Returns:
        Offset and length; no length means up to the end of the file.

    Raises:
        FormatError: They are not numbers, or not in any file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else None
    except ValueError as error:
        raise FormatError(f"the offset of {tensor.name!r} in {location} is not a number") from error
    if not 0 <= offset < _MAX_OFFSET or (length is not None and not 0 <= length < _MAX_OFFSET):
        raise FormatError(f"the offset of {tensor.name!r} in {location} is not in any file")
    return offset, length


def _span(tensor: TensorProto, size: int, location: str) -> tuple[int, int]:
    offset, declared = declared_span(tensor, location)
    length = size - offset if declared is None else declared
    if length < 0 or offset + length > size:
        raise FormatError(
            f"{tensor.name!r} lies beyond the end of {location}", hint="the data file is cut short"
        )
    return offset, length
