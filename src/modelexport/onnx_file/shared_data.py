"""One data file for several models: equal tensors are stored once."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import (
    declared_span,
    external_location,
    external_tensors,
    parse_model,
)

_ALIGNMENT = 4096
"""ONNX Runtime maps tensors that begin at a page, and copies others."""


class SharedData:
    """A data file that several models refer to.

    Attributes:
        path: The file, which the first tensor creates.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Begin a data file.

        Args:
            path: Where it is written.
            name: The name by which models refer to it.
        """
        self.path = path
        self._name = name
        self._offsets: dict[tuple[int, bytes], int] = {}
        self._size = 0

    def adopt(self, data: wire.Buffer, files: Mapping[str, Path]) -> bytes:
        """Move the external data of a model into the shared file.

        Args:
            data: The bytes of the model.
            files: Its data files by the names that it refers to; they are deleted.

        Returns:
            The bytes of the model, which differ only in the location, offset and length of its
            external tensors.
        """
        proto = parse_model(data, self.path, whole=True)
        if not self._size and len(files) == 1:
            # The first data file becomes the shared one, without a copy.
            ((_, only),) = files.items()
            only.rename(self.path)
            files = dict.fromkeys(files, self.path)
            self._size = self.path.stat().st_size
        mapped = {name: _map(path) for name, path in files.items()}
        with self.path.open("ab") as shared:
            for tensor in external_tensors(proto):
                location = external_location(tensor) or ""
                offset, length = declared_span(tensor, location)
                values = mapped[location][offset:][:length]
                key = (len(values), hashlib.blake2b(values, digest_size=16).digest())
                if key not in self._offsets and files[location] == self.path:
                    self._offsets[key] = offset
                elif key not in self._offsets:
                    self._offsets[key] = self._append(shared, values)
                del tensor.external_data[:]
                entries = (
                    ("location", self._name),
                    ("offset", str(self._offsets[key])),
                    ("length", str(len(values))),
                )
                for name, value in entries:
                    tensor.external_data.add(key=name, value=value)
        mapped.clear()
        for path in files.values():
            if path != self.path:
                path.unlink()
        return bytes(proto.SerializeToString())

    def _append(self, shared: BinaryIO, values: wire.Buffer) -> int:
        padding = -self._size % _ALIGNMENT
        shared.write(bytes(padding))
        shared.write(values)
        offset = self._size + padding
        self._size = offset + len(values)
        return offset


def _map(path: Path) -> memoryview:
    """Map a data file into memory; an empty one cannot be mapped."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
