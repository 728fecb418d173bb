"""Mutate the members of a zip archive."""

from __future__ import annotations

import io
import warnings
import zipfile

from hypothesis import strategies as st

from fuzz import mutate_bytes
from fuzz.mutate_bytes import Draw, pick_index

_NAMES = ("x.npy", ".npy", "../x.npy", "x", "é.npy", "a/b.npy", "/x.npy", "\x01.npy")
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def mutate(draw: Draw, data: bytes) -> bytes:
    """Apply one mutation to a member of an archive; return other bytes as they are."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # a damaged archive raises many types of errors
        return data
    if members:
        at = pick_index(draw, len(members))
        name, content = members[at]
        change = draw(st.sampled_from(("content", "content", "name", "drop", "double", "zeros")))
        if change == "content":
            head = min(len(content), 128) if draw(st.booleans()) else len(content)
            members[at] = name, mutate_bytes.mutate(draw, content[:head], content) + content[head:]
        elif change == "name":
            members[at] = draw(st.sampled_from(_NAMES)), content
        elif change == "drop":
            del members[at]
        elif change == "double":
            members.append(members[at])
        else:
            members[at] = name, content + bytes(1 << 18)
    return _pack(members, draw(st.sampled_from(_COMPRESSIONS)))


def _pack(members: list[tuple[str, bytes]], compression: int) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may be duplicate
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, content in members:
                archive.writestr(name or "x", content)
    return file.getvalue()
