"""One data file for several models: equal tensors are stored once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import (
    declared_span,
    external_location,
    external_tensors,
    parse_model,
)

_ALIGNMENT = 4096
"""ONNX Runtime maps tensors that begin at a page, and copies others."""
_CHUNK = 4 << 20
"""Bytes that are read at a time. Mapped files would count as memory of the process."""


class _Span(NamedTuple):
    """The bytes of a tensor in a data file."""

    path: Path
    offset: int
    length: int

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            left = self.length
            while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk

    def digest(self) -> bytes:
        """Return a digest of the bytes."""
        digest = hashlib.blake2b(digest_size=32)
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.digest()


class SharedData:
    """A data file that several models refer to.

    Attributes:
        path: The file.
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
        path.touch()

    def adopt(self, data: wire.Buffer, files: Mapping[str, Path]) -> bytes:
        """Move the external data of a model into the shared file.

        Args:
            data: The bytes of the model.
            files: Its data files by the names that it refers to; they are moved or deleted.

        Returns:
            The bytes of the model, which differ only in the location, offset and length of its
            external tensors.
        """
        proto = parse_model(data, self.path, whole=True)
        if not self._size and len(files) == 1:
            # The first data file becomes the shared one, without a copy.
            (only,) = files.values()
            only.replace(self.path)
            files = dict.fromkeys(files, self.path)
            self._size = self.path.stat().st_size
        with self.path.open("ab") as shared:
            for tensor in external_tensors(proto):
                location = external_location(tensor) or ""
                offset, declared = declared_span(tensor, location)
                source = files[location]
                length = source.stat().st_size - offset if declared is None else declared
                shared_offset = self._share(_Span(source, offset, length), shared)
                del tensor.external_data[:]
                entries = {
                    "location": self._name,
                    "offset": str(shared_offset),
                    "length": str(length),
                }
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=value)
        for path in files.values():
            if path != self.path:
                path.unlink()
        return bytes(proto.SerializeToString())

    def _share(self, span: _Span, shared: BinaryIO) -> int:
        """Return the offset of a tensor in the shared file, to which it is added if need be."""
        key = (span.length, span.digest())
        if key not in self._offsets:
            own = span.path == self.path
            self._offsets[key] = span.offset if own else self._append(span, shared)
        return self._offsets[key]

    def _append(self, span: _Span, shared: BinaryIO) -> int:
        padding = -self._size % _ALIGNMENT
        shared.write(bytes(padding))
        shared.writelines(span.chunks())
        offset = self._size + padding
        self._size = offset + span.length
        return offset
