"""Group the nodes of a graph by the module calls they ran in, nested, in an order that runs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.extraction.partition import split_calls
from modelexport.graph.flat import Graph, nested_graphs
from modelexport.graph.nested import Subgraph, topological_order
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import NodeTag
from modelexport.modules.tree import Ancestry

Call = tuple[str, int | None]
"""The path of a module, and which of its calls, from 0; None for a module that ran once."""

_MOST_LEVELS = 100
"""How deep groups are nested at most: ONNX's checker refuses longer chains of function calls."""
_LEAST_NODES = 2
"""How many nodes a group has at least: a single operator says as much as a box around it."""


class Group:
    """Nodes of one call of a module, or of a part of one, and the groups inside it.

    Args:
        call: The call; that of the root is `("", None)`.
        members: The indices of its nodes, those of the groups inside it included.

    Attributes:
        call: The call.
        part: Which part of the call it is, from 0; None where the group is the whole call.
        members: The indices of its nodes, in an order that runs.
        items: The indices of its own nodes, and the groups inside it, in an order that runs.
        start: How many nodes come before its first one, where all groups are expanded.
    """

    def __init__(self, call: Call, members: list[int]) -> None:
        self.call = call
        self.part: int | None = None
        self.members = members
        self.items: list[int | Group] = []
        self.start = 0

    @property
    def end(self) -> int:
        """How many nodes come before the first one behind it."""
        return self.start + len(self.members)

    def inner(self) -> Iterator[Group]:
        """Iterate over the groups inside it, at any depth, each before those inside it."""
        pending = [self]
        while pending:
            group = pending.pop()
            if group is not self:
                yield group
            pending += [item for item in reversed(group.items) if isinstance(item, Group)]

    def expand(self) -> list[int]:
        """List its nodes as they stand where all groups are expanded; set `start` of the groups."""
        order: list[int] = []
        pending: list[int | Group] = [self]
        while pending:
            item = pending.pop()
            if isinstance(item, Group):
                item.start = len(order)
                pending += reversed(item.items)
            else:
                order.append(item)
        return order


class ModuleCalls:
    """The module calls around a node.

    A module that never ran itself, such as a list, is not among them, and neither is one of which
    it is unknown in which of its calls a node ran.

    Args:
        modules: The modules of the file.
        tags: The tags of its nodes.
        depth: How many levels of modules below the root to distinguish; None for all, up to 100.
        all_modules: Whether modules without a tag of their own count as well.
    """

    def __init__(
        self,
        modules: ModuleIndex,
        tags: Iterable[NodeTag | None],
        depth: int | None = None,
        all_modules: bool = False,
    ) -> None:
        self._modules = modules
        self._ancestry = Ancestry(modules.records)
        self._depth = min(depth or _MOST_LEVELS, _MOST_LEVELS)
        self._all = all_modules
        self._with_own_nodes = {tag.hierarchy_module for tag in tags if tag is not None}
        self._around = functools.cache(self._find)

    def around(self, tag: NodeTag | None) -> tuple[Call, ...]:
        """Return the calls that a node with a tag ran in, outermost first, without the root."""
        return () if tag is None else self._around(tag.hierarchy_module, tag.hierarchy_call)

    def _find(self, path: str, call: int | None) -> tuple[Call, ...]:
        modules = self._modules
        calls: list[Call] = []
        inner = path
        for above in reversed(self._ancestry.of(path)[1:]):
            ran = modules.call_count(above)
            if not ran and above in modules.records and above not in self._with_own_nodes:
                continue
            if ran > 1:
                number = modules.call_within(inner, call, above)
                if number is None:
                    continue
                inner, call, known = above, number, number
            else:
                inner, call, known = above, 0, None
            if self._all or modules.tags.get(above) is not None:
                calls.append((above, known))
        return tuple(reversed(calls))[: self._depth]


class MainNodes(NamedTuple):
    """The names that each node of the main graph consumes and produces, omitted ones left out."""

    inputs: list[Sequence[str]]
    """Those that its subgraphs capture among them."""
    outputs: list[Sequence[str]]

    def find_sources(self) -> list[list[int]]:
        """Return for each node those that it consumes values of.

        Raises:
            FormatError: Two nodes produce a value of the same name.
        """
        producer = {name: index for index, names in enumerate(self.outputs) for name in names}
        if len(producer) < sum(map(len, self.outputs)):
            raise FormatError("two nodes produce a value of the same name", hint="export it again")
        return [[producer[name] for name in names if name in producer] for names in self.inputs]


def read_main_nodes(graph: Graph) -> MainNodes:
    """Return the names that the nodes of the main graph consume and produce, in file order."""
    main = MainNodes([], [])
    for index, node in enumerate(graph.nodes):
        if node.enclosing >= 0 or node.function:
            continue
        captured: list[str] = []
        if index in graph.subgraphs:
            for _, subgraph in nested_graphs(graph.protos[index].attribute):
                captured += Subgraph(subgraph).captured
        main.inputs.append((*node.inputs, *captured) if captured else node.inputs)
        main.outputs.append(node.outputs)
    return main


def group_nodes(calls: Sequence[tuple[Call, ...]], sources: Sequence[Sequence[int]]) -> Group:
    """Group nodes by call, each group in one place.

    A call is one group, unless nodes outside it have to run in the middle: then it is split. The
    order is that of the file as far as groups allow it. Takes time linear in edges and levels.

    Args:
        calls: For each node the calls around it, outermost first.
        sources: For each node those that it consumes values of.

    Returns:
        The group of the root, with all nodes.

    Raises:
        FormatError: The graph has a cycle.
    """
    return _Grouping(calls, sources).root


class _Grouping:
    def __init__(self, calls: Sequence[tuple[Call, ...]], sources: Sequence[Sequence[int]]) -> None:
        self._calls = calls
        self._sources = sources
        self._owner = [0] * len(calls)
        """The group that each node is in, by number: the innermost that was made so far."""
        self._unit = [0] * len(calls)
        self.root = Group(("", None), self._sorted())
        pending = [(self.root, 0)]
        for number, (group, level) in enumerate(pending):
            for node in group.members:
                self._owner[node] = number
            group.items = self._divide(group.members, level, number)
            pending += [(item, level + 1) for item in group.items if isinstance(item, Group)]

    def _sorted(self) -> list[int]:
        """Return all nodes in an order that runs, that of the file wherever it does."""
        sources = self._sources
        if all(other < node for node, others in enumerate(sources) for other in others):
            return list(range(len(sources)))
        consumers: list[list[int]] = [[] for _ in sources]
        for node, others in enumerate(sources):
            for other in others:
                consumers[other].append(node)
        return topological_order(consumers, strict=True)

    def _divide(self, members: list[int], level: int, owner: int) -> list[int | Group]:
        """Divide nodes of one group into its own nodes and inner groups, in an order that runs."""
        calls = {
            node: self._calls[node][level] if len(self._calls[node]) > level else None
            for node in members
        }
        if not any(calls.values()):
            return list(members)
        units = {node: node if call is None else call for node, call in calls.items()}
        try:
            parts = self._order(units, owner)
        except FormatError:  # a call and something outside it wait for each other
            edges = {node: self._inside(node, owner) for node in members}
            parts = self._order(split_calls(calls, edges), owner)
        pieces: list[int | Group] = []
        for part in parts:
            call = calls[part[0]]
            if call is None or len(part) < _LEAST_NODES:
                pieces += part
            else:
                pieces.append(Group(call, part))
        _number_parts(pieces)
        return pieces

    def _inside(self, node: int, owner: int) -> list[int]:
        return [other for other in self._sources[node] if self._owner[other] == owner]

    def _order(self, units: Mapping[int, object], owner: int) -> list[list[int]]:
        """Return the nodes of each unit, the units in an order that runs."""
        numbers: dict[object, int] = {}
        parts: list[list[int]] = []
        unit_of, owners = self._unit, self._owner
        for node, unit in units.items():
            number = numbers.setdefault(unit, len(parts))
            if number == len(parts):
                parts.append([])
            parts[number].append(node)
            unit_of[node] = number
        consumers: list[list[int]] = [[] for _ in parts]
        for node in units:
            number = unit_of[node]
            for other in self._sources[node]:
                if owners[other] == owner and unit_of[other] != number:
                    consumers[unit_of[other]].append(number)
        return [parts[number] for number in topological_order(consumers, strict=True)]


def _number_parts(pieces: Iterable[int | Group]) -> None:
    """Number the groups of each call that has several."""
    groups = [piece for piece in pieces if isinstance(piece, Group)]
    totals = Counter(group.call for group in groups)
    seen: Counter[Call] = Counter()
    for group in groups:
        if totals[group.call] > 1:
            group.part = seen[group.call]
            seen[group.call] += 1
