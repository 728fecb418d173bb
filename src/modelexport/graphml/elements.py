"""The elements of a drawing, the edges between them, and the groups that they lie in.

Elements are numbered: the operators of all graphs in the order of the flat graph, then the
terminals: the inputs, initializers and outputs of every graph. An edge is one use of a value.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Container, Mapping, Sequence

import msgspec
import numpy as np
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, as_text, nested_graphs, subgraph_prefix
from modelexport.graphml.format import (
    FUNCTION,
    INITIALIZER,
    INITIALIZERS,
    INPUT,
    MODULE,
    OPERATOR,
    OUTPUT,
    SPARSE,
    SUBGRAPH,
    function_scope,
    subgraph_scope,
)
from modelexport.modules.record import ModuleRecord, NodeTag

SHEET = 0
"""The group that holds everything else."""
_GRAPH_TYPES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


class Terminal(msgspec.Struct, frozen=True, gc=False):
    """An input, initializer or output: its graph, its position there, its name and value key."""

    kind: str
    scope: str
    position: int
    name: str
    key: str


class Edges:
    """Edges in columns: source element and its output, target element and its input."""

    def __init__(self) -> None:
        self.sources, self.outputs, self.targets, self.inputs = (array("i") for _ in range(4))

    def __len__(self) -> int:
        return len(self.sources)

    def append(self, source: int, output: int, target: int, slot: int) -> None:
        """Add an edge from an output of one element to an input of another."""
        self.sources.append(source)
        self.outputs.append(output)
        self.targets.append(target)
        self.inputs.append(slot)

    def table(self) -> np.ndarray:
        """Return the edges as the rows of an array: source, output, target, input."""
        columns = (self.sources, self.outputs, self.targets, self.inputs)
        return np.stack([np.asarray(column, np.int32) for column in columns], axis=1)


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
        main = proto.graph
        declared = set(graph.initializers)  # IR version 3 lists initializers as inputs, too
        inputs = [value.name for value in main.input]
        self._add(INPUT, "", inputs, inputs, skip=declared)
        self._add_initializers("", "", main)
        self._add(OUTPUT, "", graph.outputs, graph.outputs)
        for index, subgraphs in graph.bodies.items():
            nested = nested_graphs(graph.protos[index].attribute)
            for position, (subgraph, (label, inner)) in enumerate(
                zip(subgraphs, nested, strict=True)
            ):
                scope = subgraph_scope(index, position)
                prefix = subgraph_prefix(graph.nodes[index].key, label)
                self._add(INPUT, scope, [v.name for v in inner.input], subgraph.inputs)
                self._add_initializers(scope, prefix, inner)
                self._add(OUTPUT, scope, [v.name for v in inner.output], subgraph.outputs)
        for position, (declaration, function) in enumerate(
            zip(graph.functions.values(), proto.functions, strict=True)
        ):
            scope = function_scope(position)
            self._add(INPUT, scope, function.input, declaration.inputs)
            self._add(OUTPUT, scope, function.output, declaration.outputs)
        self._output_positions = self._find_output_positions()
        self.edges = self._connect()

    def _add(
        self,
        kind: str,
        scope: str,
        names: Sequence[str],
        keys: Sequence[str],
        skip: Container[str] = (),
    ) -> None:
        for position, (name, key) in enumerate(zip(names, keys, strict=True)):
            if name not in skip:
                if kind != OUTPUT:
                    self._terminal_of[key] = len(self.graph.nodes) + len(self.terminals)
                self.terminals.append(Terminal(kind, scope, position, name, key))

    def _add_initializers(self, scope: str, prefix: str, graph: onnx.GraphProto) -> None:
        dense = [tensor.name for tensor in graph.initializer]
        sparse = [tensor.values.name for tensor in graph.sparse_initializer]
        for kind, names in ((INITIALIZER, dense), (SPARSE, sparse)):
            self._add(kind, scope, names, [value_key(prefix, name) for name in names])

    def _find_output_positions(self) -> dict[str, int]:
        """Return the position of each value among the outputs of its node, where it is not 0."""
        positions: dict[str, int] = {}
        for index, node in enumerate(self.graph.nodes):
            if len(node.outputs) > 1 or node.gaps:
                outputs = zip(node.outputs, self.slots(index, "output"), strict=True)
                positions |= (
                    (key, position)
                    for key, position in outputs
                    if self.graph.producer[key] == index
                )
        return positions

    def _connect(self) -> Edges:
        edges = Edges()
        for index, node in enumerate(self.graph.nodes):
            for slot, key in zip(self.slots(index, "input"), node.inputs, strict=True):
                source = self.source(key)
                if source is not None:
                    edges.append(*source, index, slot)
        for element, terminal in enumerate(self.terminals, len(self.graph.nodes)):
            source = self.source(terminal.key) if terminal.kind == OUTPUT else None
            if source is not None:
                edges.append(*source, element, 0)
        return edges

    def source(self, key: str) -> tuple[int, int] | None:
        """Find the element that gives a value.

        Args:
            key: The key of the value.

        Returns:
            The element and the position among its outputs; None for an undefined value.
        """
        index = self.graph.producer.get(key)
        if index is not None:
            return index, self._output_positions.get(key, 0)
        element = self._terminal_of.get(key)
        return None if element is None else (element, 0)

    def slots(self, index: int, field: str) -> Sequence[int]:
        """Return the positions of an operator's inputs or outputs that are not left out."""
        node = self.graph.nodes[index]
        if not node.gaps:
            return range(len(node.inputs if field == "input" else node.outputs))
        names = getattr(self.graph.protos[index], field)
        return [position for position, name in enumerate(names) if name]

    def terminal(self, element: int) -> Terminal:
        """Return the terminal with the number of an element."""
        return self.terminals[element - len(self.graph.nodes)]


def find_scopes(graph: Graph) -> Callable[[int], str]:
    """Return a function from an operator's index to the scope of the graph that it is in."""
    functions = {key: function_scope(position) for position, key in enumerate(graph.functions)}

    def scope(index: int) -> str:
        node = graph.nodes[index]
        if node.enclosing >= 0:
            return subgraph_scope(node.enclosing, node.body)
        return functions[node.function] if node.function else ""

    return scope


def value_key(prefix: str, name: str) -> str:
    """Return the key of a value in a graph with this prefix."""
    return prefix + as_text(name) if prefix else name


def structure_digest(graph: Graph) -> str:
    """Digest the operators in their order, with attributes, and the terminals of every graph.

    Args:
        graph: The flat graph.

    Returns:
        The digest in hexadecimal, as the key `topology` has it.
    """
    digest = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    for node, proto in zip(graph.nodes, graph.protos, strict=True):
        digest.update(encode(node))
        for attribute in proto.attribute:
            if attribute.type not in _GRAPH_TYPES:
                digest.update(attribute.SerializeToString())
    subgraphs = [(index, each) for index, inside in graph.bodies.items() for each in inside]
    for index, each in [*subgraphs, *enumerate(graph.functions.values())]:
        names = list(each.initializers)
        digest.update(encode((index, each.label, each.inputs, each.outputs, names, each.declared)))
    digest.update(encode((graph.inputs, graph.outputs, graph.initializers)))
    return digest.hexdigest()[:32]


class Group(msgspec.Struct):
    """A box with members: elements, and `~number` for a group.

    `name` is a module's path, a subgraph's label or a function's key.
    """

    kind: str
    name: str
    parent: int
    depth: int
    element: int = -1
    """The operator that is drawn as this group, to hold its subgraphs; -1 for none."""
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
        self.tags = tags
        self.groups = [Group("", "", -1, 0)]
        graph = elements.graph
        self.parents = array("i", bytes(4 * (len(graph.nodes) + len(elements.terminals))))
        self.operator_groups: dict[int, int] = {}
        self._modules: dict[tuple[int, str], int] = {}
        self._graph_groups: dict[str, int] = {"": SHEET}
        self._module_around: dict[str, str] = {}  # of an operator with subgraphs, by their scopes
        self._add_operators(graph)
        self._add_modules_without_nodes(modules)
        self._add_terminals()

    def _add_operators(self, graph: Graph) -> None:
        scopes = find_scopes(graph)
        for position, key in enumerate(graph.functions):
            self._graph_groups[function_scope(position)] = self._add_group(FUNCTION, key, SHEET)
        for index in range(len(graph.nodes)):
            scope = scopes(index)
            group = self._graph_groups[scope]
            tag = self.tags[index]
            if tag is not None and not graph.nodes[index].function:
                around = self._module_around.get(scope)
                group = self._module_group(group, tag.hierarchy_module, around)
            if index in graph.bodies:
                module = "" if tag is None else tag.hierarchy_module
                self._add_operator_group(graph, index, group, module)
            else:
                self._add_element(index, group)

    def _add_operator_group(self, graph: Graph, index: int, parent: int, module: str) -> None:
        self.parents[index] = parent
        own = self.operator_groups[index] = self._add_group(OPERATOR, "", parent, index)
        for position, subgraph in enumerate(graph.bodies[index]):
            scope = subgraph_scope(index, position)
            self._graph_groups[scope] = self._add_group(SUBGRAPH, subgraph.label, own)
            self._module_around[scope] = module

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
            group = self._modules[base, path] = self._add_group(MODULE, path, group)
        return group

    def _add_group(self, kind: str, name: str, parent: int, element: int = -1) -> int:
        number = len(self.groups)
        self.groups.append(Group(kind, name, parent, self.groups[parent].depth + 1, element))
        self.groups[parent].members.append(~number)
        return number

    def _add_element(self, element: int, group: int) -> None:
        self.parents[element] = group
        self.groups[group].members.append(element)

    def _add_terminals(self) -> None:
        """Add inputs and outputs to their graph, initializers to what all their consumers share."""
        elements = self.elements
        first = len(elements.graph.nodes)
        shared: dict[int, int] = {}
        for source, target in zip(elements.edges.sources, elements.edges.targets, strict=True):
            if source >= first:
                if target < first:
                    group = self.parents[target]
                else:
                    group = self._graph_groups[elements.terminal(target).scope]
                shared[source] = self._common_group(shared.get(source, group), group)
        for element, terminal in enumerate(elements.terminals, first):
            group = self._graph_groups[terminal.scope]
            if terminal.kind in INITIALIZERS:
                group = shared.get(element, group)
            self._add_element(element, group)

    def scopes(self) -> dict[int, str]:
        """Return the scopes of the groups that are graphs: subgraphs and functions."""
        return {group: scope for scope, group in self._graph_groups.items()}

    def _common_group(self, first: int, second: int) -> int:
        groups = self.groups
        while first != second:
            if groups[first].depth >= groups[second].depth:
                first = groups[first].parent
            else:
                second = groups[second].parent
        return first

    def common_members(self, source: int, target: int) -> tuple[int, int, int] | None:
        """Find where an edge is drawn.

        Args:
            source: The element that the edge leaves.
            target: The element that it enters.

        Returns:
            The innermost group around both ends, and its members that are or hold them; None
            if that is one member.
        """
        outer, inner = self.operator_groups.get(source), self.operator_groups.get(target)
        one = source if outer is None else ~outer
        other = target if inner is None else ~inner
        first, second = self.parents[source], self.parents[target]
        groups = self.groups
        while first != second:
            if groups[first].depth >= groups[second].depth:
                one, first = ~first, groups[first].parent
            else:
                other, second = ~second, groups[second].parent
        return None if one == other else (first, one, other)
