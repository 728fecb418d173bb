"""The parts of a model as a GraphML file holds them, gathered by what they say they are."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from google.protobuf.message import DecodeError

from modelexport.errors import FormatError
from modelexport.graph.flat import nested_graphs
from modelexport.graphml.dialect import (
    BODY,
    FUNCTION,
    MODEL,
    MODES,
    MODULE,
    OPERATOR,
    SPARSE,
    TERMINALS,
    WEIGHTS,
    WRITE_AGAIN,
)
from modelexport.graphml.read import Document, NodeData, exact_bytes, place, whole_number
from modelexport.graphml.store import Stored, part_check
from modelexport.graphml.tensors import FIELDS, Span
from modelexport.graphml.views import attributes_text, plain, says_the_same
from modelexport.onnx_file.model_file import is_file, is_inside, missing_data_error
from modelexport.tagged.records import UNREADABLE

READ_BACK = ("operator", "domain", "name", "attributes")
"""What may be edited on an operator."""
_GROUPS = (MODULE, BODY, FUNCTION)


class Checked(Span):
    """A stretch of a file whose bytes are known to be right once all are read."""

    def __init__(self, path: Path, offset: int, length: int, sha256: str, owner: str) -> None:
        super().__init__(path, offset, length)
        self.sha256 = sha256
        self._owner = owner

    def chunks(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for piece in super().chunks():
            digest.update(piece)
            yield piece
        if digest.hexdigest() != self.sha256:
            raise FormatError(
                f"the values of {self._owner} in {self.path.name} are not the ones that were written",
                hint="the checksum differs; write the GraphML again",
            )


class Part(msgspec.Struct, gc=False):
    """The exact form of an operator or weight, and where the values that it lacks are."""

    kind: str
    message: bytes
    identity: str
    scope: str
    stored: str = ""
    embedded: tuple[Span, ...] = ()
    edits: dict[str, str] | None = None

    @property
    def place(self) -> str:
        """How to find it in an editor."""
        if self.kind == OPERATOR:
            node = onnx.NodeProto.FromString(self.message)
            name = node.name or node.op_type
        elif self.kind == SPARSE:
            name = onnx.SparseTensorProto.FromString(self.message).values.name
        else:
            name = onnx.TensorProto.FromString(self.message).name
        return place(plain(name), self.identity)


class Parameters(msgspec.Struct, frozen=True):
    """Where the values of weights are, and how many weights there were."""

    mode: str
    file: str | None = None
    weights: int = 0


class End(NamedTuple):
    """An input, output or weight by its graph and its place in that graph's list."""

    kind: str
    scope: str
    position: int


class Parts:
    """Operators by their order, weights by graph and position, and what an editor added.

    Nodes go by their numbers: `orders` has those of operators, `ends` those of inputs, outputs and weights, `added`
    new operators, `notes` nodes that say nothing of ours, and `places` tells how to find any of the others.
    """

    def __init__(self, document: Document) -> None:
        self.path = document.path
        self.operators: dict[int, Part] = {}
        self.weights: dict[End, Part] = {}
        self.ends: dict[int, End] = {}
        self._ends: set[End] = set()
        self.orders: dict[int, int] = {}
        self.added: dict[int, NodeData] = {}
        self.places: dict[int, str] = {}
        self.told_names: dict[int, str] = {}
        self._around: dict[int, tuple[int, str | None]] = {}
        self._parents = array("q")
        self.notes: set[int] = set()
        self.card = NodeData("", {}, [])
        for number, node in document.nodes():
            self._take(number, node)
        self.edges = document.edges
        self._check_scopes()
        if "onnx" not in self.card.told:
            raise FormatError(
                f"{self.path} holds no model",
                hint="the node that describes the model is missing; " + WRITE_AGAIN,
            )
        if "format_version" not in self.card.told:
            raise FormatError(f"{self.path} does not say its format version", hint=WRITE_AGAIN)
        self.parameters = _parameters(self.path, self.card)
        self._loader = _Loader(self.path, self.parameters)

    def _take(self, number: int, node: NodeData) -> None:
        kind = node.told.get("kind", "")
        if kind == OPERATOR and "onnx" in node.told:
            self._take_operator(number, node)
        elif kind in TERMINALS:
            self._take_terminal(number, node, kind)
        elif kind == MODEL:
            if self.card.told:
                raise FormatError(
                    f"{self.path}: two nodes describe the model", hint="remove the copy"
                )
            self.card = node
        elif node.told.get("operator") and kind not in _GROUPS:
            self.added[number] = node
        if number in self.orders:
            self._parents.extend((number, node.parent))
        elif kind not in TERMINALS:
            if not kind and number not in self.added:
                self.notes.add(number)
            self.places[number] = node.place
            self._around[number] = (
                node.parent,
                node.told.get("scope", "") if kind in (BODY, FUNCTION) else None,
            )

    def scope_around(self, number: int) -> str:
        """The graph that a new operator was drawn in."""
        return self._scope(self.added[number].parent)

    def _scope(self, number: int) -> str:
        """The graph that what lies directly in a node belongs to."""
        while number >= 0:
            if number in self.orders:
                return self.operators[self.orders[number]].scope
            number, scope = self._around.get(number, (-1, None))
            if scope is not None:
                return scope
        return ""

    def _check_scopes(self) -> None:
        """An operator cannot be dragged into another graph: its edges would not follow."""
        known: dict[int, str] = {}
        for row in range(0, len(self._parents), 2):
            number, parent = self._parents[row], self._parents[row + 1]
            if parent not in known:
                known[parent] = self._scope(parent)
            part = self.operators[self.orders[number]]
            if part.scope != known[parent]:
                raise FormatError(
                    f"{self.path}: {part.place} was moved into or out of a body or function",
                    hint="move it back; a new node there can do its work",
                )

    def _take_operator(self, number: int, node: NodeData) -> None:
        order = _number(node, "execution_order")
        message = exact_bytes(node)
        proto = _parsed(onnx.NodeProto, message, node)
        part = _part(OPERATOR, message, node)
        if order in self.operators:
            if nested_graphs(proto.attribute):
                raise FormatError(
                    f"{node.place} is a copy",
                    hint="an operator with bodies cannot be copied; remove it",
                )
            self.added[number] = node
            return
        self.orders[number] = order
        told = {
            "operator": plain(proto.op_type),
            "domain": plain(proto.domain),
            "name": plain(proto.name),
            "attributes": attributes_text(proto.attribute),
        }
        changed = {
            name: node.told.get(name, "")
            for name in READ_BACK
            if node.told.get(name, "") != told[name]
        }
        if "attributes" in changed and says_the_same(
            changed["attributes"], proto, complete=not part.stored
        ):
            del changed["attributes"]
        if changed:
            part.edits = changed
        self.operators[order] = part

    def _take_terminal(self, number: int, node: NodeData, kind: str) -> None:
        end = End(kind, node.told.get("scope", ""), _number(node, "position"))
        if end in self._ends:
            raise FormatError(
                f"{self.path}: {node.place} stands there twice", hint="remove the copy"
            )
        self.ends[number] = end
        self._ends.add(end)
        self.told_names[number] = node.told.get("name", "")
        if kind not in WEIGHTS:
            self.places[number] = node.place
            return
        if "onnx" not in node.told:
            raise FormatError(
                f"{self.path}: the exact form of {node.place} is missing", hint=WRITE_AGAIN
            )
        message = exact_bytes(node)
        _parsed(onnx.SparseTensorProto if kind == SPARSE else onnx.TensorProto, message, node)
        self.weights[end] = _part(kind, message, node)

    def copy_of(self, node: NodeData) -> Part:
        """The part that a copied node holds."""
        return _part(OPERATOR, exact_bytes(node), node)

    def values(self, part: Part) -> list[tuple[str, str, Checked]]:
        """The values that a part lacks: place of the tensor, field, bytes."""
        return self._loader.values(part) if part.stored or part.embedded else []


def _part(kind: str, message: bytes, node: NodeData) -> Part:
    told = node.told
    check_part(message, node)
    return Part(
        kind,
        message,
        node.identity,
        told.get("scope", ""),
        told.get("values", ""),
        tuple(node.embedded),
    )


def check_part(message: bytes, node: NodeData) -> None:
    """Whether the exact form of a part is the one that was written, and so is what it says of its values."""
    if node.told.get("check", "") != part_check(message, node.told.get("values", "")):
        raise FormatError(f"the exact form of {node.place} is damaged", hint=WRITE_AGAIN)


def _parameters(path: Path, card: NodeData) -> Parameters:
    try:
        parameters = msgspec.json.decode(card.told.get("parameters", ""), type=Parameters)
    except UNREADABLE as error:
        raise FormatError(f"{path} does not say where its weights are", hint=WRITE_AGAIN) from error
    if parameters.mode not in MODES:
        raise FormatError(
            f"{path}: there is no parameter mode {parameters.mode!r}", hint=WRITE_AGAIN
        )
    return parameters


def _number(node: NodeData, key: str) -> int:
    number = whole_number(node.told.get(key, ""))
    if number < 0:
        raise FormatError(f"{node.place} has no {key}", hint=WRITE_AGAIN)
    return number


def _parsed(kind: Any, message: bytes, node: NodeData) -> Any:
    try:
        proto = kind.FromString(message)
    except DecodeError as error:
        raise FormatError(f"the exact form of {node.place} is damaged", hint=WRITE_AGAIN) from error
    return proto


class _Loader:
    """Finds the bytes of weights where the GraphML says that they are."""

    def __init__(self, path: Path, parameters: Parameters) -> None:
        self._path = path
        self._folder = path.parent
        self._parameters = parameters
        self._sizes: dict[str, int] = {}

    def values(self, part: Part) -> list[tuple[str, str, Checked]]:
        try:
            stored = msgspec.json.decode(part.stored, type=list[Stored])
        except UNREADABLE as error:
            raise FormatError(
                f"what is said of the values of {part.place} is damaged", hint=WRITE_AGAIN
            ) from error
        found = []
        if self._parameters.mode == "embedded" and len(part.embedded) != len(stored):
            raise FormatError(
                f"the embedded values of {part.place} are cut short", hint=WRITE_AGAIN
            )
        for number, entry in enumerate(stored):
            if entry.field not in FIELDS:
                raise FormatError(f"{part.place} has values of an unknown kind", hint=WRITE_AGAIN)
            if self._parameters.mode == "embedded":
                span = part.embedded[number]
                if span.length != entry.length:
                    raise FormatError(
                        f"the embedded values of {part.place} are cut short", hint=WRITE_AGAIN
                    )
                checked = Checked(span.path, span.offset, span.length, entry.sha256, part.place)
            else:
                checked = self._in_file(entry, part)
            found.append((entry.at, entry.field, checked))
        return found

    def _in_file(self, entry: Stored, part: Part) -> Checked:
        name = entry.file if self._parameters.mode == "reference" else self._parameters.file
        if name is None or entry.offset is None:
            raise FormatError(
                f"nothing says where the values of {part.place} are", hint=WRITE_AGAIN
            )
        if name not in self._sizes:
            self._sizes[name] = self._size(name)
        if entry.offset < 0 or entry.length < 0 or entry.offset + entry.length > self._sizes[name]:
            raise FormatError(
                f"{self._folder / name} is too short for the values of {part.place}",
                hint="it is cut short or another file; " + WRITE_AGAIN,
            )
        return Checked(self._folder / name, entry.offset, entry.length, entry.sha256, part.place)

    def _size(self, name: str) -> int:
        """The size of a file in the GraphML's folder or below it; one that lies elsewhere is refused."""
        path = self._folder / name
        if not is_inside(name) or (
            is_file(path) and not path.resolve().is_relative_to(self._folder.resolve())
        ):
            raise FormatError(
                f"the data file {name!r} lies outside the GraphML's folder",
                hint="only data files in the GraphML's folder, or below it, are followed",
            )
        if not is_file(path):
            raise missing_data_error(self._path, name)
        return path.stat().st_size
