"""Where the values of weights go: beside the GraphML, into it, or nowhere, since the original has them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelexport.graphml.tensors import EXTERNAL, Span, Values, chunks

ALIGNMENT = 64
_SMALL = 1024


def part_check(message: bytes, stored: str) -> str:
    """A short digest of the exact form of a part and of where its values are, to tell when either is damaged."""
    return hashlib.blake2b(message + b"\0" + stored.encode(), digest_size=8).hexdigest()


class Stored(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Which field of which tensor was taken out, and where its bytes are."""

    field: str
    length: int
    sha256: str
    at: str = ""
    offset: int | None = None
    file: str | None = None


class Sidecar:
    """Raw bytes one after the other in a file, each stretch aligned; equal stretches of a source are kept once."""

    mode, takes_all = "sidecar", True

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self.name = name
        self.end = 0
        self._known: dict[tuple[Path, int, int], Stored] = {}

    def takes(self, field: str, values: Values, weight: bool) -> bool:
        """Whether these values go to the file: all of a weight, and large ones of an attribute."""
        return weight or field == EXTERNAL or len(values) >= _SMALL

    def put(self, at: str, field: str, values: Values, write: Callable[[str], object]) -> Stored:
        place = (values.path, values.offset, values.length) if isinstance(values, Span) else None
        known = None if place is None else self._known.get(place)
        if known is not None:
            return msgspec.structs.replace(known, at=at, field=field)
        gap = -self.end % ALIGNMENT
        self._file.write(bytes(gap))
        digest = hashlib.sha256()
        for piece in chunks(values):
            digest.update(piece)
            self._file.write(piece)
        stored = Stored(field, len(values), digest.hexdigest(), at, self.end + gap)
        self.end += gap + len(values)
        if place is not None:
            self._known[place] = stored
        return stored


class Embedded:
    """Base64 in the GraphML itself."""

    mode, takes_all = "embedded", False
    name = None

    def takes(self, field: str, values: Values, weight: bool) -> bool:
        return field == EXTERNAL or isinstance(values, Span)

    def put(self, at: str, field: str, values: Values, write: Callable[[str], object]) -> Stored:
        digest = hashlib.sha256()
        for piece in chunks(values):
            digest.update(piece)
            write(base64.b64encode(piece).decode())
        write(";")
        return Stored(field, len(values), digest.hexdigest(), at)


class Reference:
    """Only the place in the original files, which must stay beside the GraphML."""

    mode, takes_all = "reference", False
    name = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def takes(self, field: str, values: Values, weight: bool) -> bool:
        return isinstance(values, Span)

    def put(self, at: str, field: str, values: Values, write: Callable[[str], object]) -> Stored:
        assert isinstance(values, Span)
        digest = hashlib.sha256()
        for piece in chunks(values):
            digest.update(piece)
        file = values.path.relative_to(self._folder).as_posix()
        return Stored(field, values.length, digest.hexdigest(), at, values.offset, file)


Store = Sidecar | Embedded | Reference
