"""The elements of a drawing, the edges between them, and the groups that they lie in.

Elements are numbered: the operators of all graphs in the order of the flat graph, then the
terminals: the inputs, initializers and outputs of every graph. An edge is one use of a value.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, as_text, nested_graphs, subgraph_prefix
from modelexport.graphml.format import INITIALIZERS, Kind, function_scope, subgraph_scope
from modelexport.modules.record import ModuleRecord, NodeTag

SHEET = 0
"""The group that holds everything else."""
_GRAPH_TYPES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


class ScopedGraph(NamedTuple):
    """A graph of a model: its scope, the prefix of its keys, and the keys of its outputs."""

    scope: str
    prefix: str
    proto: onnx.GraphProto
    outputs: Sequence[str]


def scoped_graphs(graph: Graph, proto: onnx.ModelProto) -> Iterator[ScopedGraph]:
    """Iterate over the main graph of a model and its subgraphs, outer ones first."""
    yield ScopedGraph("", "", proto.graph, graph.outputs)
    for index, subgraphs in graph.subgraphs.items():
        nested = nested_graphs(graph.protos[index].attribute)
        for position, (subgraph, (label, inner)) in enumerate(zip(subgraphs, nested, strict=True)):
            prefix = subgraph_prefix(graph.nodes[index].key, label)
            yield ScopedGraph(subgraph_scope(index, position), prefix, inner, subgraph.outputs)


class Terminal(msgspec.Struct, frozen=True, gc=False):
    """An input, initializer or output: its graph, its position there, its name and value key."""

    kind: str
    scope: str
    position: int
    name: str
    key: str


class Edges:
    """Edges in rows of four numbers: source element, its output, target element, its input."""

    def __init__(self) -> None:
        self.numbers: array[int] = array("i")

    def __len__(self) -> int:
        return len(self.numbers) // 4

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        numbers = iter(self.numbers)
        return zip(numbers, numbers, numbers, numbers, strict=True)

    def append(self, source: int, output: int, target: int, slot: int) -> None:
        """Add an edge from an output of one element to an input of another."""
        self.numbers.extend((source, output, target, slot))

    def ends(self) -> Iterator[tuple[int, int]]:
        """Iterate over the source and target elements."""
        return zip(self.numbers[::4], self.numbers[2::4], strict=True)

    def table(self) -> np.ndarray:
        """Return a copy as an array with a row for each edge."""
        return np.array(self.numbers, np.int32).reshape(-1, 4)


class Elements:
    """The elements of a flat graph and the edges between them."""

    def __init__(self, graph: Graph, proto: onnx.ModelProto) -> None:
        """Number the elements.

        Args:
            graph: The flat graph.
            proto: The model; nodes of its main graph and values of initializers may be absent.

        Raises:
            FormatError: If two local functions have the same name.
        """
        if len(graph.functions) != len(proto.functions):
            raise FormatError(
                "two local functions have the same name", hint="ONNX allows one of each"
            )
        self.graph = graph
        self.terminals: list[Terminal] = []
        self._terminal_of: dict[str, int] = {}
        for each in scoped_graphs(graph, proto):
            self._add_graph(each)
        self._function_scopes: dict[str, str] = {}
        for position, (key, function) in enumerate(graph.functions.items()):
            scope = self._function_scopes[key] = function_scope(position)
            self._add(Kind.INPUT, scope, proto.functions[position].input, function.inputs)
            self._add(Kind.OUTPUT, scope, proto.functions[position].output, function.outputs)
        self._output_positions = self._find_output_positions()
        self.edges: Edges = Edges()
        self.edge_keys: list[str] = []
        """The key of the value of each edge."""
        for index, node in enumerate(graph.nodes):
            for slot, key in zip(self._slots(index, "input"), node.inputs, strict=True):
                self._connect(key, index, slot)
        for element, terminal in enumerate(self.terminals, len(graph.nodes)):
            if terminal.kind == Kind.OUTPUT:
                self._connect(terminal.key, element, 0)

    def _add_graph(self, graph: ScopedGraph) -> None:
        proto = graph.proto
        dense = [tensor.name for tensor in proto.initializer]
        sparse = [tensor.values.name for tensor in proto.sparse_initializer]
        # IR version 3 lists the main graph's initializers as inputs, too.
        declared = () if graph.scope else {*dense, *sparse}
        inputs = [value.name for value in proto.input]
        for kind, names in ((Kind.INPUT, inputs), (Kind.INITIALIZER, dense), (Kind.SPARSE, sparse)):
            keys = [value_key(graph.prefix, name) for name in names]
            self._add(kind, graph.scope, names, keys, declared if kind == Kind.INPUT else ())
        self._add(Kind.OUTPUT, graph.scope, [value.name for value in proto.output], graph.outputs)

    def _add(
        self,
        kind: str,
        scope: str,
        names: Iterable[str],
        keys: Iterable[str],
        skip: Container[str] = (),
    ) -> None:
        for position, (name, key) in enumerate(zip(names, keys, strict=True)):
            if name not in skip:
                if kind != Kind.OUTPUT:
                    self._terminal_of[key] = len(self.graph.nodes) + len(self.terminals)
                self.terminals.append(Terminal(kind, scope, position, name, key))

    def _find_output_positions(self) -> dict[str, int]:
        """Return the position of each value among the outputs of its node, where it is not 0."""
        positions: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            if len(node.outputs) > 1 or node.gaps:
                for key, position in zip(node.outputs, self._slots(index, "output"), strict=True):
                    if self.graph.producer[key] == index:
                        positions[key] = position
        return positions

    def _connect(self, key: str, target: int, slot: int) -> None:
        source = self.source(key)
        if source is not None:
            self.edges.append(*source, target, slot)
            self.edge_keys.append(key)

    def source(self, key: str) -> tuple[int, int] | None:
        """Return the element that gives a value, and which of its outputs; None if it is none."""
        index = self.graph.producer.get(key)
        if index is not None:
            return index, self._output_positions.get(key, 0)
        element = self._terminal_of.get(key)
        return None if element is None else (element, 0)

    def _slots(self, index: int, field: str) -> Sequence[int]:
        """Return the positions of an operator's inputs or outputs that are not left out."""
        node = self.graph.nodes[index]
        if not node.gaps:
            return range(len(node.inputs if field == "input" else node.outputs))
        names = getattr(self.graph.protos[index], field)
        return [position for position, name in enumerate(names) if name]

    def scope(self, index: int) -> str:
        """Return the scope of the graph that an operator is in."""
        node = self.graph.nodes[index]
        if node.enclosing >= 0:
            return subgraph_scope(node.enclosing, node.subgraph_number)
        return self._function_scopes[node.function] if node.function else ""

    def terminal(self, element: int) -> Terminal:
        """Return the terminal with the number of an element."""
        return self.terminals[element - len(self.graph.nodes)]


def value_key(prefix: str, name: str) -> str:
    """Return the key of a value in a graph with this prefix."""
    return prefix + as_text(name) if prefix else name


def structure_digest(graph: Graph) -> str:
    """Return the key `topology`: a digest of all operators, their attributes and terminals."""
    digest = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for node, proto in zip(graph.nodes, graph.protos, strict=True):
        digest.update(encode(node))
        for attribute in proto.attribute:
            if attribute.type not in _GRAPH_TYPES:
                digest.update(attribute.SerializeToString())
    subgraphs = [(index, each) for index, inside in graph.subgraphs.items() for each in inside]
    for index, each in [*subgraphs, *enumerate(graph.functions.values())]:
        names = list(each.initializers)
        digest.update(encode((index, each.label, each.inputs, each.outputs, names, each.declared)))
    digest.update(encode((graph.inputs, graph.outputs, graph.initializers)))
    return digest.hexdigest()[:32]


class Group(msgspec.Struct):
    """A box with members: elements, and `~number` for a group.

    `name` is a module's path, a subgraph's label or a function's key; `scope` that of a subgraph
    or function. `element` is the operator that is drawn as this group, to hold its subgraphs; -1
    for none.
    """

    kind: str
    name: str
    parent: int
    depth: int
    element: int = -1
    scope: str = ""
    members: list[int] = []


class GroupTree:
    """The groups, outer ones before inner ones, and the group of every element.

    Modules are nested as in the module tree; subgraphs lie in the group of their operator, local
    functions on the sheet.
    """

    def __init__(
        self,
        elements: Elements,
        tags: Sequence[NodeTag | None],
        modules: Mapping[str, ModuleRecord],
    ) -> None:
        self.elements = elements
        self.groups: list[Group] = [Group("", "", -1, 0)]
        graph = elements.graph
        self.parents: array[int] = array(
            "i", bytes(4 * (len(graph.nodes) + len(elements.terminals)))
        )
        self.operator_groups: dict[int, int] = {}
        self._modules: dict[tuple[int, str], int] = {}
        self._graph_groups: dict[str, int] = {"": SHEET}
        self._module_around: dict[str, str] = {}  # of an operator with subgraphs, by their scopes
        self._add_operators(graph, tags)
        self._add_modules_without_nodes(modules)
        self._add_terminals()

    def _add_operators(self, graph: Graph, tags: Sequence[NodeTag | None]) -> None:
        for position, key in enumerate(graph.functions):
            self._add_group(Kind.FUNCTION, key, SHEET, scope=function_scope(position))
        for index in range(len(graph.nodes)):
            scope = self.elements.scope(index)
            group = self._graph_groups[scope]
            tag = tags[index]
            if tag is not None and not graph.nodes[index].function:
                around = self._module_around.get(scope)
                group = self._module_group(group, tag.hierarchy_module, around)
            if index not in graph.subgraphs:
                self._add_element(index, group)
                continue
            self.parents[index] = group
            own = self.operator_groups[index] = self._add_group(Kind.OPERATOR, "", group, index)
            for position, subgraph in enumerate(graph.subgraphs[index]):
                scope = subgraph_scope(index, position)
                self._add_group(Kind.SUBGRAPH, subgraph.label, own, scope=scope)
                self._module_around[scope] = "" if tag is None else tag.hierarchy_module

    def _add_modules_without_nodes(self, modules: Mapping[str, ModuleRecord]) -> None:
        """Add each empty module where its parent module is."""
        bases = {path: base for base, path in reversed(self._modules)}
        for path in modules:
            if path not in bases:
                bases[path] = bases.get(path.rpartition(".")[0], SHEET)
                self._module_group(bases[path], path, None)

    def _module_group(self, base: int, path: str, around: str | None) -> int:
        """Return a module's group on the sheet or in a subgraph; add it with its ancestors.

        In a subgraph only modules below the module `around` it have groups.
        """
        if base != SHEET and (path == around or (around and not path.startswith(f"{around}."))):
            return base
        missing = []
        while (base, path) not in self._modules and (base == SHEET or path != around):
            missing.append(path)
            if not path:
                break
            path = path.rpartition(".")[0]
        group = self._modules.get((base, path), base)
        for path in reversed(missing):
            group = self._modules[base, path] = self._add_group(Kind.MODULE, path, group)
        return group

    def _add_group(
        self, kind: str, name: str, parent: int, element: int = -1, scope: str = ""
    ) -> int:
        number = len(self.groups)
        depth = self.groups[parent].depth + 1
        self.groups.append(Group(kind, name, parent, depth, element, scope))
        self.groups[parent].members.append(~number)
        if scope:
            self._graph_groups[scope] = number
        return number

    def _add_element(self, element: int, group: int) -> None:
        self.parents[element] = group
        self.groups[group].members.append(element)

    def _add_terminals(self) -> None:
        """Add inputs and outputs to their graph, initializers to what all their consumers share."""
        elements = self.elements
        first = len(elements.graph.nodes)
        shared: dict[int, int] = {}
        for source, target in elements.edges.ends():
            if source >= first:
                if target < first:
                    group = self.parents[target]
                else:
                    group = self._graph_groups[elements.terminal(target).scope]
                shared[source] = self._meet(0, shared.get(source, group), 0, group)[0]
        for element, terminal in enumerate(elements.terminals, first):
            group = self._graph_groups[terminal.scope]
            if terminal.kind in INITIALIZERS:
                group = shared.get(element, group)
            self._add_element(element, group)

    def common_members(self, source: int, target: int) -> tuple[int, int, int] | None:
        """Find where the edge between two elements is drawn.

        Returns:
            The innermost group around both, and its members that are or hold them; None if that
            is one member.
        """
        outer, inner = self.operator_groups.get(source), self.operator_groups.get(target)
        one = source if outer is None else ~outer
        other = target if inner is None else ~inner
        common = self._meet(one, self.parents[source], other, self.parents[target])
        return None if common[1] == common[2] else common

    def _meet(self, one: int, first: int, other: int, second: int) -> tuple[int, int, int]:
        """Go up from members of two groups to the group that is around both."""
        groups = self.groups
        while first != second:
            if groups[first].depth >= groups[second].depth:
                one, first = ~first, groups[first].parent
            else:
                other, second = ~second, groups[second].parent
        return first, one, other
