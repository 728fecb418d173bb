"""A tagged model as it is read back: the graph, its tags and its modules, without torch or weights."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from modelexport import graph
from modelexport.errors import FileError, FormatError
from modelexport.tagged import codec, wire
from modelexport.tagged.sidecar import (
    METADATA_KEY,
    Embedded,
    ModuleRecord,
    Sidecar,
    decode_embedded,
    read_sidecar,
    sidecar_path,
)

StrPath = str | os.PathLike[str]


class TaggedModel:
    """An exported file: `proto` has everything but the weights' values; `tags` has one entry a node."""

    def __init__(self, path: Path, proto: onnx.ModelProto) -> None:
        self.path = path
        self.proto = proto
        self.graph = graph.flatten(proto)
        decode = functools.cache(codec.decode)  # the nodes of one module mostly say the same
        self.tags = [decode(node.doc_string) for node in self.graph.protos]

    @functools.cached_property
    def embedded(self) -> Embedded | None:
        """The model-level metadata, or None in a file without tags."""
        for entry in self.proto.metadata_props:
            if entry.key == METADATA_KEY:
                return decode_embedded(entry.value)
        return None

    @functools.cached_property
    def sidecar(self) -> Sidecar | None:
        """The sidecar beside the file, or None where there is none."""
        path = sidecar_path(self.path)
        return read_sidecar(path) if path.exists() else None

    @property
    def modules(self) -> dict[str, ModuleRecord]:
        """The module records by path, from the file itself, else from the sidecar."""
        source = self.embedded or self.sidecar
        return {} if source is None else source.modules

    @property
    def is_tagged(self) -> bool:
        return any(tag is not None for tag in self.tags)

    @property
    def coverage(self) -> float:
        """The share of nodes that have a tag."""
        return sum(tag is not None for tag in self.tags) / len(self.tags) if self.tags else 1.0

    def items(self) -> Iterator[tuple[graph.Node, codec.NodeTag | None]]:
        """Each node with its tag."""
        return zip(self.graph.nodes, self.tags, strict=True)


def load(path: StrPath) -> TaggedModel:
    """Read an ONNX file, tagged or not; the weights inside it are stepped over."""
    path = Path(path)
    with mapped(path) as data:
        return TaggedModel(path, parse(data, path))


def parse(data: wire.Buffer, path: Path) -> onnx.ModelProto:
    """The model in these bytes without its weights' values."""
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(wire.without_payload(data))
    except (DecodeError, FormatError) as error:
        raise FormatError(f"{path} is not an ONNX model", hint="it is cut short, or another kind of file") from error
    if not proto.HasField("graph"):
        raise FormatError(f"{path} is not an ONNX model", hint="it holds no graph")
    return proto


@contextmanager
def mapped(path: Path) -> Iterator[wire.Buffer]:
    """The bytes of a file, without reading them into memory."""
    try:
        file = path.open("rb")
    except IsADirectoryError as error:
        raise FileError(f"{path} is a folder", hint="name the .onnx file in it") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise FormatError(f"{path} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            view = memoryview(memory)
            try:
                yield view
            finally:
                view.release()
