"""The tag of one node as it stands in the node's doc_string: compact JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


class NodeTag(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a node's doc_string says. `doc` is a doc_string that was there before."""

    hierarchy_tags: tuple[str, ...]
    hierarchy_path: str
    hierarchy_count: int
    hierarchy_method: str
    hierarchy_module: str
    hierarchy_call: int | None = None
    doc: str | None = None


_MARK = "hierarchy_"
_BEGINNING = '{"' + _MARK

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeTag)


def encode(tag: NodeTag, doc: str | None = None) -> bytes:
    """The doc_string for a tag; `doc` is the one that it takes the place of."""
    return _encoder.encode(tag if doc is None else msgspec.structs.replace(tag, doc=doc))


def decode(doc_string: str | bytes) -> NodeTag | None:
    """The tag in a doc_string, or None where it holds no tag of ours."""
    if not doc_string:
        return None
    try:
        return _decoder.decode(doc_string)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def digest(tags: Iterable[NodeTag | None]) -> str:
    """A digest of what the nodes of a file say, in their order; doc_strings of the baseline do not count."""
    told = hashlib.blake2b(digest_size=16)
    encoded: dict[int, bytes] = {}  # nodes that say the same share one object
    for tag in tags:
        text = encoded.get(id(tag))
        if text is None:
            bare = tag if tag is None or tag.doc is None else msgspec.structs.replace(tag, doc=None)
            text = encoded[id(tag)] = _encoder.encode(bare)
        told.update(text)
    return told.hexdigest()


def looks_like_tag(doc_string: str) -> bool:
    """Whether a doc_string was a tag of ours, whole or in part."""
    return _MARK in doc_string or (bool(doc_string) and _BEGINNING.startswith(doc_string))
