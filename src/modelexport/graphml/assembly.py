"""Puts the parts of a GraphML file together: once without values, to look at, and once as pieces to write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.graph import StoredNodes, flatten, nested_graphs
from modelexport.graphml.dialect import INITIALIZER, SPARSE
from modelexport.graphml.parts import Checked, End, Part, Parts, check_part
from modelexport.graphml.read import exact_bytes
from modelexport.graphml.tensors import EXTERNAL, Piece, Values, chunks, joined, tensors_in
from modelexport.graphml.views import plain
from modelexport.graphml.wiring import Wiring, body_scope, function_scope, structure_digest
from modelexport.tagged import wire
from modelexport.tagged.files import external_location
from modelexport.tagged.weights import declared_place

_GRAPH = 7
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15
_NOTHING, _NOTE = -1, -2
_BODY = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


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
            raise FormatError(
                f"the model in {parts.path} is damaged", hint="write it again with export-graphml"
            ) from error
        self._functions = {function_scope(place): function for place, function in enumerate(frame.functions)}
        self._nested: dict[int, dict[int, list[int | End]]] = {}
        self._in_functions: dict[str, list[int]] = {}
        main = self._sort_by_graph()
        messages = self._completed()
        self.nodes = [messages[order] for order in main]
        if self._functions:
            for key, orders in self._in_functions.items():
                self._functions[key].node.extend(onnx.NodeProto.FromString(messages[order]) for order in orders)
            self.frame = frame.SerializeToString()
        self.initializers = [self._weight(end) for end in self._main(INITIALIZER)]
        self.sparse = [self.in_memory(parts.weights[end], onnx.SparseTensorProto()) for end in self._main(SPARSE)]

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
        found = _BODY.fullmatch(part.scope)
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
                    raise FormatError(f"{part.place} has no body {place}", hint="write it again with export-graphml")
                self._fill(graphs[place], members, messages)
            messages[order] = node.SerializeToString()
        return messages

    def _fill(self, graph: onnx.GraphProto, members: Iterable[int | End], messages: dict[int, bytes]) -> None:
        for member in members:
            if isinstance(member, int):
                if member not in messages:  # it says that it lies in one that comes after it
                    raise FormatError(
                        f"{self.parts.operators[member].place} lies in itself",
                        hint="write it again with export-graphml",
                    )
                graph.node.add().ParseFromString(messages[member])
            elif member.kind == INITIALIZER:
                graph.initializer.add().ParseFromString(self.in_memory(self.parts.weights[member], TensorProto()))
            else:
                sparse = self.in_memory(self.parts.weights[member], onnx.SparseTensorProto())
                graph.sparse_initializer.add().ParseFromString(sparse)

    def in_memory(self, part: Part, message: onnx.NodeProto | TensorProto | onnx.SparseTensorProto) -> bytes:
        """A part with all its values."""
        if not part.stored:
            return part.message
        message.ParseFromString(part.message)
        tensors = dict(tensors_in(message))
        for at, values in self._values(part).items():
            if at not in tensors:
                raise FormatError(f"{part.place} has no tensor {at!r}", hint="write it again with export-graphml")
            inside = self._note_external(tensors[at], values, part)
            pieces = joined(tensors[at].SerializeToString(), inside)
            tensors[at].ParseFromString(b"".join(in_bytes(pieces)))
        return bytes(message.SerializeToString())

    def _weight(self, end: End) -> list[Piece]:
        """A weight of the main graph in pieces."""
        part = self.parts.weights[end]
        values = self._values(part)
        if set(values) - {""}:
            raise FormatError(f"{part.place} is one tensor", hint="write it again with export-graphml")
        inside = self._note_external(TensorProto.FromString(part.message), values.get("", {}), part)
        return joined(part.message, inside)

    def _values(self, part: Part) -> dict[str, dict[str, Values]]:
        found: dict[str, dict[str, Values]] = {}
        for at, field, values in self.parts.values(part):
            found.setdefault(at, {})[field] = values
        return found

    def _note_external(self, tensor: TensorProto, values: dict[str, Values], part: Part) -> dict[str, Values]:
        """The values that are part of the tensor itself; what lies in a data file of the model is noted."""
        inside = dict(values)
        outside = inside.pop(EXTERNAL, None)
        if outside is not None:
            location = external_location(tensor)
            if location is None:
                raise FormatError(f"nothing says where the values of {part.place} go", hint="write it again")
            offset, length = declared_place(tensor, location)
            if length is not None and length != len(outside):
                raise FormatError(
                    f"the values of {part.place} are not as long as they should be", hint="write it again"
                )
            assert isinstance(outside, Checked)
            self.external.append(ExternalValues(PurePosixPath(location).name, offset, outside))
        return inside

    def pieces(self) -> list[Piece]:
        """The whole model, weights as stretches of the files that hold them."""
        nodes = [piece for node in self.nodes for piece in (wire.header(_NODE, len(node)), node)]
        return _with_graph(self.frame, nodes, self.initializers, self.sparse)

    def model(self, *, with_nodes: bool) -> onnx.ModelProto:
        """The model without the values of its weights; with the nodes of its main graph if asked for."""
        nodes: list[Piece] = []
        if with_nodes:
            nodes = [piece for node in self.nodes for piece in (wire.header(_NODE, len(node)), node)]
        heads: list[list[Piece]] = [[self.parts.weights[end].message] for end in self._main(INITIALIZER)]
        proto = onnx.ModelProto()
        proto.ParseFromString(b"".join(in_bytes(_with_graph(self.frame, nodes, heads, self.sparse))))
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
        return StoredNodes(len(self.nodes), lambda place: onnx.NodeProto.FromString(self.nodes[place]))


def _with_graph(
    frame: bytes, nodes: Sequence[Piece], initializers: Iterable[Sequence[Piece]], sparse: Iterable[bytes]
) -> list[Piece]:
    """The frame with the main graph's nodes and weights, each where a protobuf library writes it."""
    pieces: list[Piece] = []
    weights = [piece for tensor in initializers for piece in _delimited(_INITIALIZER, tensor)]
    further = [piece for tensor in sparse for piece in _delimited(_SPARSE, [tensor])]
    for field in wire.fields(frame, 0, len(frame)):
        if field.number == _GRAPH:
            inner = frame[field.body : field.end]
            first, second = wire.place_of(inner, _INITIALIZER), wire.place_of(inner, _SPARSE)
            parts = [*nodes, inner[:first], *weights, inner[first:second], *further, inner[second:]]
            pieces += _delimited(_GRAPH, parts)
            nodes, weights, further = [], [], []
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


class Comparison:
    """The elements of an assembled model against the nodes and edges of the picture."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.parts = assembly.parts
        model = assembly.model(with_nodes=False)
        self.graph = flatten(model, assembly.stored_nodes())
        self.wiring = Wiring(self.graph, model)
        first = len(self.graph.nodes)
        known = {End(t.kind, t.scope, t.position): element for element, t in enumerate(self.wiring.terminals, first)}
        self.elements: dict[int, int] = {number: assembly.rank[order] for number, order in self.parts.orders.items()}
        places = _weight_ranks(self.parts)
        for number, end in self.parts.ends.items():
            position = places.get(end, end.position)
            element = known.get(End(end.kind, self.scope(end.scope), position))
            if element is None:
                raise FormatError(f"{self.parts.places.get(number, end.kind)} belongs to no graph of the model")
            self.elements[number] = element

    def scope(self, told: str) -> str:
        """The graph that a scope of the picture means, now that some operators may be gone."""
        found = _BODY.fullmatch(told)
        if found is None or int(found[1]) not in self.assembly.rank:
            return told
        return body_scope(self.assembly.rank[int(found[1])], int(found[2]))

    def is_unchanged(self) -> bool:
        """Whether the picture has the structure that it was written with."""
        parts = self.parts
        if parts.added or any(part.edits for part in parts.operators.values()):
            return False
        if len(parts.weights) != parts.parameters.weights:
            return False
        if len(parts.orders) + len(parts.ends) != len(self.graph.nodes) + len(self.wiring.terminals):
            return False
        for number, element in self.elements.items():
            if element >= len(self.graph.nodes):
                told = parts.told_names[number]
                if told and told != plain(self.wiring.terminal(element).name):
                    return False
        if self._notes_in_between() or not np.array_equal(self._drawn(), self._expected()):
            return False
        return self.is_recorded()

    def is_recorded(self) -> bool:
        """Whether the operators are those that were there when the GraphML was written."""
        return structure_digest(self.graph) == self.parts.card.told.get("topology", "")

    def _notes_in_between(self) -> bool:
        """Whether edges lead into a note and out of it again, as if it did something."""
        notes, edges = self.parts.notes, self.parts.edges
        if not notes:
            return False
        ends = list(zip(edges.sources, edges.targets, strict=True))
        outwards = {source for source, target in ends if source in notes and target in self.elements}
        return any(target in outwards and source in self.elements for source, target in ends)

    def _expected(self) -> np.ndarray:
        rows = np.fromiter((number for wire in self.wiring.wires() for number in wire), np.int64)
        return _sorted(rows.reshape(-1, 4))

    def _drawn(self) -> np.ndarray:
        edges = self.parts.edges
        lookup = np.full(len(edges.numbers) + 1, _NOTHING, np.int64)
        lookup[np.fromiter(self.elements, np.int64)] = np.fromiter(self.elements.values(), np.int64)
        ends = [lookup[np.frombuffer(column, np.int64)] for column in (edges.sources, edges.targets)]
        rows = [ends[0], np.frombuffer(edges.outputs, np.int64), ends[1], np.frombuffer(edges.slots, np.int64)]
        table = np.stack(rows, axis=1)
        if self.parts.notes:
            lookup[np.fromiter(self.parts.notes, np.int64)] = _NOTE
            drawn = [lookup[np.frombuffer(column, np.int64)] for column in (edges.sources, edges.targets)]
            table = table[(drawn[0] != _NOTE) & (drawn[1] != _NOTE)]
        return _sorted(table)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def _weight_ranks(parts: Parts) -> dict[End, int]:
    """The place of every weight among those that are left of its graph."""
    ranks: dict[End, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for end in sorted(parts.weights):
        graph = (end.kind, end.scope)
        ranks[end] = counts.get(graph, 0)
        counts[graph] = ranks[end] + 1
    return ranks
