"""The parts of a model as a GraphML file holds them, and the model that they make up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.graph.flat import StoredNodes, nested_graphs
from modelexport.graphml.elements import Edges
from modelexport.graphml.format import (
    INITIALIZERS,
    TERMINALS,
    WRITE_AGAIN,
    Kind,
    Parameters,
    escape_name,
    function_scope,
    subgraph_scope,
)
from modelexport.graphml.messages import SPARSE_FIELD, TensorMessage, join, tensors_in
from modelexport.graphml.read import Document, DrawnNode
from modelexport.graphml.text import attributes_text
from modelexport.graphml.values import EXTERNAL, Section, Span, ValueFiles, Values, read_chunks
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import declared_span, external_location
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import UNREADABLE

_LONGEST_TEXT = 60
_CLASSES: dict[str, Any] = {
    Kind.OPERATOR: onnx.NodeProto,
    Kind.INITIALIZER: TensorProto,
    Kind.SPARSE: onnx.SparseTensorProto,
}


class Part(msgspec.Struct, gc=False):
    """The message of an operator or initializer, and where the values that it lacks are.

    `number` and `title` are those of its node, `stored` is the key `values`.
    """

    kind: str
    message: bytes
    number: int
    title: str
    scope: str
    stored: str
    embedded: tuple[Span, ...]

    def parse(self) -> TensorMessage:
        """Parse the message."""
        message: TensorMessage = _CLASSES[self.kind]()
        message.ParseFromString(self.message)
        return message


class TerminalKey(NamedTuple):
    """An input, initializer or output by its graph and its position there."""

    kind: str
    scope: str
    position: int


class Parts:
    """The operators by their order and the initializers of a GraphML file.

    `terminals` has the number and the drawn name of every input, initializer and output, `notes`
    the numbers of nodes without any text of ours, and `attribute_texts` those attributes, by order,
    that the message alone does not confirm.
    """

    def __init__(self, document: Document) -> None:
        """Read a GraphML file.

        Raises:
            FileError: If the file cannot be read.
            FormatError: If it is damaged, or an operator was added, copied or changed.
        """
        self.operators: dict[int, Part] = {}
        self.initializers: dict[TerminalKey, Part] = {}
        self.terminals: dict[TerminalKey, tuple[int, str]] = {}
        self._titles: dict[int, str] = {}  # of nodes that are no parts
        self.attribute_texts: dict[int, str] = {}
        self.notes: set[int] = set()
        self._scopes: dict[int, str] = {}  # of groups that are subgraphs or functions
        self.model_node: DrawnNode = DrawnNode("", -1, {}, [])
        for node in document.nodes():
            self._add_node(node)
        self.edges: Edges = document.edges
        self._check_scopes(document.parents)
        path = document.path
        if "onnx" not in self.model_node.texts:
            raise FormatError(
                f"{path} holds no model",
                hint=f"the node that describes the model is missing; {WRITE_AGAIN}",
            )
        if "format_version" not in self.model_node.texts:
            raise FormatError(f"{path} has no format version")
        self.frame: bytes = self.model_node.parse_message()
        try:
            self.parameters: Parameters = msgspec.json.decode(
                self.model_node.texts.get("parameters", ""), type=Parameters
            )
        except UNREADABLE as error:
            raise FormatError(f"{path} does not say where its initializers are") from error
        if self.parameters.mode not in PARAMETER_MODES:
            raise FormatError(f"{path}: there is no parameter mode {self.parameters.mode!r}")
        self.files: ValueFiles = ValueFiles(path, self.parameters)

    def title(self, number: int) -> str:
        """Return how to find the node with a number in an editor."""
        if number in self._titles:
            return self._titles[number]
        parts = (*self.operators.values(), *self.initializers.values())
        return next(part.title for part in parts if part.number == number)

    def _add_node(self, node: DrawnNode) -> None:
        kind = node.texts.get("kind", "")
        if kind != Kind.OPERATOR and kind not in INITIALIZERS:
            self._titles[node.number] = node.title
        if kind == Kind.OPERATOR:
            self._add_operator(node)
        elif kind in TERMINALS:
            self._add_terminal(node, kind)
        elif kind == Kind.MODEL:
            if self.model_node.texts:
                raise FormatError(f"{node.title} was added: it is a copy", hint="remove the copy")
            self.model_node = node
        elif kind in (Kind.SUBGRAPH, Kind.FUNCTION):
            self._scopes[node.number] = node.texts.get("scope", "")
        elif kind != Kind.MODULE and node.texts.get("operator"):
            raise changed_error(f"{node.title} was added")
        elif not kind:
            self.notes.add(node.number)

    def _add_operator(self, node: DrawnNode) -> None:
        part = _parse_part(node, Kind.OPERATOR)
        order = node.parse_index("execution_order")
        if order in self.operators:
            original = self.operators[order].title
            raise changed_error(f"{part.title} was added: it is a copy of {original}")
        proto = onnx.NodeProto.FromString(part.message)
        expected = {"operator": proto.op_type, "domain": proto.domain, "name": proto.name}
        for key, value in expected.items():
            check_text(part.title, key, escape_name(value), node.texts.get(key, ""))
        attributes = node.texts.get("attributes", "")
        if attributes != attributes_text(proto.attribute):  # maybe for lack of values
            self.attribute_texts[order] = attributes
        self.operators[order] = part

    def _add_terminal(self, node: DrawnNode, kind: str) -> None:
        key = TerminalKey(kind, node.texts.get("scope", ""), node.parse_index("position"))
        if key in self.terminals:
            raise FormatError(f"{node.title} was added: it is a copy", hint="remove the copy")
        self.terminals[key] = node.number, node.texts.get("name", "")
        if kind in INITIALIZERS:
            self.initializers[key] = _parse_part(node, kind)

    def _check_scopes(self, parents: Sequence[int]) -> None:
        """Reject operators that were dragged into another graph."""
        known: dict[int, str] = {}
        for part in self.operators.values():
            parent = parents[part.number]
            if parent not in known:
                around = parent
                while around >= 0 and around not in self._scopes:
                    around = parents[around]
                known[parent] = self._scopes.get(around, "")
            if part.scope != known[parent]:
                raise FormatError(
                    f"{part.title} was moved into or out of a subgraph or function",
                    hint="move it back",
                )


def _parse_part(node: DrawnNode, kind: str) -> Part:
    """Return the part that a node holds."""
    scope, stored = node.texts.get("scope", ""), node.texts.get("values", "")
    message = node.parse_message()
    part = Part(kind, message, node.number, node.title, scope, stored, tuple(node.embedded))
    try:
        part.parse()
    except DecodeError as error:
        raise FormatError(f"the exact form of {node.title} is damaged") from error
    return part


def changed_error(message: str) -> FormatError:
    """Return the error for a changed structure."""
    hint = "undo the change; import-onnx restores the exported model and applies no edits"
    return FormatError(message, hint=hint)


def check_text(title: str, key: str, expected: str, got: str) -> None:
    """Raise a FormatError if the text under a key of the node with a title was changed."""
    if got != expected:
        before, now = (
            text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
            for text in (expected, got)
        )
        raise changed_error(f"{title}: the {key} changed: expected {before!r}, got {now!r}")


class ExternalValues(NamedTuple):
    """Values that the model has in a data file of its own: the file, the offset, the bytes."""

    location: str
    offset: int
    values: Span


class Assembly:
    """A model that keeps the nodes and initializers of its main graph in serialized form.

    `external` lists the values that go into data files of the model.
    """

    def __init__(self, parts: Parts) -> None:
        """Assemble the model of a GraphML file.

        Raises:
            FileError: If a data file is missing.
            FormatError: If a part is damaged, or belongs to a graph that is not there.
        """
        self.parts = parts
        self.external: list[ExternalValues] = []
        self._frame = parts.frame
        frame = onnx.ModelProto.FromString(self._frame)
        # What each graph holds, by its scope: operators by their order, and initializers.
        self._inside: dict[str, list[int]] = {}
        for order in sorted(parts.operators):
            self._inside.setdefault(parts.operators[order].scope, []).append(order)
        self._tensors: dict[str, list[Part]] = {}
        for key in sorted(parts.initializers):
            self._tensors.setdefault(key.scope, []).append(parts.initializers[key])
        messages: dict[int, bytes] = {}
        for order in sorted(parts.operators, reverse=True):  # inner operators first
            messages[order] = self._complete_operator(order, messages)
        self._nodes = [messages[order] for order in self._inside.pop("", ())]
        for position, function in enumerate(frame.functions):
            self._add_nodes(function, function_scope(position), messages)
        if frame.functions:
            self._frame = frame.SerializeToString()
        main = self._tensors.pop("", [])
        self._dense = [part for part in main if part.kind == Kind.INITIALIZER]
        self._initializers = list(map(self._join_initializer, self._dense))
        self._sparse: list[list[Section]] = [
            [self._complete(part)] for part in main if part.kind == Kind.SPARSE
        ]
        left = [parts.operators[order] for orders in self._inside.values() for order in orders]
        for part in [*left, *chain(*self._tensors.values())]:
            raise FormatError(
                f"{part.title} belongs to the graph {part.scope!r}, which is not there",
                hint="the node that it was a part of was removed",
            )

    def _complete_operator(self, order: int, messages: dict[int, bytes]) -> bytes:
        """Return the message of an operator with its values and what is in its subgraphs."""
        message = self._complete(self.parts.operators[order])
        node = onnx.NodeProto.FromString(message)
        graphs = nested_graphs(node.attribute)
        for position, (_, graph) in enumerate(graphs):
            scope = subgraph_scope(order, position)
            self._add_nodes(graph, scope, messages)
            for part in self._tensors.pop(scope, ()):
                dense = part.kind == Kind.INITIALIZER
                tensors = graph.initializer if dense else graph.sparse_initializer
                tensors.add().ParseFromString(self._complete(part))
        return node.SerializeToString() if graphs else message

    def _add_nodes(
        self,
        graph: onnx.GraphProto | onnx.FunctionProto,
        scope: str,
        messages: dict[int, bytes],
    ) -> None:
        for order in self._inside.pop(scope, ()):
            if order not in messages:  # its scope names an operator behind it
                raise FormatError(f"{self.parts.operators[order].title} lies in itself")
            graph.node.add().ParseFromString(messages[order])

    def _complete(self, part: Part) -> bytes:
        """Return the message of a part with all its values."""
        if not part.stored:
            return part.message
        message = part.parse()
        for tensor, sections in self._join_tensors(part, message):
            tensor.ParseFromString(b"".join(read_chunks(sections)))
        return bytes(message.SerializeToString())

    def _join_initializer(self, part: Part) -> list[Section]:
        """Return an initializer of the main graph in sections; its values may be large."""
        joined = [sections for _, sections in self._join_tensors(part, part.parse())]
        return joined[0] if joined else [part.message]

    def _join_tensors(
        self, part: Part, message: TensorMessage
    ) -> Iterator[tuple[TensorProto, list[Section]]]:
        """Iterate over the tensors whose values are stored elsewhere, and their complete forms."""
        tensors = dict(tensors_in(message))
        for at, values in self.parts.files.find(part.stored, part.embedded, part.title).items():
            if at not in tensors:
                raise FormatError(f"{part.title} has no tensor {at!r}")
            # The message may have its fields in another order than protobuf writes them.
            rest = tensors[at].SerializeToString() if at else part.message
            yield tensors[at], join(rest, self._note_external(tensors[at], values, part))

    def _note_external(
        self, tensor: TensorProto, values: Mapping[str, Span], part: Part
    ) -> dict[str, Values]:
        """Return the values that are part of the tensor itself; note those of a data file."""
        outside = values.get(EXTERNAL)
        if outside is not None:
            location = external_location(tensor)
            if location is None:
                raise FormatError(f"nothing says where the values of {part.title} go")
            offset, length = declared_span(tensor, location)
            if length is not None and length != len(outside):
                raise FormatError(
                    f"the values of {part.title} are not as long as declared: "
                    f"expected {length} bytes, got {len(outside)}"
                )
            self.external.append(ExternalValues(str(PurePosixPath(location)), offset, outside))
        return {field: span for field, span in values.items() if field != EXTERNAL}

    def sections(self) -> list[Section]:
        """Return the whole model, large values as spans of the files that hold them."""
        return self._join_graph([[node] for node in self._nodes], self._initializers)

    def parse_without_nodes(self) -> onnx.ModelProto:
        """Parse the model without the main graph's nodes and without values of initializers."""
        heads: list[list[Section]] = [[part.message] for part in self._dense]
        model = onnx.ModelProto()
        model.ParseFromString(b"".join(read_chunks(self._join_graph([], heads))))
        return model

    def stored_nodes(self) -> StoredNodes:
        """Return the nodes of the main graph, each parsed when it is needed."""
        nodes = self._nodes
        return StoredNodes(len(nodes), lambda index: onnx.NodeProto.FromString(nodes[index]))

    def _join_graph(
        self, nodes: Iterable[Sequence[Section]], initializers: Iterable[Sequence[Section]]
    ) -> list[Section]:
        """Put nodes and initializers of the main graph where a protobuf library writes them."""
        added = {
            wire.GRAPH_NODE: nodes,
            wire.GRAPH_INITIALIZER: initializers,
            SPARSE_FIELD: self._sparse,
        }
        sections: list[Section] = []
        for field in wire.fields(self._frame, 0, len(self._frame)):
            if field.number != wire.MODEL_GRAPH:
                sections.append(self._frame[field.start : field.end])
                continue
            rest = self._frame[field.payload : field.end]
            graph: list[Section] = []
            for number, messages in added.items():
                offset = wire.insertion_offset(rest, number)
                graph.append(rest[:offset])
                rest = rest[offset:]
                for message in messages:
                    graph += _delimit(number, message)
            sections += _delimit(wire.MODEL_GRAPH, [*graph, rest])
            added = {}  # a file may have several graphs, which protobuf merges
        return sections


def _delimit(number: int, sections: Sequence[Section]) -> list[Section]:
    """Return a length-delimited field around sections."""
    return [wire.header(number, sum(map(len, sections))), *sections]
