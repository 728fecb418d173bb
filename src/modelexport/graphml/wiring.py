"""Everything of a model that is a node of the picture, and one wire for every use of a tensor.

Elements are numbered: the operators of all graphs in the order of the flat graph, then the ends of
wires that are no operators (inputs, outputs and weights of every graph), the terminals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, as_text, nested_graphs, subgraph_prefix
from modelexport.graphml.dialect import INITIALIZER, INPUT, OUTPUT, SPARSE


class Terminal(msgspec.Struct, frozen=True, gc=False):
    """An input, output or weight: which graph it belongs to, its place in that graph's list, and its tensor's key."""

    kind: str
    scope: str
    position: int
    name: str
    key: str


class Wire(NamedTuple):
    """One use of a tensor: which output of which element goes into which input of which other."""

    source: int
    output: int
    target: int
    slot: int


class Wiring:
    """The elements of a flat graph and the wires between them."""

    def __init__(self, graph: Graph, proto: onnx.ModelProto) -> None:
        self.graph = graph
        self.terminals: list[Terminal] = []
        self._sources: dict[str, int] = {}
        main = proto.graph
        weights = set(graph.initializers)
        self._add(
            INPUT, "", [(v.name, v.name) if v.name not in weights else None for v in main.input]
        )
        self._add_weights("", "", main)
        self._add(OUTPUT, "", [(v.name, v.name) for v in main.output])
        for index, bodies in graph.bodies.items():
            node = graph.nodes[index]
            nests = nested_graphs(graph.protos[index].attribute)
            for place, (body, (label, nested)) in enumerate(zip(bodies, nests, strict=True)):
                scope = body_scope(index, place)
                names = [v.name for v in nested.input]
                self._add(INPUT, scope, list(zip(names, body.inputs, strict=True)))
                self._add_weights(scope, subgraph_prefix(node.key, label), nested)
                self._add(
                    OUTPUT,
                    scope,
                    list(zip((v.name for v in nested.output), body.outputs, strict=True)),
                )
        if len(graph.functions) != len(proto.functions):
            raise FormatError(
                "two local functions have the same name", hint="ONNX allows one of each"
            )
        for place, (declared, function) in enumerate(
            zip(graph.functions.values(), proto.functions, strict=True)
        ):
            scope = function_scope(place)
            self._add(INPUT, scope, list(zip(function.input, declared.inputs, strict=True)))
            self._add(OUTPUT, scope, list(zip(function.output, declared.outputs, strict=True)))
        self._places: dict[str, int] = {}
        for index, node in enumerate(graph.nodes):
            if len(node.outputs) > 1 or node.gaps:
                places = (
                    filled(graph.protos[index].output) if node.gaps else range(len(node.outputs))
                )
                named = zip(node.outputs, places, strict=True)
                self._places |= (
                    (name, place) for name, place in named if graph.producer[name] == index
                )

    def _add(self, kind: str, scope: str, named: Sequence[tuple[str, str] | None]) -> None:
        for position, names in enumerate(named):
            if names is not None:
                if kind != OUTPUT:
                    self._sources[names[1]] = len(self.graph.nodes) + len(self.terminals)
                self.terminals.append(Terminal(kind, scope, position, *names))

    def _add_weights(self, scope: str, prefix: str, graph: onnx.GraphProto) -> None:
        dense = [tensor.name for tensor in graph.initializer]
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        for kind, names in ((INITIALIZER, dense), (SPARSE, sparse)):
            self._add(kind, scope, [(name, under(prefix, name)) for name in names])

    def terminal(self, element: int) -> Terminal:
        return self.terminals[element - len(self.graph.nodes)]

    def source(self, key: str) -> tuple[int, int] | None:
        """The element that gives a tensor, and by which of its outputs; None where nothing does."""
        index = self.graph.producer.get(key)
        if index is None:
            element = self._sources.get(key)
            return None if element is None else (element, 0)
        return index, self._places.get(key, 0)

    def wires(self) -> Iterator[Wire]:
        """Every use of a tensor that something gives."""
        protos = self.graph.protos
        for index, node in enumerate(self.graph.nodes):
            slots = filled(protos[index].input) if node.gaps else range(len(node.inputs))
            for slot, key in zip(slots, node.inputs, strict=True):
                found = self.source(key)
                if found is not None:
                    yield Wire(*found, index, slot)
        for element, terminal in enumerate(self.terminals, len(self.graph.nodes)):
            found = self.source(terminal.key) if terminal.kind == OUTPUT else None
            if found is not None:
                yield Wire(*found, element, 0)


def body_scope(index: int, place: int) -> str:
    """The name of the graph that is nested in this operator at this place."""
    return f"{index}/{place}"


def function_scope(place: int) -> str:
    """The name of the graph that this function of the model is."""
    return f"function/{place}"


def scopes_of(graph: Graph) -> Callable[[int], str]:
    """Tells the graph that an operator is in: empty for the main graph, else a body or a function."""
    functions = {key: function_scope(place) for place, key in enumerate(graph.functions)}

    def scope(index: int) -> str:
        node = graph.nodes[index]
        if node.enclosing >= 0:
            return body_scope(node.enclosing, node.body)
        return functions[node.function] if node.function else ""

    return scope


def under(prefix: str, name: str) -> str:
    """The key of a name in a graph with this prefix."""
    return prefix + as_text(name) if prefix else name


def filled(names: Sequence[str]) -> list[int]:
    """The places of the names that are not empty."""
    return [place for place, name in enumerate(names) if name]


def structure_digest(graph: Graph) -> str:
    """Every operator with what it reads, makes and says, in the order of the file, and the ends of every graph."""
    digest = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for node, proto in zip(graph.nodes, graph.protos, strict=True):
        digest.update(encode(node))
        for attribute in proto.attribute:
            if attribute.type not in _GRAPHS:
                digest.update(attribute.SerializeToString())
    bodies = [(index, body) for index, found in graph.bodies.items() for body in found]
    for index, body in [*bodies, *enumerate(graph.functions.values())]:
        digest.update(
            encode(
                (
                    index,
                    body.label,
                    body.inputs,
                    body.outputs,
                    list(body.initializers),
                    body.declared,
                )
            )
        )
    digest.update(encode((graph.inputs, graph.outputs, graph.initializers)))
    return digest.hexdigest()[:32]


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
