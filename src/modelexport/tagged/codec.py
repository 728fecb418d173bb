"""The tag of one node as it stands in the node's doc_string: compact JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


class NodeTag(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a node's doc_string says."""

    hierarchy_tags: tuple[str, ...]
    """The node's own tag first, then, sorted, the tags of other modules that read its outputs."""
    hierarchy_path: str
    """The node's tag: that of its module, or of the nearest shown module above it."""
    hierarchy_count: int
    """The number of `hierarchy_tags`."""
    hierarchy_method: str
    """The evidence: `scope`, `parameter`, `dataflow`, `root`, or a plugin's own word."""
    hierarchy_module: str
    """The exact path of its module, shown or hidden; the root is empty."""
    hierarchy_call: int | None = None
    """Which call of the module, from 0, where it ran more than once."""
    hierarchy_covers: tuple[str, ...] = ()
    """The paths of all modules whose operations are in the node, sorted, where they are several."""
    doc: str | None = None
    """A doc_string that the node had before."""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON may raise: it is none, or not as it should be; it is no text; it is too deep."""

_MARK = "hierarchy_"
_BEGINNING = '{"' + _MARK

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeTag)


def encode(tag: NodeTag) -> bytes:
    """The doc_string for a tag."""
    return _encoder.encode(tag)


def decode(doc_string: str | bytes) -> NodeTag | None:
    """The tag in a doc_string, or None where it holds no tag of ours."""
    if not doc_string:
        return None
    try:
        return _decoder.decode(doc_string)
    except UNREADABLE:
        return None


def digest(keys: Iterable[str], tags: Iterable[NodeTag | None]) -> str:
    """A digest of what the nodes of a file say, by their keys, whatever their order."""
    known: dict[int, bytes] = {}  # nodes that say the same share one object
    told = []
    for tag in tags:
        short = known.get(id(tag))
        if short is None:
            short = known[id(tag)] = hashlib.sha256(_encoder.encode(tag)).digest()
        told.append(short)
    lines = sorted(zip(keys, told, strict=True))
    return hashlib.sha256(msgspec.msgpack.encode(lines)).hexdigest()[:32]


def looks_like_tag(doc_string: str | bytes) -> bool:
    """Whether a doc_string was a tag of ours, whole or in part; one that is not UTF-8 comes as bytes."""
    if isinstance(doc_string, bytes):
        doc_string = doc_string.decode("utf-8", "replace")
    return _MARK in doc_string or (bool(doc_string) and _BEGINNING.startswith(doc_string))
