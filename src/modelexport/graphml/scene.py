"""The picture as nested groups: modules as the module tree has them, bodies in their operators, functions beside.

A group's members are elements of the wiring and further groups; `~number` stands for a group. Group 0
is the sheet that everything lies on.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from modelexport.graph.flat import Graph
from modelexport.graphml.dialect import BODY, FUNCTION, MODULE, OPERATOR, WEIGHTS
from modelexport.graphml.wiring import Wiring, body_scope, function_scope, scopes_of
from modelexport.modules.record import ModuleRecord, NodeTag

SHEET = 0


class Group(msgspec.Struct):
    """A box with members. `name` is a module's path, a body's label or a function's key."""

    kind: str
    name: str
    parent: int
    depth: int
    element: int = -1
    """The operator that this group is, where it is one."""
    members: list[int] = []


class Scene:
    """The groups, the group of every element, and the wires, in arrays of source, output, target and slot."""

    def __init__(
        self, wiring: Wiring, tags: Sequence[NodeTag | None], modules: Mapping[str, ModuleRecord]
    ) -> None:
        self.wiring = wiring
        self.tags = tags
        self.groups = [Group("", "", -1, 0)]
        self.sources, self.outputs, self.targets, self.slots = (array("i") for _ in range(4))
        for wire in wiring.wires():
            self.sources.append(wire.source)
            self.outputs.append(wire.output)
            self.targets.append(wire.target)
            self.slots.append(wire.slot)
        graph = wiring.graph
        self.parents = array("i", bytes(4 * (len(graph.nodes) + len(wiring.terminals))))
        self._modules: dict[tuple[int, str], int] = {}
        self._scopes: dict[str, int] = {"": SHEET}  # the group of each graph
        self._bases: dict[str, str] = {}
        self.operator_groups: dict[int, int] = {}
        self._place_operators(graph)
        self._place_silent_modules(modules)
        self._place_terminals()

    def _place_operators(self, graph: Graph) -> None:
        scopes = scopes_of(graph)
        for place, key in enumerate(graph.functions):
            self._scopes[function_scope(place)] = self._add_group(FUNCTION, key, SHEET)
        for index in range(len(graph.nodes)):
            scope = scopes(index)
            base = self._scopes[scope]
            tag = self.tags[index]
            if tag is None or graph.nodes[index].function:
                group = base
            else:
                group = self._module(base, tag.hierarchy_module, self._bases.get(scope))
            self._put(index, group)
            if index in graph.bodies:
                self._open_bodies(graph, index, "" if tag is None else tag.hierarchy_module)

    def _place_silent_modules(self, modules: Mapping[str, ModuleRecord]) -> None:
        """Those that left no nodes, each where the module above it is."""
        drawn = {path: base for base, path in reversed(self._modules)}
        for path in modules:
            if path not in drawn:
                base = drawn.get(path.rpartition(".")[0], SHEET)
                self._module(base, path, None)
                drawn[path] = base

    def _open_bodies(self, graph: Graph, index: int, path: str) -> None:
        self.groups[self.parents[index]].members.pop()  # the operator is drawn as a group instead
        own = self._add_group(OPERATOR, "", self.parents[index], index)
        self.operator_groups[index] = own
        for place, body in enumerate(graph.bodies[index]):
            scope = body_scope(index, place)
            self._scopes[scope] = self._add_group(BODY, body.label, own)
            self._bases[scope] = path

    def _module(self, base: int, path: str, above: str | None) -> int:
        """The group of a module on a sheet or in a body, made with all that it lies in where there is none.

        In a body only the modules below the one that the body's operator belongs to have groups.
        """
        if base != SHEET and (path == above or (above and not path.startswith(f"{above}."))):
            return base
        missing = []
        while (base, path) not in self._modules and (base == SHEET or path != above):
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

    def _put(self, element: int, group: int) -> None:
        self.parents[element] = group
        self.groups[group].members.append(element)

    def _place_terminals(self) -> None:
        """Inputs and outputs where their graph is, weights in the innermost group that all their readers share."""
        first = len(self.wiring.graph.nodes)
        shared: dict[int, int] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            if source >= first:
                group = (
                    self.parents[target]
                    if target < first
                    else self._scopes[self.wiring.terminal(target).scope]
                )
                known = shared.get(source)
                shared[source] = group if known is None else self._common(known, group)
        for element, terminal in enumerate(self.wiring.terminals, first):
            group = self._scopes[terminal.scope]
            if terminal.kind in WEIGHTS:
                group = shared.get(element, group)
            self._put(element, group)

    @property
    def scopes(self) -> dict[int, str]:
        """The graphs that groups are: bodies and functions."""
        return {group: scope for scope, group in self._scopes.items()}

    def _common(self, first: int, second: int) -> int:
        """The innermost group that both lie in."""
        groups = self.groups
        while first != second:
            if groups[first].depth >= groups[second].depth:
                first = groups[first].parent
            else:
                second = groups[second].parent
        return first

    def meeting(self, source: int, target: int) -> tuple[int, int, int] | None:
        """The group in which a wire's ends part, and its members that they lie in; None for a wire within one."""
        first, second = self.parents[source], self.parents[target]
        inner, outer = self.operator_groups.get(source), self.operator_groups.get(target)
        one = source if inner is None else ~inner
        other = target if outer is None else ~outer
        groups = self.groups
        while first != second:
            if groups[first].depth >= groups[second].depth:
                one, first = ~first, groups[first].parent
            else:
                other, second = ~second, groups[second].parent
        return None if one == other else (first, one, other)
