"""The boundary of a module: its nodes, the constants it needs, and the values that cross."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import onnx

from modelexport.graph.nested import ConstantFlow, Subgraph, SubgraphValue, node_key

Members = list[tuple[Subgraph, list[int]]]
"""Nodes by subgraph, as indices into it, outer subgraphs first."""

Key = TypeVar("Key", bound=Hashable)


class SubgraphPart(NamedTuple):
    """The nodes of an extracted model that are in one subgraph, as indices into it.

    `nodes` are those of the module, with everything nested in them; `constants` are copied from
    other modules, because nodes consume what they produce.
    """

    subgraph: Subgraph
    nodes: tuple[int, ...]
    constants: tuple[int, ...] = ()

    @property
    def copied(self) -> list[int]:
        """All nodes in file order."""
        return sorted((*self.nodes, *self.constants))

    def values(self) -> dict[str, None]:
        """Return the names of the values that the nodes produce, in order."""
        outputs = (self.subgraph.nodes[index].output for index in self.copied)
        return dict.fromkeys(name for names in outputs for name in names if name)

    def constant_keys(self) -> list[str]:
        """Return the keys of the copied constants."""
        subgraph = self.subgraph
        return [node_key(subgraph.prefix, i, subgraph.nodes[i]) for i in self.constants]


class Boundary(NamedTuple):
    """Everything that makes up an extracted model."""

    parts: tuple[SubgraphPart, ...]
    inputs: tuple[SubgraphValue, ...]
    outputs: tuple[SubgraphValue, ...]
    initializers: tuple[SubgraphValue, ...]

    @property
    def size(self) -> int:
        """The number of nodes, with those nested in them, without copied constants."""
        return sum(
            1 + sum(sum(1 for _ in inner.all_tags()) for inner in nested)
            for part in self.parts
            for nested in (part.subgraph.subgraphs.get(index, ()) for index in part.nodes)
        )

    def values_by_subgraph(self) -> dict[Subgraph, dict[str, None]]:
        """Return the names of all values in the extracted model by the subgraph they are from."""
        values: defaultdict[Subgraph, dict[str, None]] = defaultdict(dict)
        for part in self.parts:
            values[part.subgraph].update(part.values())
        for value in (*self.inputs, *self.initializers):
            values[value.level][value.name] = None
        return values

    def annotations(self) -> Iterator[tuple[Subgraph, onnx.TensorAnnotation]]:
        """Yield the quantization annotations of its values, each with its subgraph."""
        for subgraph, names in self.values_by_subgraph().items():
            for annotation in subgraph.graph.quantization_annotation:
                if annotation.tensor_name in names:
                    yield subgraph, annotation

    def with_annotated_initializers(self) -> Boundary:
        """Add the scales and zero points that annotations name, though no node consumes them."""
        initializers = dict.fromkeys(self.initializers)
        for subgraph, annotation in self.annotations():
            for entry in annotation.quant_parameter_tensor_names:
                holder = _initializer_holder(subgraph, entry.value)
                if holder is not None:
                    initializers[SubgraphValue(holder, entry.value)] = None
        return self._replace(initializers=tuple(initializers))

    def end(self) -> int:
        """Return the index after the last node of the main graph that is part of it."""
        last = -1
        for part in self.parts:
            subgraph, index = part.subgraph, max((*part.nodes, *part.constants), default=-1)
            while subgraph.outer is not None:
                subgraph, index = subgraph.outer, subgraph.place
            last = max(last, index)
        return last + 1


def whole_model(main: Subgraph) -> Boundary:
    """Return the boundary of the whole model.

    Args:
        main: The main graph.

    Returns:
        All its nodes and initializers, with its own inputs and outputs.
    """
    return Boundary(
        (SubgraphPart(main, tuple(range(len(main.nodes)))),),
        tuple(SubgraphValue(main, value.name) for value in main.graph.input),
        tuple(SubgraphValue(main, value.name) for value in main.graph.output),
        tuple(SubgraphValue(main, name) for name in main.initializers),
    )


def find_members(
    main: Subgraph, keys_of: Callable[[str, int | None], Collection[Key]]
) -> dict[Key, Members]:
    """Group the tagged nodes of a model; what is nested in a node comes along with it.

    Args:
        main: The main graph.
        keys_of: The groups that a node belongs to, by its module path and call.

    Returns:
        The nodes of each group, without those nested in a node of the same group.
    """
    members: dict[Key, Members] = {}
    pending: list[tuple[Subgraph, frozenset[Key]]] = [(main, frozenset())]
    for subgraph, held in pending:
        groups: defaultdict[Key, list[int]] = defaultdict(list)
        for index, tag in enumerate(subgraph.tags):
            keys = () if tag is None else keys_of(tag.hierarchy_module, tag.hierarchy_call)
            for key in keys:
                if key not in held:
                    groups[key].append(index)
            nested = subgraph.subgraphs.get(index, ())
            pending += [(inner, held.union(keys)) for inner in nested]
        for key, indices in groups.items():
            members.setdefault(key, []).append((subgraph, indices))
    return members


class ConsumerIndex:
    """The consumers of each value, computed once for each subgraph."""

    def __init__(self) -> None:
        self._consumers: dict[Subgraph, dict[str, list[int]]] = {}

    def of(self, subgraph: Subgraph) -> dict[str, list[int]]:
        """Return the indices of the nodes that consume each value, by name.

        Args:
            subgraph: The subgraph of the nodes.

        Returns:
            The consumers; a node also consumes what the subgraphs nested in it capture.
        """
        if subgraph not in self._consumers:
            consumers = self._consumers[subgraph] = {}
            for index in range(len(subgraph.nodes)):
                for name in subgraph.inputs_of(index):
                    consumers.setdefault(name, []).append(index)
        return self._consumers[subgraph]


def find_boundary(
    members: Members,
    results: Collection[str] = (),
    leaving: Sequence[str] | None = None,
    consumers: ConsumerIndex | None = None,
) -> Boundary:
    """Find the boundary of some nodes.

    Args:
        members: The nodes.
        results: Values that are outputs if the nodes produce them, even if nothing consumes them.
        leaving: The names of the outputs, if they are known already.
        consumers: The consumers of all values, to share between calls.

    Returns:
        The boundary; annotated initializers are yet to be added.
    """
    sources = _Sources()
    outputs: list[SubgraphValue] = []
    for subgraph, indices in members:
        sources.add_nodes(subgraph, indices)
        names = leaving
        if names is None:
            names = leaving_values(subgraph, indices, results, consumers or ConsumerIndex())
        outputs += [SubgraphValue(subgraph, name) for name in names]
    inputs = _in_declared_order(list(sources.inputs), "input")
    return Boundary(sources.parts(), tuple(inputs), tuple(outputs), tuple(sources.initializers))


class _Sources:
    """Nodes, and the sources of all that they consume: initializers, constants and inputs."""

    def __init__(self) -> None:
        self.inputs: dict[SubgraphValue, None] = {}
        self.initializers: dict[SubgraphValue, None] = {}
        self._nodes: dict[Subgraph, set[int]] = {}
        self._constants: dict[Subgraph, set[int]] = {}
        self._produced: dict[Subgraph, set[str]] = {}

    def add_nodes(self, subgraph: Subgraph, indices: Sequence[int]) -> None:
        """Add nodes of one subgraph; those of the subgraphs around it come first."""
        self._nodes[subgraph] = set(indices)
        self._produced[subgraph] = {
            name for index in indices for name in subgraph.nodes[index].output
        }
        flow = subgraph.flow(max(indices) + 1)
        for name in dict.fromkeys(name for index in indices for name in subgraph.inputs_of(index)):
            self._add_source(flow, name)

    def _add_source(self, flow: ConstantFlow, name: str) -> None:
        pending = [(flow, name)]
        while pending:
            flow, name = pending.pop()
            if any(name in self._produced.get(outer, ()) for outer in _outwards(flow.level)):
                continue
            holder = _initializer_holder(flow.level, name)
            if holder is not None:
                self.initializers[SubgraphValue(holder, name)] = None
                continue
            producer = flow.producer(name)
            if producer is None:
                self.inputs[SubgraphValue(_outermost_scope(flow, name), name)] = None
                continue
            home, index = producer
            constants = self._constants.setdefault(home.level, set())
            if index not in constants:
                constants.add(index)
                pending += [(home, source) for source in home.level.inputs_of(index)]

    def parts(self) -> tuple[SubgraphPart, ...]:
        """Return the nodes and constants by subgraph, outer ones first."""
        parts = []
        for subgraph in {**self._constants, **self._nodes}:
            nodes = self._nodes.get(subgraph, set())
            constants = self._constants.get(subgraph, set()) - nodes
            parts.append(SubgraphPart(subgraph, tuple(sorted(nodes)), tuple(sorted(constants))))
        return tuple(sorted(parts, key=lambda part: len(part.subgraph.prefix)))


def _outwards(subgraph: Subgraph) -> Iterator[Subgraph]:
    """Yield a subgraph and those around it."""
    current: Subgraph | None = subgraph
    while current is not None:
        yield current
        current = current.outer


def _initializer_holder(subgraph: Subgraph, name: str) -> Subgraph | None:
    """Return the innermost subgraph, from this one outwards, with an initializer of this name."""
    return next((outer for outer in _outwards(subgraph) if name in outer.initializers), None)


def _outermost_scope(flow: ConstantFlow, name: str) -> Subgraph:
    """Return the outermost subgraph in which a value that is not constant is visible."""
    while flow.outer is not None and name in flow.outer.varying:
        flow = flow.outer
    return flow.level


def leaving_values(
    subgraph: Subgraph, indices: Sequence[int], results: Collection[str], consumers: ConsumerIndex
) -> list[str]:
    """Find the outputs of some nodes: graph outputs, results, and what other nodes consume.

    A constant that other nodes consume does not count, because they have a copy of their own.
    Nodes without such an output give what they do not consume themselves.

    Args:
        subgraph: The subgraph of the nodes.
        indices: The nodes.
        results: Values that count even if nothing consumes them.
        consumers: The consumers of all values.

    Returns:
        The names of the outputs in file order.
    """
    produced = dict.fromkeys(
        name for index in indices for name in subgraph.nodes[index].output if name
    )
    own = set(indices)
    consumed_by = consumers.of(subgraph)
    constant = subgraph.flow(max(indices) + 1).constant
    ends = {*(value.name for value in subgraph.graph.output), *results}
    leaving = [
        name
        for name in produced
        if name in ends or (name not in constant and not own.issuperset(consumed_by.get(name, ())))
    ]
    if not leaving:
        unused = [name for name in produced if own.isdisjoint(consumed_by.get(name, ()))]
        leaving = unused or list(produced)
    values = [SubgraphValue(subgraph, name) for name in leaving]
    return [value.name for value in _in_declared_order(values, "output")]


def _in_declared_order(
    values: list[SubgraphValue], kind: Literal["input", "output"]
) -> list[SubgraphValue]:
    """Sort those of the values that a graph declares as it does; all others keep their position."""
    rank: dict[SubgraphValue, int] = {}
    for subgraph in dict.fromkeys(value.level for value in values):
        declared = subgraph.graph.input if kind == "input" else subgraph.graph.output
        for number, value in enumerate(declared):
            rank.setdefault(SubgraphValue(subgraph, value.name), number)
    declared_values = [value for value in values if value in rank]
    following = iter(sorted(declared_values, key=lambda value: rank[value]))
    return [next(following) if value in rank else value for value in values]
