"""Damage to a zip archive: to what is in it, packed again; an archive that is none comes back as it was."""

from __future__ import annotations

import io
import warnings
import zipfile

from hypothesis import strategies as st

from fuzz import of_bytes
from fuzz.of_bytes import Draw, place

_NAMES = ("x.npy", ".npy", "../x.npy", "x", "é.npy", "a/b.npy", "/x.npy", "\x01.npy")
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def damaged(draw: Draw, data: bytes) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # a damaged archive raises many kinds
        return data
    if members:
        at = place(draw, len(members))
        name, content = members[at]
        change = draw(st.sampled_from(("content", "content", "name", "drop", "double", "zeros")))
        if change == "content":
            head = min(len(content), 128) if draw(st.booleans()) else len(content)
            members[at] = name, of_bytes.damaged(draw, content[:head], content) + content[head:]
        elif change == "name":
            members[at] = draw(st.sampled_from(_NAMES)), content
        elif change == "drop":
            del members[at]
        elif change == "double":
            members.append(members[at])
        else:
            members[at] = name, content + bytes(1 << 18)
    return _packed(members, draw(st.sampled_from(_PACKINGS)))


def _packed(members: list[tuple[str, bytes]], packing: int) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may stand there twice
        with zipfile.ZipFile(file, "w", packing) as archive:
            for name, content in members:
                archive.writestr(name or "x", content)
    return file.getvalue()
