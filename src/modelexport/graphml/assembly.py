"""Puts the parts of a GraphML file together: once without values, to look at, and once as pieces to write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.graph.flat import StoredNodes, nested_graphs
from modelexport.graphml.dialect import INITIALIZER, SPARSE, WRITE_AGAIN
from modelexport.graphml.parts import Checked, End, Part, Parts, check_part
from modelexport.graphml.read import exact_bytes
from modelexport.graphml.tensors import EXTERNAL, Piece, Values, chunks, joined, tensors_in
from modelexport.graphml.wiring import function_scope
from modelexport.onnx_file import wire
from modelexport.onnx_file.initializer_data import declared_span
from modelexport.onnx_file.model_file import external_location

_GRAPH = 7
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15
BODY_SCOPE = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


class ExternalValues(NamedTuple):
    """Values that the model has in a data file of its own: which file, where in it, and the bytes."""

    location: str
    offset: int
    values: Checked


class Assembly:
    """A model put together. `frame` is everything but the operators and weights of the main graph."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.orders = sorted(parts.operators)
        self.rank = {order: place for place, order in enumerate(self.orders)}
        self.external: list[ExternalValues] = []
        self.frame = exact_bytes(parts.card)
        check_part(self.frame, parts.card)
        try:
            frame = onnx.ModelProto.FromString(self.frame)
        except DecodeError as error:
            raise FormatError(f"the model in {parts.path} is damaged", hint=WRITE_AGAIN) from error
        self._functions = {
            function_scope(place): function for place, function in enumerate(frame.functions)
        }
        self._nested: dict[int, dict[int, list[int | End]]] = {}
        self._in_functions: dict[str, list[int]] = {}
        main = self._sort_by_graph()
        messages = self._completed()
        self.nodes = [messages[order] for order in main]
        if self._functions:
            for key, orders in self._in_functions.items():
                self._functions[key].node.extend(
                    onnx.NodeProto.FromString(messages[order]) for order in orders
                )
            self.frame = frame.SerializeToString()
        self.initializers = [self._weight(end) for end in self._main(INITIALIZER)]
        self.sparse = [
            self.in_memory(parts.weights[end], onnx.SparseTensorProto())
            for end in self._main(SPARSE)
        ]

    def _main(self, kind: str) -> list[End]:
        return sorted(end for end in self.parts.weights if end.kind == kind and not end.scope)

    def _sort_by_graph(self) -> list[int]:
        """The operators of the main graph; all others, and weights, are noted with what they lie in."""
        main = []
        for order in self.orders:
            part = self.parts.operators[order]
            if not part.scope:
                main.append(order)
            elif part.scope in self._functions:
                self._in_functions.setdefault(part.scope, []).append(order)
            else:
                self._note(part, order)
        for end in sorted(self.parts.weights):
            if end.scope:
                self._note(self.parts.weights[end], end)
        return main

    def _note(self, part: Part, member: int | End) -> None:
        found = BODY_SCOPE.fullmatch(part.scope)
        if found is None or int(found[1]) not in self.parts.operators or int(found[1]) == member:
            raise FormatError(
                f"{part.place} belongs to the graph {part.scope!r}, which is not there",
                hint="the node that it was a part of is missing",
            )
        self._nested.setdefault(int(found[1]), {}).setdefault(int(found[2]), []).append(member)

    def _completed(self) -> dict[int, bytes]:
        """The operators with the values and bodies that they lack, inner ones first."""
        messages: dict[int, bytes] = {}
        for order in reversed(self.orders):
            part = self.parts.operators[order]
            bodies = self._nested.get(order)
            if bodies is None and not part.stored:
                messages[order] = part.message
                continue
            node = onnx.NodeProto.FromString(self.in_memory(part, onnx.NodeProto()))
            graphs = [graph for _, graph in nested_graphs(node.attribute)]
            for place, members in (bodies or {}).items():
                if place >= len(graphs):
                    raise FormatError(f"{part.place} has no body {place}", hint=WRITE_AGAIN)
                self._fill(graphs[place], members, messages)
            messages[order] = node.SerializeToString()
        return messages

    def _fill(
        self, graph: onnx.GraphProto, members: Iterable[int | End], messages: dict[int, bytes]
    ) -> None:
        for member in members:
            if isinstance(member, int):
                if member not in messages:  # it says that it lies in one that comes after it
                    raise FormatError(
                        f"{self.parts.operators[member].place} lies in itself",
                        hint=WRITE_AGAIN,
                    )
                graph.node.add().ParseFromString(messages[member])
            elif member.kind == INITIALIZER:
                graph.initializer.add().ParseFromString(
                    self.in_memory(self.parts.weights[member], TensorProto())
                )
            else:
                sparse = self.in_memory(self.parts.weights[member], onnx.SparseTensorProto())
                graph.sparse_initializer.add().ParseFromString(sparse)

    def in_memory(
        self, part: Part, message: onnx.NodeProto | TensorProto | onnx.SparseTensorProto
    ) -> bytes:
        """A part with all its values."""
        if not part.stored:
            return part.message
        message.ParseFromString(part.message)
        tensors = dict(tensors_in(message))
        for at, values in self._values(part).items():
            if at not in tensors:
                raise FormatError(f"{part.place} has no tensor {at!r}", hint=WRITE_AGAIN)
            inside = self._note_external(tensors[at], values, part)
            pieces = joined(tensors[at].SerializeToString(), inside)
            tensors[at].ParseFromString(b"".join(in_bytes(pieces)))
        return bytes(message.SerializeToString())

    def _weight(self, end: End) -> list[Piece]:
        """A weight of the main graph in pieces."""
        part = self.parts.weights[end]
        values = self._values(part)
        if set(values) - {""}:
            raise FormatError(f"{part.place} is one tensor", hint=WRITE_AGAIN)
        inside = self._note_external(TensorProto.FromString(part.message), values.get("", {}), part)
        return joined(part.message, inside)

    def _values(self, part: Part) -> dict[str, dict[str, Values]]:
        found: dict[str, dict[str, Values]] = {}
        for at, field, values in self.parts.values(part):
            found.setdefault(at, {})[field] = values
        return found

    def _note_external(
        self, tensor: TensorProto, values: dict[str, Values], part: Part
    ) -> dict[str, Values]:
        """The values that are part of the tensor itself; what lies in a data file of the model is noted."""
        inside = dict(values)
        outside = inside.pop(EXTERNAL, None)
        if outside is not None:
            location = external_location(tensor)
            if location is None:
                raise FormatError(
                    f"nothing says where the values of {part.place} go", hint="write it again"
                )
            offset, length = declared_span(tensor, location)
            if length is not None and length != len(outside):
                raise FormatError(
                    f"the values of {part.place} are not as long as they should be",
                    hint="write it again",
                )
            assert isinstance(outside, Checked)
            self.external.append(ExternalValues(str(PurePosixPath(location)), offset, outside))
        return inside

    def pieces(self) -> list[Piece]:
        """The whole model, weights as stretches of the files that hold them."""
        return _with_graph(self.frame, self.nodes, self.initializers, self.sparse)

    def model(self, *, with_nodes: bool) -> onnx.ModelProto:
        """The model without the values of its weights; with the nodes of its main graph if asked for."""
        nodes = self.nodes if with_nodes else []
        heads: list[list[Piece]] = [
            [self.parts.weights[end].message] for end in self._main(INITIALIZER)
        ]
        proto = onnx.ModelProto()
        proto.ParseFromString(
            b"".join(in_bytes(_with_graph(self.frame, nodes, heads, self.sparse)))
        )
        return proto

    def replace(self, model: onnx.ModelProto) -> None:
        """Have this model written instead; its weights are those that are here."""
        self.nodes = [node.SerializeToString() for node in model.graph.node]
        frame = onnx.ModelProto()
        frame.CopyFrom(model)
        for field in ("node", "initializer", "sparse_initializer"):
            frame.graph.ClearField(field)
        self.frame = frame.SerializeToString()

    def stored_nodes(self) -> StoredNodes:
        """The nodes of the main graph, one by one."""
        return StoredNodes(
            len(self.nodes), lambda place: onnx.NodeProto.FromString(self.nodes[place])
        )


def _with_graph(
    frame: bytes,
    nodes: Iterable[bytes],
    initializers: Iterable[Sequence[Piece]],
    sparse: Iterable[bytes],
) -> list[Piece]:
    """The frame with the main graph's nodes and weights, each where a protobuf library writes it."""
    pieces: list[Piece] = []
    operators = [piece for node in nodes for piece in _delimited(_NODE, [node])]
    weights = [piece for tensor in initializers for piece in _delimited(_INITIALIZER, tensor)]
    further = [piece for tensor in sparse for piece in _delimited(_SPARSE, [tensor])]
    for field in wire.fields(frame, 0, len(frame)):
        if field.number == _GRAPH:
            inner = frame[field.body : field.end]
            first, second = wire.place_of(inner, _INITIALIZER), wire.place_of(inner, _SPARSE)
            parts = [
                *operators,
                inner[:first],
                *weights,
                inner[first:second],
                *further,
                inner[second:],
            ]
            pieces += _delimited(_GRAPH, parts)
            operators, weights, further = [], [], []
        else:
            pieces.append(frame[field.start : field.end])
    return pieces


def _delimited(number: int, parts: Sequence[Piece]) -> list[Piece]:
    return [wire.header(number, sum(map(len, parts))), *parts]


def in_bytes(pieces: Iterable[Piece]) -> Iterable[bytes]:
    """The bytes of pieces, stretches of files read chunk by chunk."""
    for piece in pieces:
        if isinstance(piece, memoryview):
            yield bytes(piece)
        else:
            yield from chunks(piece)
