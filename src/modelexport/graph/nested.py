"""The graphs of a model, nested as they are, each with its nodes, their tags and its constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Initializer, initializers_by_name, nested_graphs, subgraph_prefix
from modelexport.modules.record import NodeTag

TagReader = Callable[[str, Sequence[onnx.NodeProto]], list[NodeTag | None]]
"""Returns the tags of the nodes of a graph, given the prefix of its keys."""


class Subgraph:
    """One graph: the main one, or one nested in a node of another.

    Args:
        graph: The protobuf graph.
        label: Returns the tags of its nodes; None where tags are not needed.
        prefix: The prefix of its keys, as in `modelexport.graph.flat`.
        outer: The graph around it; None for the main graph.
        node_index: The index of the node that has it, in the graph around it.

    Attributes:
        nodes: The nodes in file order.
        tags: The tag of each node.
        subgraphs: The subgraphs of a node, by its index.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        label: TagReader | None = None,
        prefix: str = "",
        outer: Subgraph | None = None,
        node_index: int = -1,
    ) -> None:
        self.graph = graph
        self.prefix = prefix
        self.outer = outer
        self.node_index = node_index
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.tags: list[NodeTag | None] = (
            label(prefix, self.nodes) if label else [None] * len(self.nodes)
        )
        self.subgraphs: dict[int, list[Subgraph]] = {}
        self._flow: ConstantFlow | None = None
        for index, node in enumerate(self.nodes):
            attributes = node.attribute
            nested = nested_graphs(attributes) if attributes else ()
            if nested:
                key = node_key(prefix, index, node)
                self.subgraphs[index] = [
                    Subgraph(inner, label, subgraph_prefix(key, name), self, index)
                    for name, inner in nested
                ]

    def __iter__(self) -> Iterator[Subgraph]:
        """Iterate over this graph and all inside it, in file order."""
        yield self
        for subgraphs in self.subgraphs.values():
            for subgraph in subgraphs:
                yield from subgraph

    def all_tags(self) -> Iterator[NodeTag | None]:
        """Iterate over all tags in file order, that of a node before those of its subgraphs."""
        for index, tag in enumerate(self.tags):
            yield tag
            for subgraph in self.subgraphs.get(index, ()):
                yield from subgraph.all_tags()

    def inputs_of(self, index: int) -> list[str]:
        """List the values that a node consumes, those that its subgraphs capture among them."""
        names = [name for name in self.nodes[index].input if name]
        for subgraph in self.subgraphs.get(index, ()):
            names += subgraph.captured
        return names

    @functools.cached_property
    def captured(self) -> list[str]:
        """The values of outer graphs that this graph and those inside it consume."""
        own = {name for node in self.nodes for name in node.output}
        own.update(value.name for value in self.graph.input)
        own.update(self.initializers)
        consumed = dict.fromkeys(
            name for index in range(len(self.nodes)) for name in self.inputs_of(index)
        )
        consumed.update(dict.fromkeys(value.name for value in self.graph.output))
        return [name for name in consumed if name not in own]

    @functools.cached_property
    def initializers(self) -> dict[str, Initializer]:
        """The initializers of this graph, by name."""
        return initializers_by_name(self.graph)

    @functools.cached_property
    def declared(self) -> dict[str, onnx.ValueInfoProto]:
        """The values that this graph declares, by name."""
        values = {value.name: value for value in self.graph.value_info}
        for ends in (self.graph.input, self.graph.output):
            values.update(
                (value.name, value)
                for value in ends
                if value.HasField("type") or value.name not in values
            )
        return values

    @functools.cached_property
    def initializer_indices(self) -> dict[str, int]:
        """The index of each dense initializer of this graph, by name."""
        return {tensor.name: index for index, tensor in enumerate(self.graph.initializer)}

    def flow(self, end: int) -> ConstantFlow:
        """Return the values that do not depend on the model's inputs, of `end` nodes at least."""
        if self._flow is None or self._flow.end < end:
            self._flow = ConstantFlow(self, end)
        return self._flow


class SubgraphValue(NamedTuple):
    """A value that enters or leaves an extracted model, and the graph that it is seen from."""

    subgraph: Subgraph
    name: str


def sort_nodes(subgraph: Subgraph) -> None:
    """Sort the nodes in the protobuf of a graph topologically; not every tool writes them so.

    Args:
        subgraph: The graph, which is not to be used afterwards.

    Raises:
        FormatError: The graph has a cycle.
    """
    nodes = subgraph.nodes
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    consumers: list[list[int]] = [[] for _ in nodes]
    for index in range(len(nodes)):
        sources = {producer[name] for name in subgraph.inputs_of(index) if name in producer}
        for source in sources - {index}:
            consumers[source].append(index)
    # A detached graph, because clearing the field would invalidate the nodes that are in it.
    ordered = onnx.GraphProto()
    ordered.node.extend(nodes[index] for index in topological_order(consumers, strict=True))
    del subgraph.graph.node[:]
    subgraph.graph.node.extend(ordered.node)


def node_key(prefix: str, position: int, node: onnx.NodeProto) -> str:
    """Return the key of a node, as in `modelexport.graph.flat`: its first output, else its index.

    `prefix` and `position` are those of its graph's keys and of the node in its graph.
    """
    return prefix + next(filter(None, node.output), f"#{position}")


class ConstantFlow:
    """The values of a graph, up to one of its nodes, that do not depend on the model's inputs.

    The outputs of a node whose operator is random or unknown are not among them.

    Args:
        subgraph: The graph.
        end: The number of nodes to cover, from the first.

    Attributes:
        constant: The index of the producer, by the name of each constant.
        varying: The other values, those of outer graphs included.
        outer: The same for the graph around it.
        in_order: Whether each node comes after its producers, as far as constants are concerned.
    """

    def __init__(self, subgraph: Subgraph, end: int) -> None:
        self.subgraph = subgraph
        self.end = end
        self.outer: ConstantFlow | None = (
            None if subgraph.outer is None else subgraph.outer.flow(subgraph.node_index)
        )
        self.constant: dict[str, int] = {}
        self.in_order: bool = True
        initializers, subgraphs = subgraph.initializers, subgraph.subgraphs
        self.varying: set[str] = set() if self.outer is None else set(self.outer.varying)
        self.varying.update(
            value.name for value in subgraph.graph.input if value.name not in initializers
        )
        varying = self.varying
        for index, node in enumerate(subgraph.nodes[:end]):
            for name in (
                subgraph.inputs_of(index) if subgraphs and index in subgraphs else node.input
            ):
                if name in varying:
                    varying.update(node.output)
                    break
            else:
                self._add_constant(index, node)

    def _add_constant(self, index: int, node: onnx.NodeProto) -> None:
        """Add a node that consumes only constants."""
        constant, initializers = self.constant, self.subgraph.initializers
        if self.in_order and self.outer is None:
            self.in_order = all(
                name in constant or name in initializers or not name for name in node.input
            )
        outputs = filter(None, node.output)
        if is_repeatable(node.domain, node.op_type):
            constant.update(dict.fromkeys(outputs, index))
        else:
            self.varying.update(outputs)

    def producer(self, name: str) -> tuple[ConstantFlow, int] | None:
        """Find the producer of a constant, in this graph or around it.

        Returns:
            The constants of the producer's graph and its index; None for a value that varies.
        """
        if name in self.constant:
            return self, self.constant[name]
        return None if self.outer is None else self.outer.producer(name)


@functools.cache
def find_schema(domain: str, op_type: str) -> onnx.defs.OpSchema | None:
    """Return the newest schema of an operator; None for one that ONNX does not define."""
    try:
        return onnx.defs.get_schema(op_type, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None


@functools.cache
def is_repeatable(domain: str, op_type: str) -> bool:
    """Return whether an operator returns the same result for the same inputs: it is not random."""
    schema = find_schema(domain, op_type)
    return schema is not None and not schema.non_deterministic  # type: ignore[attr-defined]


def topological_order(
    consumers: Sequence[Sequence[int]],
    priorities: Sequence[float] | None = None,
    *,
    strict: bool = False,
) -> list[int]:
    """Sort nodes topologically, and otherwise by priority.

    The order is stable: of the nodes whose producers all come before, the one with the lowest
    priority, then number, is next. Where all remaining nodes wait for others, as in a cycle, the
    one with the lowest priority is next. Takes time linear in the edges.

    Args:
        consumers: For each node those that consume its outputs; one may be listed repeatedly.
        priorities: A number for each node; its own number if None.
        strict: Whether a cycle is an error.

    Raises:
        FormatError: There is a cycle, and `strict` is set.
    """
    ranks = range(len(consumers)) if priorities is None else priorities
    waiting = [0] * len(consumers)
    for nodes in consumers:
        for consumer in nodes:
            waiting[consumer] += 1
    ready = [(ranks[node], node) for node, count in enumerate(waiting) if not count]
    heapify(ready)
    by_priority = iter(sorted(range(len(consumers)), key=ranks.__getitem__))
    done = [False] * len(consumers)
    order: list[int] = []
    while len(order) < len(consumers):
        if strict and not ready:
            hint = "no runtime can run it; export it again"
            raise FormatError("the graph has a cycle", hint=hint)
        node = heappop(ready)[1] if ready else next(by_priority)
        if done[node]:
            continue
        done[node] = True
        order.append(node)
        for consumer in consumers[node]:
            waiting[consumer] -= 1
            if not waiting[consumer] and not done[consumer]:
                heappush(ready, (ranks[consumer], consumer))
    return order
