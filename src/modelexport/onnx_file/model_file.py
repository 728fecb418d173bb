"""Open a model file: map it, parse it without initializer data, read its external data."""

from __future__ import annotations

import mmap
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

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
from modelexport.onnx_file.atomic_write import is_inside
from modelexport.options import StrPath as StrPath

_TENSOR_TYPES = {onnx.AttributeProto.TENSOR, onnx.AttributeProto.TENSORS}
_GRAPH_TYPES = {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}
_MAX_OFFSET = 1 << 62


@contextmanager
def _map_read_errors(
    path: Path, damaged: str = "it is cut short, or another kind of file"
) -> Iterator[None]:
    """Convert what fails while a model file is read into errors that name the file."""
    try:
        yield
    except FileError:
        raise
    except IsADirectoryError as error:
        raise _folder_error(path) from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except (DecodeError, FormatError) as error:
        raise FormatError(f"{path} is not an ONNX model", hint=damaged) from error


def parse_model(
    data: wire.Buffer,
    path: Path,
    initializers: Sequence[wire.Field] | None = None,
    whole: bool = False,
) -> onnx.ModelProto:
    """Parse a model, by default without the data of large initializers.

    Args:
        data: The bytes of the model.
        path: The file that they are from, for messages.
        initializers: The fields of its initializers, where the caller has them already.
        whole: Whether initializer data is parsed as well.

    Raises:
        FormatError: It is not an ONNX model.
    """
    with _map_read_errors(path):
        proto = onnx.ModelProto()
        proto.ParseFromString(bytes(data) if whole else wire.without_payload(data, initializers))
    if not proto.HasField("graph"):
        raise FormatError(f"{path} is not an ONNX model", hint="it holds no graph")
    return proto


def stored_nodes(data: wire.Buffer, path: Path) -> StoredNodes:
    """Return the nodes of the main graph, parsed on access; messages name `path`."""
    starts, ends = array("q"), array("q")
    for graph in wire.graphs(data):
        for field in wire.nodes(data, graph):
            starts.append(field.payload)
            ends.append(field.end)

    def parse(index: int) -> onnx.NodeProto:
        with _map_read_errors(path, "a node of it is damaged"):
            stored = bytes(data[starts[index] : ends[index]])
            return cast(onnx.NodeProto, onnx.NodeProto.FromString(stored))

    return StoredNodes(len(starts), parse)


@contextmanager
def open_mapped(path: Path, whole: bool = False) -> Iterator[wire.Buffer]:
    """Map a file into memory, without reading it, and yield its bytes.

    Args:
        path: The file.
        whole: Whether all of it will be read, to be copied. It is then mapped at once: that is
            faster than page by page.

    Raises:
        FileError: It cannot be read.
        FormatError: It is empty.
    """
    check_regular_file(path)
    with _map_read_errors(path):
        file = path.open("rb")
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise FormatError(f"{path} is empty", hint="write it again")
        with _map_read_errors(path):
            if whole and hasattr(mmap, "MAP_POPULATE"):
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                memory = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ)
            else:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(memory)
        try:
            yield view
        finally:
            view.release()
            # An error on its way still holds slices; the last of them closes the map.
            with suppress(BufferError):
                memory.close()


def check_regular_file(path: Path) -> None:
    """Refuse a pipe or a device, which may never end; that the file exists is not checked.

    Raises:
        FileError: It is neither a regular file nor a folder.
    """
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError):
        return  # opening it reports what is wrong
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise FileError(f"{path} is not a regular file", hint="name a file on disk")


def external_location(tensor: TensorProto) -> str | None:
    """Return the name of the data file that holds a tensor's data.

    Returns:
        The name, relative to the model's folder; None where the data is in the model.

    Raises:
        FormatError: The name leads out of the model's folder.
    """
    for entry in tensor.external_data if tensor.data_location else ():
        if entry.key == "location":
            if not isinstance(entry.value, str):
                raise FormatError(f"the name of the model's data file {entry.value!r} is not UTF-8")
            if not is_inside(entry.value):
                raise _outside(entry.value)
            return str(entry.value)
    return None


def resolve_data_file(model: Path, location: str) -> Path:
    """Return the path of a data file, which need not exist, by its name in the model.

    Raises:
        FormatError: It is a link that leads elsewhere than into the model's folder, or into the
            folder that the model itself is a link to, as in the Hugging Face cache.
    """
    path = model.parent / location
    if is_file(path):
        folders = {model.parent.resolve()}
        if model.is_symlink():
            folders.add(model.resolve().parent)
        if not any(path.resolve().is_relative_to(folder) for folder in folders):
            raise _outside(location)
    return path


def require_data_file(model: Path, location: str) -> Path:
    """Return the path of a data file, which has to exist, by its name in the model.

    Raises:
        FileError: There is no such file.
        FormatError: It is a link that leads elsewhere.
    """
    path = resolve_data_file(model, location)
    if not is_file(path):
        raise missing_data_error(model, location)
    return path


def missing_data_error(owner: Path, location: str) -> FileError:
    """Return the error for a missing data file; `owner` is the file that refers to it."""
    return FileError(
        f"{location} is missing: initializers of {owner.name} are in it",
        hint=f"put it back into the folder of {owner.name}",
    )


def _outside(location: str) -> FormatError:
    return FormatError(
        f"the model's data file {location!r} lies outside the model's folder",
        hint="only data files in the model's folder, or below it, are followed",
    )


def external_files(proto: onnx.ModelProto) -> list[str]:
    """List the names of the data files that a model refers to, each once."""
    return list(dict.fromkeys(filter(None, map(external_location, external_tensors(proto)))))


def external_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Iterate over the tensors whose data is in data files, also those in attributes."""
    graphs: list[onnx.GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    for graph in graphs:
        if isinstance(graph, onnx.GraphProto):
            yield from (tensor for tensor in graph.initializer if tensor.data_location)
        for attribute in (attribute for node in graph.node for attribute in node.attribute):
            if attribute.type in _GRAPH_TYPES:
                graphs += [attribute.g] if attribute.HasField("g") else attribute.graphs
            elif attribute.type in _TENSOR_TYPES:
                tensors = [attribute.t] if attribute.HasField("t") else attribute.tensors
                yield from (tensor for tensor in tensors if tensor.data_location)


def is_file(path: Path) -> bool:
    """Return whether a path is an existing file; False also for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def name_beside(path: Path, ending: str) -> Path:
    """Return the path of a file beside a model that has its stem and another ending.

    Raises:
        FileError: The path is `.` or `/`, which has no name.
    """
    if not path.name:
        raise _folder_error(path)
    return path.with_name(f"{path.stem}{ending}")


def _folder_error(path: Path) -> FileError:
    return FileError(f"{path} is a folder", hint="name the .onnx file in it")


def as_path(value: object) -> Path:
    """Check what a caller gave as the path of a file to read, and return the path.

    Raises:
        ArgumentTypeError: It is not a path.
        ArgumentError: No file can have this name.
    """
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(
            f"the path is {describe_type(value)}", hint="pass the path of an .onnx file"
        )
    if "\0" in os.fsdecode(value):
        raise ArgumentError(f"no file can have the name {value!r}", hint="check the path")
    return Path(value)


def opset_imports(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the versions of the operator sets that a model imports, by domain, sorted."""
    imports = proto.opset_import
    return dict(sorted((str(entry.domain or "ai.onnx"), entry.version) for entry in imports))


def initializer_fields(data: wire.Buffer, path: Path) -> list[wire.Field]:
    """List the fields of the initializers of the main graph, in file order.

    Raises:
        FormatError: It is not an ONNX model.
    """
    with _map_read_errors(path):
        return [field for graph in wire.graphs(data) for field in wire.initializers(data, graph)]


class DataFiles:
    """The data files of a model, each mapped when a tensor in it is first requested.

    Args:
        model: The model file.
    """

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
        """Return the bytes of a tensor that is in a data file.

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
    """Find the data of a tensor of a model file: its data file, and offset and length in it.

    Raises:
        FileError: The data file is missing.
        FormatError: The data lies beyond its end.
    """
    location = _require_location(tensor)
    path = require_data_file(model, location)
    return (path, *_span(tensor, path.stat().st_size, location))


def declared_span(tensor: TensorProto, location: str) -> tuple[int, int | None]:
    """Return offset and length of a tensor in the data file `location`, according to the model.

    No length means up to the end of the file.

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
