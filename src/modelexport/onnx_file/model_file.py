"""Open a model file: map it, parse it without initializer data, find its external data."""

from __future__ import annotations

import math
import mmap
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from modelexport.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileError,
    FormatError,
    describe_type,
)
from modelexport.graph.flat import StoredNodes
from modelexport.onnx_file import wire

StrPath = str | os.PathLike[str]

_HOLDS_MORE = {
    onnx.AttributeProto.TENSOR,
    onnx.AttributeProto.TENSORS,
    onnx.AttributeProto.GRAPH,
    onnx.AttributeProto.GRAPHS,
}


def parse_model(
    data: wire.Buffer, path: Path, weights: Sequence[wire.Field] | None = None, whole: bool = False
) -> onnx.ModelProto:
    """The model in these bytes without the values of its large weights, whose fields may be known already; or whole."""
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(bytes(data) if whole else wire.without_payload(data, weights))
    except (DecodeError, FormatError) as error:
        raise FormatError(
            f"{path} is not an ONNX model", hint="it is cut short, or another kind of file"
        ) from error
    if not proto.HasField("graph"):
        raise FormatError(f"{path} is not an ONNX model", hint="it holds no graph")
    return proto


def stored_nodes(data: wire.Buffer, path: Path) -> StoredNodes:
    """The nodes of the main graph of a file, parsed one by one when they are asked for."""
    begins, ends = array("q"), array("q")
    for graph in wire.graphs(data):
        for field in wire.nodes(data, graph):
            begins.append(field.body)
            ends.append(field.end)

    def made(place: int) -> onnx.NodeProto:
        try:
            node: onnx.NodeProto = onnx.NodeProto.FromString(
                bytes(data[begins[place] : ends[place]])
            )
        except DecodeError as error:
            raise FormatError(
                f"{path} is not an ONNX model", hint="a node of it is damaged"
            ) from error
        return node

    return StoredNodes(len(begins), made)


@contextmanager
def open_mapped(path: Path) -> Iterator[wire.Buffer]:
    """The bytes of a file, without reading them into memory."""
    check_regular_file(path)
    try:
        file = path.open("rb")
    except IsADirectoryError as error:
        raise FileError(f"{path} is a folder", hint="name the .onnx file in it") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise FormatError(f"{path} is empty", hint="write it again")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(memory)
        try:
            yield view
        finally:
            view.release()
            with suppress(
                BufferError
            ):  # an error on its way still holds slices; the last of them closes the map
                memory.close()


def check_regular_file(path: Path) -> None:
    """Refuse a pipe or a device, which may never end."""
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError):
        return  # opening it says what is wrong
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise FileError(f"{path} is no ordinary file", hint="name a file on disk")


def external_location(tensor: onnx.TensorProto) -> str | None:
    """The data file that holds a tensor's values, or None; a path that climbs out of the folder is refused."""
    for entry in tensor.external_data if tensor.data_location else ():
        if entry.key == "location":
            if not isinstance(entry.value, str):
                raise FormatError(f"the name of the model's data file {entry.value!r} is not UTF-8")
            if not is_inside(entry.value):
                raise _outside(entry.value)
            return str(entry.value)
    return None


def is_inside(name: str) -> bool:
    """Whether a relative path names a file of a folder, or of one below it, as far as the path itself tells."""
    path = PurePosixPath(name)
    return (
        bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    )


def resolve_data_file(model: Path, location: str) -> Path:
    """A data file of a model. As a link, it stays in the folder or leads to where the model's own link does."""
    path = model.parent / location
    if is_file(path):
        folders = {model.parent.resolve()} | (
            {model.resolve().parent} if model.is_symlink() else set()
        )
        if not any(path.resolve().is_relative_to(folder) for folder in folders):
            raise _outside(location)
    return path


def require_data_file(model: Path, location: str) -> Path:
    """A data file of a model whose values are needed: one that is not there is an error."""
    path = resolve_data_file(model, location)
    if not is_file(path):
        raise missing_data_error(model, location)
    return path


def missing_data_error(owner: Path, location: str) -> FileError:
    """The error for a data file that is not where a model or its GraphML says."""
    return FileError(
        f"{location} is missing: the weights of {owner.name} are in it",
        hint=f"put it back into the folder of {owner.name}",
    )


def _outside(location: str) -> FormatError:
    return FormatError(
        f"the model's data file {location!r} lies outside the model's folder",
        hint="only data files in the model's folder, or below it, are followed",
    )


def check_no_overwrite(source: Path, proto: onnx.ModelProto, *targets: Path) -> None:
    """Refuse to write over a model that is read, or over one of its data files, under whatever name they go."""
    own = [source, *(source.parent / name for name in external_files(proto))]
    for target in targets:
        if any(_is_same(target, path) for path in own):
            raise ArgumentError(
                f"output {target.name} would overwrite the input", hint="choose another output"
            )


def _is_same(first: Path, second: Path) -> bool:
    """Whether two paths are one file, also through links of either kind."""
    try:
        return first.resolve() == second.resolve() or (
            first.exists() and second.exists() and first.samefile(second)
        )
    except (OSError, ValueError):
        return False


def external_files(proto: onnx.ModelProto) -> list[str]:
    """The data files that a model refers to, each once."""
    return list(dict.fromkeys(filter(None, map(external_location, external_tensors(proto)))))


def external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors whose values lie in data files: initializers of all graphs, and attributes."""
    graphs = [proto.graph]
    for graph in graphs:
        yield from (tensor for tensor in graph.initializer if tensor.data_location)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type in _HOLDS_MORE:
                    graphs += [attribute.g] if attribute.HasField("g") else attribute.graphs
                    tensors = [attribute.t] if attribute.HasField("t") else attribute.tensors
                    yield from (tensor for tensor in tensors if tensor.data_location)


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that cannot be one is no error."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def as_path(value: object) -> Path:
    """The path of a file to read."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(
            f"the path is {describe_type(value)}", hint="pass the path of an .onnx file"
        )
    return Path(value)


def opset_imports(proto: onnx.ModelProto) -> dict[str, int]:
    """The operator sets that a model imports, by domain."""
    return dict(
        sorted((str(entry.domain or "ai.onnx"), entry.version) for entry in proto.opset_import)
    )


PACKED: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
"""Types of which several values share a byte, with the bits of one."""


class InitializerSize(msgspec.Struct, frozen=True, gc=False):
    """The size of one initializer, as it is declared."""

    name: str
    elements: int
    bytes: int


def initializer_sizes(proto: onnx.ModelProto) -> list[InitializerSize]:
    """The initializers of the main graph, sparse ones by what they store."""
    found = [_initializer_size(tensor.name, tensor) for tensor in proto.graph.initializer]
    for sparse in proto.graph.sparse_initializer:
        values, indices = (
            _initializer_size("", sparse.values),
            _initializer_size("", sparse.indices),
        )
        found.append(
            InitializerSize(sparse.values.name, values.elements, values.bytes + indices.bytes)
        )
    return found


def _initializer_size(name: str, tensor: TensorProto) -> InitializerSize:
    elements = math.prod(tensor.dims)
    return InitializerSize(name, elements, (elements * _bits(tensor.data_type) + 7) // 8)


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
            self._files[location] = self._open.enter_context(
                open_mapped(require_data_file(self._model, location))
            )
        return _slice(tensor, self._files[location], location)


def initializer_fields(data: wire.Buffer, path: Path) -> list[wire.Field]:
    """The initializers of the main graph, in the order of the file."""
    try:
        return list(_initializer_messages(data))
    except FormatError as error:
        raise FormatError(
            f"{path} is not an ONNX model", hint="it is cut short, or another kind of file"
        ) from error


def _initializer_messages(data: wire.Buffer) -> Iterator[wire.Field]:
    for graph in wire.graphs(data):
        yield from wire.initializers(data, graph)


def _slice(tensor: TensorProto, data: wire.Buffer, location: str) -> wire.Buffer:
    offset, length = _span(tensor, len(data), location)
    return data[offset : offset + length]


def external_span(tensor: TensorProto, model: Path) -> tuple[Path, int, int]:
    """Where the values of a tensor lie in a data file: the file, offset and length."""
    location = external_location(tensor)
    if location is None:
        raise FormatError(f"the model does not say in which data file {tensor.name!r} is")
    path = require_data_file(model, location)
    return (path, *_span(tensor, path.stat().st_size, location))


def declared_span(tensor: TensorProto, location: str) -> tuple[int, int | None]:
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


def _span(tensor: TensorProto, size: int, location: str) -> tuple[int, int]:
    offset, declared = declared_span(tensor, location)
    length = size - offset if declared is None else declared
    if length < 0 or offset + length > size:
        raise FormatError(
            f"{tensor.name!r} lies beyond the end of {location}", hint="the data file is cut short"
        )
    return offset, length
