"""Read a GraphML file as a stream: the texts under our keys, whichever editor wrote it last.

Keys go by their names and nodes by their texts, since editors number both again. A document type
is rejected, so there are no entities to expand, and nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from lxml import etree

from modelexport.errors import FileError, FormatError
from modelexport.graphml.elements import Edges
from modelexport.graphml.format import (
    EDGE_KEYS,
    FORMAT_VERSION,
    GRAPH_KEYS,
    GRAPHML,
    NODE_KEYS,
    WRITE_AGAIN,
    YED,
)
from modelexport.graphml.tensors import Span
from modelexport.onnx_file.model_file import check_regular_file

_CHUNK = 1 << 16
_SHARE = 0.9
"""The part of an import's time that reading the XML takes, about."""
_NODE, _EDGE, _GRAPH, _DATA, _KEY = (
    f"{{{GRAPHML}}}{name}" for name in ("node", "edge", "graph", "data", "key")
)
_LABEL = f"{{{YED}}}NodeLabel"
_READ_TAGS = frozenset({_NODE, _EDGE, _GRAPH, _DATA, _KEY, _LABEL})
_KEYS = {"graph": GRAPH_KEYS, "node": NODE_KEYS, "edge": EDGE_KEYS}
_DOMAINS = {_GRAPH: "graph", _NODE: "node", _EDGE: "edge"}


class DrawnNode(msgspec.Struct, gc=False):
    """A node: the texts under our keys, its label, and the spans of its embedded values.

    `number` is its position in the file.
    """

    identity: str
    number: int
    texts: dict[str, str]
    embedded: list[Span]
    label: str = ""

    @property
    def title(self) -> str:
        """How to find the node in an editor: its name or label, and its id."""
        name = self.texts.get("name") or self.texts.get("operator") or self.label.strip()
        return node_title(name, self.identity)

    def parse_message(self) -> bytes:
        """Decode the key `onnx`.

        Returns:
            The serialized message.

        Raises:
            FormatError: If it is not base64.
        """
        try:
            return base64.b64decode("".join(self.texts["onnx"].split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise FormatError(
                f"the exact form of {self.title} is not base64", hint=WRITE_AGAIN
            ) from error


def node_title(name: str, identity: str) -> str:
    """Return how to find a node in an editor: its name, if it has one, and its id."""
    return f"{name!r} ({identity})" if name else identity


class Document:
    """The nodes of a GraphML file one by one, then the edges between them."""

    def __init__(
        self,
        path: Path,
        spool: BinaryIO,
        spool_path: Path,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Prepare to read a file.

        Args:
            path: The GraphML file.
            spool: A file that embedded values are decoded into.
            spool_path: The path of that file.
            on_progress: Called now and then with how much of the import is done.
        """
        self.path = path
        self.edges = Edges()
        """The edges by the numbers of nodes; an output or input is -1 where the file has none."""
        self.parents = array("i")
        """The number of the node around each node, -1 for none."""
        self._on_progress = on_progress or (lambda done: None)
        self._target = _Target(spool, spool_path, self.edges, self.parents)

    def nodes(self) -> Iterator[DrawnNode]:
        """Read the file; `edges` and `parents` are complete afterwards.

        Yields:
            Every node, inner ones before the one around them.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it is not GraphML that `export_graphml` wrote.
        """
        target = self._target
        parser = etree.XMLParser(
            target=target,
            encoding="utf-8",
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            huge_tree=True,  # large values, deep trees; without a document type nothing can grow
        )
        check_regular_file(self.path)
        try:
            size = max(self.path.stat().st_size, 1)
            with self.path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    parser.feed(chunk)
                    yield from target.take_nodes()
                    self._on_progress(_SHARE * file.tell() / size)
            parser.close()
            if not target.begun:
                raise FormatError("it is empty")
            yield from target.take_nodes()
            target.resolve_edges()
        except etree.XMLSyntaxError as error:
            problem = "is not XML" if not target.begun else "is cut short or damaged"
            where = f"line {error.lineno}" if error.lineno else "at its end"
            raise FormatError(f"{self.path} {problem} ({where})", hint=WRITE_AGAIN) from error
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


class _Target:
    """Receives the events of lxml's parser."""

    def __init__(
        self, spool: BinaryIO, spool_path: Path, edges: Edges, parents: array[int]
    ) -> None:
        self.begun = False
        self._spool, self._spool_path = spool, spool_path
        self._names: dict[str, tuple[str, str]] = {}
        self._open: list[str] = []  # the domains of the open graphs, nodes and edges
        self._open_nodes: list[DrawnNode] = []
        self._finished: list[DrawnNode] = []
        self._edges, self._parents = edges, parents
        self._ends = ("", "")
        self._edge_texts: dict[str, str] = {}
        self._key = ""
        self._text: list[str] = []
        self._in_label = False
        self._decoder: _Base64Decoder | None = None
        self._numbers: dict[str, int] = {}
        self._unresolved: list[tuple[array[int], int, str]] = []

    def take_nodes(self) -> list[DrawnNode]:
        """Return the nodes that were finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def doctype(self, *_: object) -> None:
        """Reject a document type: it may define entities."""
        raise FormatError("it has a document type", hint="remove it; entities are not read")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Begin an element."""
        if not self.begun:
            if tag != f"{{{GRAPHML}}}graphml":
                raise FormatError(
                    "it is another kind of XML",
                    hint="name a .graphml file that export-graphml wrote",
                )
            self.begun = True
        if tag not in _READ_TAGS:  # most of a file is graphics
            return
        if tag in _DOMAINS:
            self._open.append(_DOMAINS[tag])
        if tag == _DATA:
            self._begin_data(attributes.get("key", ""))
        elif tag == _NODE:
            self._begin_node(attributes.get("id", ""))
        elif tag == _EDGE:
            self._edge_texts = {}
            self._ends = attributes.get("source", ""), attributes.get("target", "")
        elif tag == _KEY:
            domain, name = attributes.get("for", ""), attributes.get("attr.name", "")
            if name in _KEYS.get(domain, ()):
                self._names[attributes.get("id", "")] = (domain, name)
        elif tag == _LABEL and self._open_nodes and not self._open_nodes[-1].label:
            self._in_label = True
            self._text = []

    def _begin_node(self, identity: str) -> None:
        number = len(self._numbers)
        if not identity or self._numbers.setdefault(identity, number) != number:
            raise FormatError(f"two nodes have the id {identity!r}")
        self._parents.append(self._open_nodes[-1].number if self._open_nodes else -1)
        self._open_nodes.append(DrawnNode(identity, number, {}, []))

    def _begin_data(self, key: str) -> None:
        domain, name = self._names.get(key, ("", ""))
        if domain and self._open and self._open[-1] == domain:
            self._key = name
            self._text = []
            if name == "bytes":
                self._decoder = _Base64Decoder(self._spool)

    def data(self, text: str) -> None:
        """Take a part of an element's text."""
        if self._decoder is not None:
            self._decoder.feed(text)
        elif self._key or self._in_label:
            self._text.append(text)

    def end(self, tag: str) -> None:
        """Finish an element."""
        if tag not in _READ_TAGS:
            return
        if tag in _DOMAINS:
            self._open.pop()
        if tag == _DATA and self._key:
            self._end_data()
        elif tag == _NODE:
            self._finished.append(self._open_nodes.pop())
        elif tag == _EDGE:
            self._end_edge()
        elif tag == _LABEL and self._in_label:
            self._open_nodes[-1].label = "".join(self._text)
            self._in_label = False

    def _end_data(self) -> None:
        name, self._key = self._key, ""
        if self._decoder is not None:
            spans = self._decoder.finish()
            self._open_nodes[-1].embedded = [Span(self._spool_path, *span) for span in spans]
            self._decoder = None
            return
        text = "".join(self._text)
        if not text or (text.isspace() and "\n" in text):  # editors write keys without a value
            return
        if name == "format_version" and text.strip() != FORMAT_VERSION:
            raise FormatError(
                f"its format version is {text.strip()[:40]!r}, expected {FORMAT_VERSION}",
                hint="use the version of modelexport that wrote it",
            )
        if self._open[-1] == "node":
            self._open_nodes[-1].texts[name] = text
        elif self._open[-1] == "edge":
            self._edge_texts[name] = text

    def _end_edge(self) -> None:
        source, target = (self._numbers.get(identity, -1) for identity in self._ends)
        output, slot = (
            parse_number(self._edge_texts.get(key, "")) for key in ("source_output", "target_input")
        )
        self._edges.append(source, output, target, slot)
        columns = (self._edges.sources, self._edges.targets)
        for column, identity in zip(columns, self._ends, strict=True):
            if column[-1] < 0:  # an edge may stand before its nodes
                self._unresolved.append((column, len(column) - 1, identity))

    def resolve_edges(self) -> None:
        """Fill in the numbers of nodes that stand behind their edges."""
        for column, row, identity in self._unresolved:
            if identity not in self._numbers:
                raise FormatError(f"an edge ends at {identity!r}, which is not a node")
            column[row] = self._numbers[identity]

    def close(self) -> None:
        """End the document; the parser calls it after an error, too."""


def parse_number(text: str) -> int:
    """Return a number that is written in plain digits, or -1."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


class _Base64Decoder:
    """Decodes base64 text, with `;` after each span, into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begin = file.tell()
        self._left = ""
        self._spans: list[tuple[int, int]] = []

    def feed(self, text: str) -> None:
        """Decode a part of the text."""
        *ended, rest = "".join(text.split()).split(";")
        for part in ended:
            self._decode(self._left + part)
            self._left = ""
            end = self._file.tell()
            self._spans.append((self._begin, end - self._begin))
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
            raise FormatError("embedded values are not base64") from error
        try:
            self._file.write(values)
        except OSError as error:
            raise FileError(
                f"cannot write the values: {error.strerror}", hint="free some space"
            ) from error

    def finish(self) -> list[tuple[int, int]]:
        """Return the offset and length of every span."""
        if self._left:
            raise FormatError("embedded values are cut short")
        self._file.flush()
        return self._spans
