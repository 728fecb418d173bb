"""Ids of the graphs and nodes that Model Explorer draws, and the edges between nodes.

The main graph, every subgraph and every local function is a graph of its own. A value that a
subgraph takes from a graph around it enters through a node of its own there, and is a further input
of the operator that has the subgraph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx

from modelexport.graph.flat import initializers_by_name
from modelexport.graphml.elements import Elements, scoped_graphs, value_key
from modelexport.graphml.format import Kind, function_scope, subgraph_scope
from modelexport.graphml.text import MOST_VALUES, describe_tensor
from modelexport.modules.tree import Ancestry, join_path
from modelexport.tagged.model import TaggedModel
from modelexport.viewing.explorer_format import IncomingEdge

MAIN = "main"
"""The id of the main graph."""


class Ids:
    """Ids that are unique: a number is added to a text that was taken before."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, text: str) -> str:
        """Return an id for a text."""
        unique = text
        while unique in self._taken:
            self._taken[text] += 1
            unique = f"{text}#{self._taken[text]}"
        self._taken[unique] = 1
        return unique


class GraphNames:
    """The ids of the graphs of a model.

    Attributes:
        of_scope: The id of the graph of each scope, the main graph first.
        of_function: The id of the graph of each local function, by its key.
        owners: The operator that has a subgraph, by the scope of the subgraph.
    """

    def __init__(self, model: TaggedModel) -> None:
        graph, ids = model.graph, Ids()
        self.of_scope: dict[str, str] = {"": ids.take(MAIN)}
        self.owners: dict[str, int] = {}
        for index, subgraphs in graph.subgraphs.items():
            node = graph.nodes[index]
            for number, subgraph in enumerate(subgraphs):
                scope = subgraph_scope(index, number)
                self.owners[scope] = index
                self.of_scope[scope] = ids.take(f"{node.op_type} {node.key}: {subgraph.label}")
        self.of_function: dict[str, str] = {}
        for number, key in enumerate(graph.functions):
            name = self.of_function[key] = ids.take(f"function {key}")
            self.of_scope[function_scope(number)] = name

    def called_by(self, model: TaggedModel, index: int) -> list[str]:
        """List the graphs that an operator leads to: its subgraphs, or the function it calls."""
        subgraphs = model.graph.subgraphs.get(index, ())
        names = [self.of_scope[subgraph_scope(index, number)] for number in range(len(subgraphs))]
        function = model.graph.nodes[index].calls_function
        return [*names, self.of_function[function]] if function else names


class Edges:
    """The edges between the elements of a model, each within one graph.

    Args:
        model: The model.
        elements: Its operators and terminals.
        names: The ids of its graphs.
        lineage: The ancestors of its modules.

    Attributes:
        scopes: The scope of the graph of each element.
        ids: The id of the node of each element.
        incoming: The edges into an element.
        captured: For each scope the nodes through which outer values enter: id by value key.
        captured_inputs: For an operator the values that its subgraphs take: which input each is
            added as, by value key.
        inlined: The values of the initializers that have no node: their consumers describe them.
    """

    def __init__(
        self, model: TaggedModel, elements: Elements, names: GraphNames, lineage: Ancestry
    ) -> None:
        self._model = model
        self._elements = elements
        self._names = names
        self._lineage = lineage
        self._node_ids = Ids()
        self._module_paths = [
            None if tag is None else tag.hierarchy_module for tag in model.effective_tags
        ]
        self._homes: dict[int, str | None] = {}
        self.scopes: list[str] = [
            *map(elements.scope, range(len(model.graph.nodes))),
            *(terminal.scope for terminal in elements.terminals),
        ]
        self.ids: list[str] = list(map(self._node_ids.take, self._describe_elements()))
        self.incoming: dict[int, list[IncomingEdge]] = {}
        self.captured: dict[str, dict[str, str]] = {scope: {} for scope in names.of_scope}
        self.captured_inputs: dict[int, dict[str, int]] = {}
        self.inlined: dict[int, str] = self._find_inlined()
        rows = zip(elements.edges, elements.edge_keys, strict=True)
        for (source, output, target, slot), key in rows:
            if source not in self.inlined:
                self._connect(source, output, key, target, slot)

    def _describe_elements(self) -> Iterator[str]:
        """Describe each element by its kind and the key of its value.

        The kind also keeps names apart that the script of a web page has other uses for.
        """
        for node in self._model.graph.nodes:
            yield f"op:{node.key}"
        for terminal in self._elements.terminals:
            yield f"{terminal.kind}:{terminal.key}"

    def _find_inlined(self) -> dict[int, str]:
        """Find the initializers that need no node: small constants of the exporter.

        Exporters store equal ones, such as shapes, once for all modules. A node for each would have
        edges to every part of the model.
        """
        elements, first = self._elements, len(self._model.graph.nodes)
        small = _small_constants(self._model)
        used: set[int] = set()
        returned: set[int] = set()
        for source, target in elements.edges.ends():
            (used if target < first else returned).add(source)
        used -= returned  # an output needs a node that gives it
        return {
            element: small[terminal.key]
            for element, terminal in enumerate(elements.terminals, first)
            if terminal.kind == Kind.INITIALIZER and terminal.key in small and element in used
        }

    def _connect(self, source: int, output: int, key: str, target: int, slot: int) -> None:
        """Add an edge from an output of an element to an input of another one."""
        node, port = self._source_in(self.scopes[target], source, output, key)
        edge = IncomingEdge(node, str(port), str(slot))
        self.incoming.setdefault(target, []).append(edge)
        is_terminal = source >= len(self._module_paths)
        if is_terminal and self.scopes[source] == self.scopes[target]:
            self._move_home(source, target)

    def _source_in(self, scope: str, source: int, output: int, key: str) -> tuple[str, int]:
        """Return the node that gives a value in a graph, and which output of it."""
        if scope == self.scopes[source]:
            return self.ids[source], output
        known = self.captured[scope].get(key)
        if known is None:
            name = f"captured:{self._names.of_scope[scope]}:{key}"
            known = self.captured[scope][key] = self._node_ids.take(name)
            owner = self._names.owners.get(scope)
            # A file is damaged if a value is from a graph that is not around the subgraph.
            if owner is not None:
                added = self.captured_inputs.setdefault(owner, {})
                if key not in added:
                    added[key] = len(self._model.graph.protos[owner].input) + len(added)
                    self._connect(source, output, key, owner, added[key])
        return known, 0

    def _move_home(self, source: int, target: int) -> None:
        """Move a terminal to the module that is around all of its consumers."""
        path = self._module_paths[target] if target < len(self._module_paths) else None
        known = self._homes.setdefault(source, path)
        if known is not None and known != path:
            self._homes[source] = None if path is None else self._lineage.common((known, path))

    def home(self, element: int) -> str | None:
        """Return the module that an operator or an initializer is drawn in; None for none."""
        if element < len(self._module_paths):
            return self._module_paths[element]
        return self._homes.get(element)


def _small_constants(model: TaggedModel) -> dict[str, str]:
    """Describe the initializers with few values that are not parameters of a module, by key."""
    parameters = {
        join_path(path, name)
        for path, record in model.modules.items()
        for name in record.direct_parameters
    }
    return {
        value_key(prefix, name): describe_tensor(tensor)
        for _, prefix, graph, _ in scoped_graphs(model.graph, model.proto)
        for name, tensor in initializers_by_name(graph).items()
        if isinstance(tensor, onnx.TensorProto)
        and math.prod(tensor.dims) <= MOST_VALUES
        and name not in parameters
    }
