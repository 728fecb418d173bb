"""The GraphML as a stream of elements: what each node and edge says under our keys, whatever editor wrote it last.

Keys go by their names and nodes by what they say, since editors number both anew. No document type is
accepted, so there are no entities to expand, and nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from lxml import etree

from modelexport.errors import FileError, FormatError
from modelexport.graphml.dialect import (
    FORMAT_VERSION,
    GRAPHML,
    ON_EDGES,
    ON_GRAPH,
    ON_NODES,
    WRITE_AGAIN,
    YED,
)
from modelexport.graphml.tensors import Span
from modelexport.onnx_file.model_file import check_regular_file

_CHUNK = 1 << 16
_SHARE = 0.9
"""What reading the XML is of the whole work, about."""
_NODE, _EDGE, _GRAPH, _DATA, _KEY = (
    f"{{{GRAPHML}}}{name}" for name in ("node", "edge", "graph", "data", "key")
)
_LABEL = f"{{{YED}}}NodeLabel"
_TAKEN = frozenset({_NODE, _EDGE, _GRAPH, _DATA, _KEY, _LABEL})
_OURS = {"graph": ON_GRAPH, "node": ON_NODES, "edge": ON_EDGES}


class NodeData(msgspec.Struct, gc=False):
    """A node: what it says under our keys, the label that it shows, and the bytes that are embedded in it."""

    identity: str
    told: dict[str, str]
    embedded: list[Span]
    label: str = ""
    parent: int = -1
    """The node that this one lies in, by its number."""

    @property
    def place(self) -> str:
        """How to find it in an editor."""
        return place(
            self.told.get("name") or self.told.get("operator") or self.label.strip(), self.identity
        )


def place(name: str, identity: str) -> str:
    """A node by its name, if it has one, and the id that it has in the file."""
    return f"{name!r} ({identity})" if name else identity


class Document:
    """What a GraphML file says: its nodes one by one, then the edges between them."""

    def __init__(
        self,
        path: Path,
        spool: BinaryIO,
        spool_path: Path,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.path = path
        self._on_progress = on_progress or (lambda done: None)
        self._target = _Target(spool, spool_path)

    def nodes(self) -> Iterator[tuple[int, NodeData]]:
        """Every node with its number, an inner one before the one that it lies in; edges are ready afterwards."""
        target = self._target
        parser = etree.XMLParser(
            target=target,
            encoding="utf-8",
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            huge_tree=True,  # large weights, deep trees; without a document type nothing can grow
        )
        check_regular_file(self.path)
        try:
            size = max(self.path.stat().st_size, 1)
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    parser.feed(chunk)
                    yield from target.taken()
                    self._on_progress(_SHARE * file.tell() / size)
            parser.close()
            if not target.begun:
                raise FormatError("it is empty")
        except etree.XMLSyntaxError as error:
            what = "is no XML" if not target.begun else "is cut short or damaged"
            where = f"line {error.lineno}" if error.lineno else "at its end"
            raise FormatError(f"{self.path} {what} ({where})", hint=WRITE_AGAIN) from error
        except IsADirectoryError as error:
            raise FileError(
                f"{self.path} is a folder", hint="name the .graphml file in it"
            ) from error
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"cannot read {self.path}: {error.strerror}", hint="check the path"
            ) from error
        except FormatError as error:
            raise FormatError(
                f"{self.path}: {error.message}", hint=error.hint or WRITE_AGAIN
            ) from error
        yield from target.taken()
        self.edges = Edges(target)


class Edges:
    """The edges as numbers: both ends, which output of the source, which input of the target; -1 where none says."""

    def __init__(self, target: _Target) -> None:
        self.sources, self.targets, self.outputs, self.slots = target.columns
        self.numbers = target.numbers
        for row, end, identity in target.unresolved:
            number = self.numbers.get(identity)
            if number is None:
                raise FormatError(
                    f"an edge ends at {identity!r}, which is no node", hint=WRITE_AGAIN
                )
            (self.sources, self.targets)[end][row] = number


class _Target:
    """Takes the parser's events."""

    def __init__(self, spool: BinaryIO, spool_path: Path) -> None:
        self.begun = False
        self._spool, self._spool_path = spool, spool_path
        self._names: dict[str, tuple[str, str]] = {}
        self._open: list[tuple[str, Any]] = []
        self._nodes: list[tuple[int, NodeData]] = []
        self._edge: dict[str, str] = {}
        self._sink = ""
        self._text: list[str] = []
        self._wants_label = False
        self._bytes: _Base64 | None = None
        self.numbers: dict[str, int] = {}
        self.columns = tuple(array("q") for _ in range(4))
        self.unresolved: list[tuple[int, int, str]] = []
        self._finished: list[tuple[int, NodeData]] = []

    def taken(self) -> list[tuple[int, NodeData]]:
        finished, self._finished = self._finished, []
        return finished

    def doctype(self, *_: object) -> None:
        raise FormatError(
            "it has a document type", hint="GraphML needs none; entities are not read"
        )

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self.begun:
            if tag != f"{{{GRAPHML}}}graphml":
                raise FormatError(
                    "it is another kind of XML",
                    hint="name a .graphml file that export-graphml wrote",
                )
            self.begun = True
        if tag not in _TAKEN:  # most of a file is graphics
            return
        if tag == _DATA:
            self._begin_data(attributes.get("key", ""))
        elif tag == _NODE:
            identity = attributes.get("id", "")
            number = len(self.numbers)
            if not identity or self.numbers.setdefault(identity, number) != number:
                raise FormatError(f"two nodes have the id {identity!r}")
            parent = self._nodes[-1][0] if self._nodes else -1
            self._nodes.append((number, NodeData(identity, {}, [], parent=parent)))
            self._open.append(("node", None))
        elif tag == _EDGE:
            self._edge = {"": ""}
            self._open.append(
                ("edge", (attributes.get("source", ""), attributes.get("target", "")))
            )
        elif tag == _GRAPH:
            self._open.append(("graph", None))
        elif tag == _KEY:
            scope, name = attributes.get("for", ""), attributes.get("attr.name", "")
            if name in _OURS.get(scope, ()):
                self._names[attributes.get("id", "")] = (scope, name)
        elif self._nodes and not self._nodes[-1][1].label:
            self._wants_label = True
            self._text = []

    def _begin_data(self, key: str) -> None:
        scope, name = self._names.get(key, ("", ""))
        if scope and self._open and self._open[-1][0] == scope:
            self._sink = name
            self._text = []
            if name == "bytes":
                self._bytes = _Base64(self._spool)

    def data(self, text: str) -> None:
        if self._bytes is not None:
            self._bytes.feed(text)
        elif self._sink or self._wants_label:
            self._text.append(text)

    def end(self, tag: str) -> None:
        if tag not in _TAKEN:
            return
        if tag == _DATA:
            if self._sink:
                self._end_data()
        elif tag == _NODE:
            self._open.pop()
            self._finished.append(self._nodes.pop())
        elif tag == _EDGE:
            _, (source, target) = self._open.pop()
            self._add_edge(source, target)
        elif tag == _GRAPH:
            self._open.pop()
        elif tag == _LABEL and self._wants_label:
            self._nodes[-1][1].label = "".join(self._text)
            self._wants_label = False

    def _end_data(self) -> None:
        name, self._sink = self._sink, ""
        scope = self._open[-1][0]
        if self._bytes is not None:
            self._nodes[-1][1].embedded = [
                Span(self._spool_path, offset, length) for offset, length in self._bytes.finish()
            ]
            self._bytes = None
            return
        text = "".join(self._text)
        if not text or (text.isspace() and "\n" in text):  # editors write keys without a value
            return
        if name == "format_version":
            _check_version(text)
        if scope == "node":
            self._nodes[-1][1].told[name] = text
        elif scope == "edge":
            self._edge[name] = text

    def _add_edge(self, source: str, target: str) -> None:
        sources, targets, outputs, slots = self.columns
        for end, (column, identity) in enumerate(((sources, source), (targets, target))):
            number = self.numbers.get(identity, -1)
            if number < 0:
                self.unresolved.append((len(column), end, identity))
            column.append(number)
        outputs.append(whole_number(self._edge.get("source_output", "")))
        slots.append(whole_number(self._edge.get("target_input", "")))

    def close(self) -> None:
        """The parser wants one; it calls it after an error as well."""


def _check_version(text: str) -> None:
    if text.strip() != FORMAT_VERSION:
        raise FormatError(
            f"its format version is {text.strip()[:40]!r}, this program reads {FORMAT_VERSION}",
            hint="use the version of modelexport that wrote it",
        )


def whole_number(text: str) -> int:
    """A number that is written in plain digits, or -1."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


class _Base64:
    """Decodes pieces of base64 text, `;` after each stretch, into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begin = file.tell()
        self._left = ""
        self._found: list[tuple[int, int]] = []

    def feed(self, text: str) -> None:
        *stretches, rest = "".join(text.split()).split(";")
        for stretch in stretches:
            self._decode(self._left + stretch)
            self._left = ""
            end = self._file.tell()
            self._found.append((self._begin, end - self._begin))
            self._begin = end
        self._left += rest
        whole = len(self._left) // 4 * 4
        if whole and "=" not in self._left:
            self._decode(self._left[:whole])
            self._left = self._left[whole:]

    def _decode(self, text: str) -> None:
        try:
            values = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise FormatError("embedded values are no base64") from error
        try:
            self._file.write(values)
        except OSError as error:
            raise FileError(
                f"cannot write the values: {error.strerror}", hint="free some space"
            ) from error

    def finish(self) -> list[tuple[int, int]]:
        if self._left:
            raise FormatError("embedded values are cut short")
        self._file.flush()
        return self._found


def exact_bytes(node: NodeData) -> bytes:
    """The exact form that a node holds."""
    try:
        return base64.b64decode("".join(node.told["onnx"].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(
            f"the exact form of {node.place} is no base64", hint=WRITE_AGAIN
        ) from error
