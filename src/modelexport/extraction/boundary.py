"""An open model, and the boundary of a module: its nodes and the values that enter and leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import onnx

from modelexport.graph.inference import TypeInference
from modelexport.graph.nested import ConstantFlow, Subgraph, SubgraphValue, node_key
from modelexport.modules.lookup import ModuleIndex, ModuleRef
from modelexport.onnx_file import wire
from modelexport.tagged.records import EmbeddedMap, Sidecar

Members = list[tuple[Subgraph, list[int]]]
"""Nodes by subgraph, as indices into it, outer subgraphs first."""

NewNames = Mapping[Subgraph, Mapping[str, str]]
"""New names for values, by the subgraph that they are from."""

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
    """The nodes of an extracted model, and the values that enter and leave them."""

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
            values[value.subgraph][value.name] = None
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

    def rename_clashes(self) -> NewNames:
        """Find new names for values with the name of a value in an outer or earlier subgraph."""
        used: set[str] = set()
        new_names: dict[Subgraph, dict[str, str]] = {}
        for subgraph, names in self.values_by_subgraph().items():
            new_names[subgraph] = {name: subgraph.prefix + name for name in names if name in used}
            used.update(new_names[subgraph].get(name, name) for name in names)
        return new_names

    def end(self) -> int:
        """Return the index after the last node of the main graph that is part of it."""
        last = -1
        for part in self.parts:
            subgraph, index = part.subgraph, max((*part.nodes, *part.constants), default=-1)
            while subgraph.outer is not None:
                subgraph, index = subgraph.outer, subgraph.node_index
            last = max(last, index)
        return last + 1


def names_in_scope(subgraph: Subgraph, new_names: NewNames) -> dict[str, str]:
    """Return the new names that hold in a subgraph: its own, and those around it."""
    outwards = reversed(list(_outwards(subgraph)))
    return {old: new for outer in outwards for old, new in new_names.get(outer, {}).items()}


def new_name(value: SubgraphValue, new_names: NewNames) -> str:
    """Return the name of a value in the extracted model."""
    return new_names.get(value.subgraph, {}).get(value.name, value.name)


class OpenModel(NamedTuple):
    """A tagged model that is open for extraction.

    `data` are its bytes, and `fields` the initializers in them. A small model was parsed with all
    its data: its `fields` are None.
    """

    path: Path
    proto: onnx.ModelProto
    main: Subgraph
    types: TypeInference
    records: EmbeddedMap | Sidecar | None
    modules: ModuleIndex
    data: wire.Buffer
    fields: Sequence[wire.Field] | None

    def find(self, module: str, call: int | None = None) -> ModuleRef:
        """Find a module by what people type, or one of its calls; raise if there is none."""
        ref = self.modules.find(module)
        return ref if call is None else self.modules.select_call(ref, call)

    def is_whole_model(self, ref: ModuleRef) -> bool:
        """Return whether a reference is to the model itself, with all nodes, tagged or not."""
        return not ref.path and ref.call is None

    def members(self, ref: ModuleRef) -> Members:
        """Find the nodes of a module; raise if it has none, unless it is the whole model."""
        main = self.main
        if self.is_whole_model(ref):
            return [(main, list(range(len(main.nodes))))] if main.nodes else []
        belongs = self.modules.node_filter(ref)
        members = find_members(main, lambda path, call: (ref,) if belongs(path, call) else ())
        if not members:
            raise self.modules.no_nodes_error(ref, main.all_tags())
        return members[ref]

    def boundary(self, ref: ModuleRef) -> Boundary:
        """Find the nodes of a module, and the values that enter and leave it."""
        if not self.is_whole_model(ref):
            return find_boundary(self.members(ref), self.modules.results(ref))
        main = self.main
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
        keys_of: Returns the groups that a node belongs to, by its module path and call.
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


def consumers_by_value(subgraph: Subgraph) -> dict[str, list[int]]:
    """Return the nodes that consume each value, themselves or by a subgraph nested in them."""
    consumers: defaultdict[str, list[int]] = defaultdict(list)
    for index in range(len(subgraph.nodes)):
        for name in subgraph.inputs_of(index):
            consumers[name].append(index)
    return consumers


def find_boundary(
    members: Members,
    results: Sequence[str] = (),
    leaving: Sequence[str] | None = None,
    consumers_of: Callable[[Subgraph], Mapping[str, Sequence[int]]] = consumers_by_value,
) -> Boundary:
    """Find the boundary of some nodes; annotated initializers are yet to be added.

    Args:
        members: The nodes.
        results: Values that are outputs if the nodes produce them, even if nothing consumes them;
            the first outputs, in this order.
        leaving: The names of the outputs, if they are known already.
        consumers_of: `consumers_by_value`, or a cached version of it for several calls.
    """
    sources = _Sources()
    outputs: list[SubgraphValue] = []
    for subgraph, indices in members:
        sources.add_nodes(subgraph, indices)
        names = leaving
        if names is None:
            names = leaving_values(subgraph, indices, results, consumers_of(subgraph))
        outputs += [SubgraphValue(subgraph, name) for name in names]
    order = {name: number for number, name in enumerate(results)}
    outputs.sort(key=lambda value: order.get(value.name, len(order)))
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
            if any(name in self._produced.get(outer, ()) for outer in _outwards(flow.subgraph)):
                continue
            holder = _initializer_holder(flow.subgraph, name)
            if holder is not None:
                self.initializers[SubgraphValue(holder, name)] = None
                continue
            producer = flow.producer(name)
            if producer is None:
                self.inputs[SubgraphValue(_outermost_scope(flow, name), name)] = None
                continue
            home, index = producer
            constants = self._constants.setdefault(home.subgraph, set())
            if index not in constants:
                constants.add(index)
                pending += [(home, source) for source in home.subgraph.inputs_of(index)]

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
    return flow.subgraph


def leaving_values(
    subgraph: Subgraph,
    indices: Sequence[int],
    results: Collection[str],
    consumers: Mapping[str, Sequence[int]],
) -> list[str]:
    """Find the outputs of some nodes: graph outputs, results, and what other nodes consume.

    A constant that other nodes consume does not count, because they have a copy of their own.
    Nodes without such an output give what they do not consume themselves.
    """
    produced = SubgraphPart(subgraph, tuple(indices)).values()
    own = set(indices)
    constant = subgraph.flow(max(indices) + 1).constant
    ends = {*(value.name for value in subgraph.graph.output), *results}
    leaving = [
        name
        for name in produced
        if name in ends or (name not in constant and not own.issuperset(consumers.get(name, ())))
    ]
    if not leaving:
        unused = [name for name in produced if own.isdisjoint(consumers.get(name, ()))]
        leaving = unused or list(produced)
    values = [SubgraphValue(subgraph, name) for name in leaving]
    return [value.name for value in _in_declared_order(values, "output")]


def _in_declared_order(
    values: list[SubgraphValue], kind: Literal["input", "output"]
) -> list[SubgraphValue]:
    """Sort those of the values that a graph declares as it does; all others keep their position."""
    rank: dict[SubgraphValue, int] = {}
    for subgraph in dict.fromkeys(value.subgraph for value in values):
        declared = subgraph.graph.input if kind == "input" else subgraph.graph.output
        for number, value in enumerate(declared):
            rank.setdefault(SubgraphValue(subgraph, value.name), number)
    declared_values = [value for value in values if value in rank]
    following = iter(sorted(declared_values, key=lambda value: rank[value]))
    return [next(following) if value in rank else value for value in values]
