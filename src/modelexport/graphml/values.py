"""The values of tensors outside their messages: bytes in memory, or spans of files.

A span is never read into memory as a whole. A store keeps the values of a GraphML file that is
written; `ValueFiles` finds them when it is read.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.graphml.format import Parameters, StoredValues
from modelexport.onnx_file.atomic_write import is_inside
from modelexport.onnx_file.model_file import is_file, missing_data_error
from modelexport.onnx_file.wire import Buffer
from modelexport.tagged.records import UNREADABLE

EXTERNAL = "external"
"""Stands for a field's name where the model has the values in a data file of its own."""
PLAIN_FIELDS = {4: "float_data", 9: "raw_data", 10: "double_data"}
"""Fields of TensorProto that are raw bytes in a file as well."""
INTEGER_FIELDS = {"int32_data": "<i4", "int64_data": "<i8", "uint64_data": "<u8"}
_FIELDS = frozenset({*PLAIN_FIELDS.values(), *INTEGER_FIELDS, EXTERNAL})

_CHUNK = 3 << 18  # divisible by three: base64 of successive chunks is base64 of the whole
_ALIGNMENT = 64
_SMALL = 1024


class Span(msgspec.Struct, frozen=True, gc=False):
    """A range of bytes of a file, the digest that they must have, and whose values they are.

    `sha256` is None for bytes that no record describes.
    """

    path: Path
    offset: int
    length: int
    sha256: str | None = None
    owner: str = ""

    def __len__(self) -> int:
        return self.length

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it ends too early, or the digest differs at the end.
        """
        digest = hashlib.sha256()
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
                    digest.update(chunk)
                    yield chunk
        except OSError as error:
            raise FileError(
                f"cannot read {self.path}: {error.strerror}", hint="check the file"
            ) from error
        if self.sha256 is not None and digest.hexdigest() != self.sha256:
            raise FormatError(
                f"the values of {self.owner} in {self.path.name} are not the ones that were "
                "written",
                hint="the checksum differs; write the GraphML again",
            )


Values = bytes | Span
Section = Buffer | Span
"""A part of a serialized message."""


def read_chunks(sections: Iterable[Section]) -> Iterator[bytes]:
    """Read sections one after the other, those of files in chunks."""
    for section in sections:
        if isinstance(section, Span):
            yield from section.chunks()
        else:
            yield bytes(section)


class Store:
    """Where the values of a GraphML file go, by its mode.

    `sidecar`: a file of raw bytes at aligned offsets; equal spans of a source are stored once.
    `embedded`: base64 in the GraphML file itself. `reference`: the original files, which must stay
    beside the GraphML file.
    """

    def __init__(self, mode: str, folder: Path, file: BinaryIO | None, file_name: str) -> None:
        """Prepare a store for a model in a folder; `file` is the sidecar, None in other modes."""
        self.mode = mode
        self.file_name: str | None = file_name if file is not None else None
        self.takes_all: bool = file is not None
        """Whether values in memory are taken, too, besides those in files."""
        self._folder = folder
        self._file = file
        self._known: dict[Span, StoredValues] = {}

    def takes(self, field: str, values: Values, *, of_initializer: bool) -> bool:
        """Return whether values go into this store; others stay in their message."""
        if not self.takes_all:
            return isinstance(values, Span)
        return of_initializer or field == EXTERNAL or len(values) >= _SMALL

    def put(
        self, at: str, field: str, values: Values, write: Callable[[str], object]
    ) -> StoredValues:
        """Store values, and return where they are.

        Args:
            at: The path of the tensor in its message.
            field: The name of the field.
            values: The values.
            write: Writes text into the GraphML file.
        """
        span = values if isinstance(values, Span) else None
        offset = file = None
        if self._file is not None:
            if span in self._known:
                return msgspec.structs.replace(self._known[span], at=at, field=field)
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            offset = self._file.tell()
        elif self.mode == "reference" and span is not None:
            offset, file = span.offset, span.path.relative_to(self._folder).as_posix()
        digest = hashlib.sha256()
        for chunk in read_chunks([values]):
            digest.update(chunk)
            if self._file is not None:
                self._file.write(chunk)
            elif self.mode == "embedded":
                write(base64.b64encode(chunk).decode())
        if self.mode == "embedded":
            write(";")
        stored = StoredValues(field, len(values), digest.hexdigest(), at, offset, file)
        if span is not None and self._file is not None:
            self._known[span] = stored
        return stored


class ValueFiles:
    """Finds the values of a GraphML file where it says that they are."""

    def __init__(self, path: Path, parameters: Parameters) -> None:
        self._path = path
        self._parameters = parameters
        self._sizes: dict[str, int] = {}

    def find(self, record: str, embedded: Sequence[Span], owner: str) -> dict[str, dict[str, Span]]:
        """Find the values that a message lacks, by the path of their tensor and their field.

        Args:
            record: The key `values`.
            embedded: The values from the key `bytes`.
            owner: Whose values they are, for messages.

        Raises:
            FileError: If a data file is missing.
            FormatError: If the record is damaged, or a file too short.
        """
        values: dict[str, dict[str, Span]] = {}
        if not record and not embedded:
            return values
        try:
            entries = msgspec.json.decode(record, type=list[StoredValues])
        except UNREADABLE as error:
            raise FormatError(f"the record of the values of {owner} is damaged") from error
        if self._parameters.mode != "embedded":
            spans = [self._find(entry, owner) for entry in entries]
        elif [span.length for span in embedded] == [entry.length for entry in entries]:
            spans = list(embedded)
        else:
            raise FormatError(f"the embedded values of {owner} are cut short")
        for entry, span in zip(entries, spans, strict=True):
            if entry.field not in _FIELDS:
                raise FormatError(f"{owner} has values of an unknown kind {entry.field!r}")
            checked = msgspec.structs.replace(span, sha256=entry.sha256, owner=owner)
            values.setdefault(entry.at, {})[entry.field] = checked
        return values

    def _find(self, entry: StoredValues, owner: str) -> Span:
        name = entry.file if self._parameters.mode == "reference" else self._parameters.file
        if name is None or entry.offset is None:
            raise FormatError(f"nothing says where the values of {owner} are")
        if name not in self._sizes:
            self._sizes[name] = self._size(name)
        path = self._path.parent / name
        if entry.offset < 0 or entry.length < 0 or entry.offset + entry.length > self._sizes[name]:
            raise FormatError(
                f"{path} is too short for the values of {owner}",
                hint="it is cut short or another file; write the GraphML again",
            )
        return Span(path, entry.offset, entry.length)

    def _size(self, name: str) -> int:
        """Return the size of a file in the GraphML's folder or below it; reject any other."""
        folder = self._path.parent
        path = folder / name
        exists = is_file(path)
        if not is_inside(name) or (exists and not path.resolve().is_relative_to(folder.resolve())):
            raise FormatError(
                f"the data file {name!r} lies outside the GraphML's folder",
                hint="only data files in the GraphML's folder, or below it, are followed",
            )
        if not exists:
            raise missing_data_error(self._path, name)
        return path.stat().st_size
