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
from modelexport.graphml.format import FORMAT_VERSION, GRAPHML, KEYS, WRITE_AGAIN, YED, checksum
from modelexport.graphml.values import Span
from modelexport.onnx_file.model_file import check_regular_file

_CHUNK = 1 << 16
_SHARE = 0.9
"""The part of an import's time that reading the XML takes, about."""
_NODE, _EDGE, _GRAPH, _DATA, _KEY = (
    f"{{{GRAPHML}}}{name}" for name in ("node", "edge", "graph", "data", "key")
)
_NODE_LABEL = f"{{{YED}}}NodeLabel"
_DOMAINS = {_GRAPH: "graph", _NODE: "node", _EDGE: "edge"}
_READ_TAGS = frozenset({*_DOMAINS, _DATA, _KEY, _NODE_LABEL})
_LABEL = "label"
_PASS_GRAPHML = "pass the file that export-graphml wrote"


class DrawnNode(msgspec.Struct, gc=False):
    """A node: the texts under our keys and its label, and the spans of its embedded values.

    `number` is its position in the file.
    """

    identity: str
    number: int
    texts: dict[str, str]
    embedded: list[Span]

    @property
    def title(self) -> str:
        """How to find the node in an editor: its name or label, and its id."""
        texts = self.texts
        name = texts.get("name") or texts.get("operator") or texts.get(_LABEL, "").strip()
        return f"{name!r} ({self.identity})" if name else self.identity

    def parse_message(self) -> bytes:
        """Return the key `onnx`, the serialized message of an element.

        Raises:
            FormatError: If it is missing, not base64, or not what was written.
        """
        if "onnx" not in self.texts:
            raise FormatError(
                f"the exact form of {self.title} is missing",
                hint=f"remove the node if it was added, else {WRITE_AGAIN}",
            )
        try:
            message = base64.b64decode("".join(self.texts["onnx"].split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise FormatError(f"the exact form of {self.title} is not base64") from error
        if self.texts.get("check", "") != checksum(message, self.texts.get("values", "")):
            raise FormatError(f"the exact form of {self.title} is damaged")
        return message

    def parse_index(self, key: str) -> int:
        """Return the number under a key, or raise a FormatError if there is none."""
        number = parse_number(self.texts.get(key, ""))
        if number < 0:
            raise FormatError(f"{self.title} has no {key}")
        return number


class Document:
    """The nodes of a GraphML file one by one, then the edges between them.

    It is the target of lxml's parser, which calls `doctype`, `start`, `data`, `end` and `close`.
    """

    def __init__(
        self, path: Path, spool: BinaryIO, on_progress: Callable[[float], None] | None = None
    ) -> None:
        """Prepare to read a file.

        Args:
            path: The GraphML file.
            spool: A file that embedded values are decoded into.
            on_progress: Called now and then with how much of the import is done.
        """
        self.path = path
        self.edges: Edges = Edges()
        """The edges by the numbers of nodes; an output or input is -1 where the file has none."""
        self.parents: array[int] = array("i")
        """The number of the node around each node, -1 for none."""
        self._spool = spool
        self._on_progress = on_progress or (lambda done: None)
        self._names: dict[tuple[str, str], str] = {}  # of keys, by their domains and ids
        # The domains and texts of the open graphs, nodes and edges; the first is the whole file.
        self._open: list[tuple[str, dict[str, str]]] = [("", {})]
        self._open_nodes: list[DrawnNode] = []
        self._finished: list[DrawnNode] = []
        self._ends = ("", "")
        self._key = ""  # whose text is read
        self._text: list[str] = []
        self._decoder: _Base64Decoder | None = None
        self._numbers: dict[str, int] = {}
        self._unresolved: list[tuple[int, str]] = []
        self._begun = False

    def nodes(self) -> Iterator[DrawnNode]:
        """Read the file; `edges` and `parents` are complete afterwards.

        Yields:
            Every node, inner ones before the one around them.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it is not GraphML that `export_graphml` wrote.
        """
        parser = etree.XMLParser(
            target=self,
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
                    yield from self._take_finished()
                    self._on_progress(_SHARE * file.tell() / size)
            parser.close()
        except etree.XMLSyntaxError as error:
            if not self._begun:
                raise FormatError(f"{self.path} is not GraphML", hint=_PASS_GRAPHML) from error
            where = f"in line {error.lineno}" if error.lineno else "at its end"
            raise FormatError(f"{self.path} is cut short or damaged {where}") from error
        except FileError:
            raise
        except IsADirectoryError as error:
            hint = "name the .graphml file in it"
            raise FileError(f"{self.path} is a folder", hint=hint) from error
        except OSError as error:
            message = f"cannot read {self.path}: {error.strerror}"
            raise FileError(message, hint="check the path") from error
        if not self._begun:
            raise FormatError("it is empty")
        yield from self._take_finished()
        self._resolve_edges()

    def _take_finished(self) -> list[DrawnNode]:
        finished, self._finished = self._finished, []
        return finished

    def doctype(self, *_: object) -> None:
        """Reject a document type: it may define entities."""
        raise FormatError("it has a document type", hint="remove it; entities are not read")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Begin an element."""
        if not self._begun:
            if tag != f"{{{GRAPHML}}}graphml":
                raise FormatError(f"{self.path} is not GraphML", hint=_PASS_GRAPHML)
            self._begun = True
        if tag not in _READ_TAGS:  # most of a file is graphics
            return
        if tag == _NODE:
            self._begin_node(attributes.get("id", ""))
        elif tag in _DOMAINS:
            self._open.append((_DOMAINS[tag], {}))
            if tag == _EDGE:
                self._ends = attributes.get("source", ""), attributes.get("target", "")
        elif tag == _KEY:
            domain, name = attributes.get("for", ""), attributes.get("attr.name", "")
            if name in KEYS.get(domain, ()):
                self._names[domain, attributes.get("id", "")] = name
        elif tag == _DATA:
            self._key = self._names.get((self._open[-1][0], attributes.get("key", "")), "")
            self._text = []
            self._decoder = _Base64Decoder(self._spool) if self._key == "bytes" else None
        elif self._open[-1][0] == "node" and not self._key and _LABEL not in self._open[-1][1]:
            self._key = _LABEL
            self._text = []

    def _begin_node(self, identity: str) -> None:
        number = len(self._numbers)
        if not identity or self._numbers.setdefault(identity, number) != number:
            raise FormatError(f"two nodes have the id {identity!r}")
        self.parents.append(self._open_nodes[-1].number if self._open_nodes else -1)
        node = DrawnNode(identity, number, {}, [])
        self._open_nodes.append(node)
        self._open.append(("node", node.texts))

    def data(self, text: str) -> None:
        """Take a part of an element's text."""
        if self._decoder is not None:
            self._decoder.feed(text)
        elif self._key:
            self._text.append(text)

    def end(self, tag: str) -> None:
        """Finish an element."""
        if tag in _DOMAINS:
            _, texts = self._open.pop()
            if tag == _NODE:
                self._finished.append(self._open_nodes.pop())
            elif tag == _EDGE:
                self._end_edge(texts)
        elif tag in (_DATA, _NODE_LABEL) and self._key:
            self._end_text()

    def _end_text(self) -> None:
        name, self._key = self._key, ""
        if self._decoder is not None:
            self._open_nodes[-1].embedded = self._decoder.finish()
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
        self._open[-1][1][name] = text

    def _end_edge(self, texts: dict[str, str]) -> None:
        source, target = (self._numbers.get(identity, -1) for identity in self._ends)
        for offset, identity in zip((0, 2), self._ends, strict=True):
            if identity not in self._numbers:  # an edge may stand before its nodes
                self._unresolved.append((len(self.edges.numbers) + offset, identity))
        keys = ("source_output", "target_input")
        output, slot = (parse_number(texts.get(key, "")) for key in keys)
        self.edges.append(source, output, target, slot)

    def _resolve_edges(self) -> None:
        """Fill in the numbers of nodes that stand behind their edges."""
        for position, identity in self._unresolved:
            if identity not in self._numbers:
                raise FormatError(f"an edge ends at {identity!r}, which is not a node")
            self.edges.numbers[position] = self._numbers[identity]

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
        self._spans: list[Span] = []

    def feed(self, text: str) -> None:
        """Decode a part of the text."""
        *ended, rest = "".join(text.split()).split(";")
        for part in ended:
            self._decode(self._left + part)
            self._left = ""
            end = self._file.tell()
            self._spans.append(Span(Path(self._file.name), self._begin, end - self._begin))
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
            message = f"cannot write the values: {error.strerror}"
            raise FileError(message, hint="free some space") from error

    def finish(self) -> list[Span]:
        """Return all spans."""
        if self._left:
            raise FormatError("embedded values are cut short")
        self._file.flush()
        return self._spans
