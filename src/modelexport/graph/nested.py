"""The graphs of a model, nested as they are, each with its nodes, their tags and its constants."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import onnx

from modelexport.graph.flat import nested_graphs
from modelexport.modules.record import NodeTag

Label = Callable[[str, Sequence[onnx.NodeProto]], list[NodeTag | None]]
"""The tags of the nodes of a level, given its prefix."""


class Subgraph:
    """One graph: the main one, or one nested in a node of another level.

    `nodes` and `tags` are in the order of the file, `bodies` are the levels inside a node, by its place.
    `place` is that of the node which holds this level, in the level around it.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        label: Label,
        prefix: str = "",
        outer: Subgraph | None = None,
        place: int = -1,
    ) -> None:
        self.graph = graph
        self.prefix = prefix
        self.outer = outer
        self.place = place
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.tags = label(prefix, self.nodes)
        self.bodies: dict[int, list[Subgraph]] = {}
        self._flow: ConstantFlow | None = None
        for position, node in enumerate(self.nodes):
            attributes = node.attribute
            if attributes:
                nested = nested_graphs(attributes)
                if nested:
                    key = node_key(prefix, position, node)
                    self.bodies[position] = [
                        Subgraph(body, label, f"{key}/{name}/", self, position)
                        for name, body in nested
                    ]

    def __iter__(self) -> Iterator[Subgraph]:
        """This level and all inside it, a node's own before those of later nodes."""
        yield self
        for bodies in self.bodies.values():
            for body in bodies:
                yield from body

    def tags_inside(self) -> Iterator[NodeTag | None]:
        """The tags of this level and of all inside it, in the order of the file: a node before those in its bodies."""
        for position, tag in enumerate(self.tags):
            yield tag
            for body in self.bodies.get(position, ()):
                yield from body.tags_inside()

    def reads(self, position: int) -> list[str]:
        """What a node reads: its inputs, and what its bodies take from around it."""
        names = [name for name in self.nodes[position].input if name]
        for body in self.bodies.get(position, ()):
            names += body.captured
        return names

    @functools.cached_property
    def captured(self) -> list[str]:
        """The names that this level and those inside it take from around it."""
        own = {name for node in self.nodes for name in node.output}
        own.update(value.name for value in self.graph.input)
        own.update(self.weights)
        found = dict.fromkeys(
            name for position in range(len(self.nodes)) for name in self.reads(position)
        )
        found.update(dict.fromkeys(value.name for value in self.graph.output))
        return [name for name in found if name not in own]

    @functools.cached_property
    def weights(self) -> dict[str, onnx.TensorProto | onnx.SparseTensorProto]:
        """The initializers of this graph, by name."""
        found: dict[str, onnx.TensorProto | onnx.SparseTensorProto] = {
            t.name: t for t in self.graph.initializer
        }
        found.update((sparse.values.name, sparse) for sparse in self.graph.sparse_initializer)
        return found

    @functools.cached_property
    def declared(self) -> dict[str, onnx.ValueInfoProto]:
        """What this graph says of its tensors, by name."""
        found = {value.name: value for value in self.graph.value_info}
        for values in (self.graph.input, self.graph.output):
            found.update(
                (value.name, value)
                for value in values
                if value.HasField("type") or value.name not in found
            )
        return found

    @functools.cached_property
    def weight_places(self) -> dict[str, int]:
        """The place of each initializer among those of this graph, by name; sparse ones have none."""
        return {tensor.name: place for place, tensor in enumerate(self.graph.initializer)}

    def flow(self, end: int) -> ConstantFlow:
        """What does not depend on the model's inputs, of the nodes before `end` at least."""
        if self._flow is None or self._flow.end < end:
            self._flow = ConstantFlow(self, end)
        return self._flow


def sort_nodes(level: Subgraph) -> None:
    """Put each node of a graph after those that it reads from; runtimes do not ask for it, nor do all tools do it."""
    maker = {name: place for place, node in enumerate(level.nodes) for name in node.output if name}
    reads = {
        p: {maker[name] for name in level.reads(p) if name in maker} - {p}
        for p in range(len(level.nodes))
    }
    order: list[int] = []
    waits = {place: len(sources) for place, sources in reads.items()}
    readers: dict[int, list[int]] = {}
    for place, sources in reads.items():
        for source in sources:
            readers.setdefault(source, []).append(place)
    ready = [place for place, count in waits.items() if not count]
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers.get(place, ()):
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    kept = onnx.GraphProto()
    kept.node.extend(level.nodes[place] for place in order)
    del level.graph.node[:]
    level.graph.node.extend(kept.node)


def node_key(prefix: str, position: int, node: onnx.NodeProto) -> str:
    """The key of a node, as in `modelexport.graph.flat`: its first output, else its place."""
    return prefix + next(filter(None, node.output), f"#{position}")


class ConstantFlow:
    """The nodes of a level, up to one of them, that do not depend on the model's inputs.

    `constant` has the place of the node for each tensor that such a node makes. A node that may give
    another result each time is not among them, nor one whose operator nobody knows. `in_order` tells
    whether each node comes after those that it reads from, as far as constants are concerned.
    """

    def __init__(self, level: Subgraph, end: int) -> None:
        self.level = level
        self.end = end
        self.outer = None if level.outer is None else level.outer.flow(level.place)
        self.constant: dict[str, int] = {}
        self.in_order = True
        around = set() if self.outer is None else self.outer.varying
        weights = level.weights
        varying = around.union(
            value.name for value in level.graph.input if value.name not in weights
        )
        bodies = level.bodies
        update = varying.update
        for position, node in enumerate(level.nodes[:end]):
            for name in level.reads(position) if bodies and position in bodies else node.input:
                if name in varying:
                    update(node.output)
                    break
            else:
                self._add_constant(position, node, varying)
        self.varying: set[str] = varying

    def _add_constant(self, position: int, node: onnx.NodeProto, varying: set[str]) -> None:
        """A node that nothing varying enters makes a constant, unless it may make another one each time."""
        constant, weights = self.constant, self.level.weights
        if self.in_order and self.outer is None:
            self.in_order = all(
                name in constant or name in weights or not name for name in node.input
            )
        if is_repeatable(node.domain, node.op_type):
            constant.update(dict.fromkeys(filter(None, node.output), position))
        else:
            varying.update(filter(None, node.output))

    def producer(self, name: str) -> tuple[ConstantFlow, int] | None:
        """The constant node that makes a tensor, here or further out."""
        if name in self.constant:
            return self, self.constant[name]
        return None if self.outer is None else self.outer.producer(name)


@functools.cache
def is_repeatable(domain: str, op_type: str) -> bool:
    """Whether an operator is known to give the same result each time."""
    try:
        schema = onnx.defs.get_schema(op_type, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return False
    return not vars(type(schema))["non_deterministic"].__get__(schema)


def no_tags(prefix: str, nodes: Sequence[onnx.NodeProto]) -> list[NodeTag | None]:
    """No tags, where nobody asks for them."""
    return [None] * len(nodes)


class SubgraphValue(NamedTuple):
    """A tensor that enters or leaves a piece, and the level that it is seen from."""

    level: Subgraph
    name: str
