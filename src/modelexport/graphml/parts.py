"""The parts of a model as a GraphML file holds them, collected by the texts of their nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from google.protobuf.message import DecodeError

from modelexport.errors import FormatError
from modelexport.graphml.format import (
    FUNCTION,
    INITIALIZERS,
    MODEL,
    MODULE,
    OPERATOR,
    SPARSE,
    SUBGRAPH,
    TERMINALS,
    WRITE_AGAIN,
    Parameters,
    StoredValues,
    checksum,
    escape_name,
)
from modelexport.graphml.read import Document, DrawnNode, node_title, parse_number
from modelexport.graphml.tensors import FIELDS, Span
from modelexport.graphml.text import attributes_text
from modelexport.onnx_file.model_file import is_file, is_inside, missing_data_error
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import UNREADABLE

UNDO = "undo the change; import-onnx restores the exported model and applies no edits"
"""The hint for a changed structure."""
_LONGEST_TEXT = 60


class CheckedSpan(Span):
    """A span of a file whose bytes are compared with a digest as they are read."""

    def __init__(self, path: Path, offset: int, length: int, sha256: str, owner: str) -> None:
        super().__init__(path, offset, length)
        self.sha256 = sha256
        self._owner = owner

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes in chunks.

        Raises:
            FormatError: If the digest differs at the end.
        """
        digest = hashlib.sha256()
        for chunk in super().chunks():
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != self.sha256:
            raise FormatError(
                f"the values of {self._owner} in {self.path.name} are not the ones that were "
                "written",
                hint="the checksum differs; write the GraphML again",
            )


class Part(msgspec.Struct, gc=False):
    """The message of an operator or initializer, and where the values that it lacks are."""

    kind: str
    message: bytes
    identity: str
    scope: str
    stored: str
    embedded: tuple[Span, ...]

    @property
    def title(self) -> str:
        """How to find its node in an editor."""
        if self.kind == OPERATOR:
            node = onnx.NodeProto.FromString(self.message)
            name = node.name or node.op_type
        elif self.kind == SPARSE:
            name = onnx.SparseTensorProto.FromString(self.message).values.name
        else:
            name = onnx.TensorProto.FromString(self.message).name
        return node_title(escape_name(name), self.identity)


class TerminalKey(NamedTuple):
    """An input, initializer or output by its graph and its position there."""

    kind: str
    scope: str
    position: int


class Parts:
    """The operators by their order and the initializers of a GraphML file.

    `operator_numbers` and `terminal_numbers` have the numbers of their nodes, `notes` those of
    nodes without any text of ours. `names` has the drawn names of terminals, and
    `attribute_texts` those attributes, by order, that the message alone does not confirm.
    """

    def __init__(self, document: Document) -> None:
        """Read a document.

        Args:
            document: The GraphML file.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it is damaged, or an operator was added, copied or changed.
        """
        self.path = document.path
        self.operators: dict[int, Part] = {}
        self.initializers: dict[TerminalKey, Part] = {}
        self.operator_numbers: dict[int, int] = {}
        self.terminal_numbers: dict[TerminalKey, int] = {}
        self.names: dict[TerminalKey, str] = {}
        self.attribute_texts: dict[int, str] = {}
        self.notes: set[int] = set()
        self._titles: dict[int, str] = {}
        self._scopes: dict[int, str] = {}  # of groups that are subgraphs or functions
        self.card = DrawnNode("", -1, {}, [])
        for node in document.nodes():
            self._add_node(node)
        self.edges = document.edges
        self._check_scopes(document)
        if "onnx" not in self.card.texts:
            raise FormatError(
                f"{self.path} holds no model",
                hint="the node that describes the model is missing; " + WRITE_AGAIN,
            )
        if "format_version" not in self.card.texts:
            raise FormatError(f"{self.path} has no format version", hint=WRITE_AGAIN)
        self.frame = self.card.parse_message()
        _check_message(self.frame, self.card)
        self.parameters = _parse_parameters(self.path, self.card)
        self._files = _ValueFiles(self.path, self.parameters)

    def title(self, number: int) -> str:
        """Return how to find the node with a number in an editor."""
        if number in self._titles:
            return self._titles[number]
        # Of operators and initializers no titles are kept: only errors need them.
        owners = [(self.operator_numbers[order], part) for order, part in self.operators.items()]
        owners += [(self.terminal_numbers[key], part) for key, part in self.initializers.items()]
        return dict(owners)[number].title

    def values(self, part: Part) -> dict[str, dict[str, CheckedSpan]]:
        """Find the values that a part lacks.

        Args:
            part: The part.

        Returns:
            The values by the path of their tensor and the name of their field.

        Raises:
            FileError: If a data file is missing.
            FormatError: If the record of the values is damaged, or a file too short.
        """
        found: dict[str, dict[str, CheckedSpan]] = {}
        if part.stored or part.embedded:
            for at, field, span in self._files.values(part):
                found.setdefault(at, {})[field] = span
        return found

    def _add_node(self, node: DrawnNode) -> None:
        kind = node.texts.get("kind", "")
        if kind != OPERATOR and kind not in INITIALIZERS:
            self._titles[node.number] = node.title
        if kind == OPERATOR:
            self._add_operator(node)
        elif kind in TERMINALS:
            self._add_terminal(node, kind)
        elif kind == MODEL:
            if self.card.texts:
                raise FormatError(f"{node.title} was added: it is a copy", hint="remove the copy")
            self.card = node
        elif kind in (SUBGRAPH, FUNCTION):
            self._scopes[node.number] = node.texts.get("scope", "")
        elif kind != MODULE and node.texts.get("operator"):
            raise FormatError(f"{node.title} was added", hint=UNDO)
        elif not kind:
            self.notes.add(node.number)

    def _add_operator(self, node: DrawnNode) -> None:
        part = _parse_part(node, OPERATOR, onnx.NodeProto)
        order = _parse_index(node, "execution_order")
        if order in self.operators:
            raise FormatError(
                f"{node.title} was added: it is a copy of {self.operators[order].title}", hint=UNDO
            )
        proto = onnx.NodeProto.FromString(part.message)
        expected = {"operator": proto.op_type, "domain": proto.domain, "name": proto.name}
        for key, value in expected.items():
            check_text(node.title, key, escape_name(value), node.texts.get(key, ""))
        attributes = node.texts.get("attributes", "")
        if attributes != attributes_text(proto.attribute):  # maybe for lack of values
            self.attribute_texts[order] = attributes
        self.operators[order] = part
        self.operator_numbers[order] = node.number

    def _add_terminal(self, node: DrawnNode, kind: str) -> None:
        key = TerminalKey(kind, node.texts.get("scope", ""), _parse_index(node, "position"))
        if key in self.terminal_numbers:
            raise FormatError(f"{node.title} was added: it is a copy", hint="remove the copy")
        self.terminal_numbers[key] = node.number
        self.names[key] = node.texts.get("name", "")
        if kind in INITIALIZERS:
            message = onnx.SparseTensorProto if kind == SPARSE else onnx.TensorProto
            self.initializers[key] = _parse_part(node, kind, message)

    def _check_scopes(self, document: Document) -> None:
        """Reject operators that were dragged into another graph."""
        known: dict[int, str] = {}
        for order, number in self.operator_numbers.items():
            parent = document.parents[number]
            if parent not in known:
                around = parent
                while around >= 0 and around not in self._scopes:
                    around = document.parents[around]
                known[parent] = self._scopes.get(around, "")
            if self.operators[order].scope != known[parent]:
                title = self.operators[order].title
                raise FormatError(
                    f"{title} was moved into or out of a subgraph or function", hint="move it back"
                )


def check_text(title: str, key: str, expected: str, got: str) -> None:
    """Raise a FormatError if a node's text under a key was changed.

    Args:
        title: How to find the node in an editor.
        key: The key.
        expected: The text that was exported.
        got: The text in the file.
    """
    if got != expected:
        texts = [
            text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
            for text in (expected, got)
        ]
        raise FormatError(
            f"{title}: the {key} changed: expected {texts[0]!r}, got {texts[1]!r}", hint=UNDO
        )


def _parse_part(node: DrawnNode, kind: str, message_class: Any) -> Part:
    """Return the part that a node holds."""
    if "onnx" not in node.texts:
        raise FormatError(
            f"the exact form of {node.title} is missing",
            hint=f"remove the node if it was added, else {WRITE_AGAIN}",
        )
    message = node.parse_message()
    _check_message(message, node)
    try:
        message_class.FromString(message)
    except DecodeError as error:
        raise _damaged(node) from error
    texts = node.texts
    return Part(
        kind,
        message,
        node.identity,
        texts.get("scope", ""),
        texts.get("values", ""),
        tuple(node.embedded),
    )


def _check_message(message: bytes, node: DrawnNode) -> None:
    if node.texts.get("check", "") != checksum(message, node.texts.get("values", "")):
        raise _damaged(node)


def _damaged(node: DrawnNode) -> FormatError:
    return FormatError(f"the exact form of {node.title} is damaged", hint=WRITE_AGAIN)


def _parse_parameters(path: Path, card: DrawnNode) -> Parameters:
    try:
        parameters = msgspec.json.decode(card.texts.get("parameters", ""), type=Parameters)
    except UNREADABLE as error:
        raise FormatError(
            f"{path} does not say where its initializers are", hint=WRITE_AGAIN
        ) from error
    if parameters.mode not in PARAMETER_MODES:
        raise FormatError(
            f"{path}: there is no parameter mode {parameters.mode!r}", hint=WRITE_AGAIN
        )
    return parameters


def _parse_index(node: DrawnNode, key: str) -> int:
    number = parse_number(node.texts.get(key, ""))
    if number < 0:
        raise FormatError(f"{node.title} has no {key}", hint=WRITE_AGAIN)
    return number


class _ValueFiles:
    """Finds the values of parts where the GraphML says that they are."""

    def __init__(self, path: Path, parameters: Parameters) -> None:
        self._path = path
        self._folder = path.parent
        self._parameters = parameters
        self._sizes: dict[str, int] = {}

    def values(self, part: Part) -> Iterator[tuple[str, str, CheckedSpan]]:
        """Iterate over the values of a part: path of the tensor, field, span."""
        try:
            stored = msgspec.json.decode(part.stored, type=list[StoredValues])
        except UNREADABLE as error:
            raise FormatError(
                f"the record of the values of {part.title} is damaged", hint=WRITE_AGAIN
            ) from error
        embedded = self._parameters.mode == "embedded"
        lengths = [entry.length for entry in stored]
        if embedded and [span.length for span in part.embedded] != lengths:
            raise FormatError(
                f"the embedded values of {part.title} are cut short", hint=WRITE_AGAIN
            )
        for number, entry in enumerate(stored):
            if entry.field not in FIELDS:
                raise FormatError(
                    f"{part.title} has values of an unknown kind {entry.field!r}", hint=WRITE_AGAIN
                )
            span = part.embedded[number] if embedded else self._find(entry, part)
            checked = CheckedSpan(span.path, span.offset, span.length, entry.sha256, part.title)
            yield entry.at, entry.field, checked

    def _find(self, entry: StoredValues, part: Part) -> Span:
        name = entry.file if self._parameters.mode == "reference" else self._parameters.file
        if name is None or entry.offset is None:
            raise FormatError(
                f"nothing says where the values of {part.title} are", hint=WRITE_AGAIN
            )
        if name not in self._sizes:
            self._sizes[name] = self._size(name)
        if entry.offset < 0 or entry.length < 0 or entry.offset + entry.length > self._sizes[name]:
            raise FormatError(
                f"{self._folder / name} is too short for the values of {part.title}",
                hint="it is cut short or another file; " + WRITE_AGAIN,
            )
        return Span(self._folder / name, entry.offset, entry.length)

    def _size(self, name: str) -> int:
        """Return the size of a file in the GraphML's folder or below it; reject any other."""
        path = self._folder / name
        exists = is_file(path)
        if not is_inside(name) or (
            exists and not path.resolve().is_relative_to(self._folder.resolve())
        ):
            raise FormatError(
                f"the data file {name!r} lies outside the GraphML's folder",
                hint="only data files in the GraphML's folder, or below it, are followed",
            )
        if not exists:
            raise missing_data_error(self._path, name)
        return path.stat().st_size
