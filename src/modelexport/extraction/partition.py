"""Partition a module into one extracted model per child call, in execution order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx

from modelexport.errors import FormatError
from modelexport.extraction.boundary import (
    Boundary,
    NewNames,
    OpenModel,
    SubgraphPart,
    consumers_by_value,
    find_boundary,
    leaving_values,
)
from modelexport.extraction.build import build_model
from modelexport.extraction.extract import Extraction, open_tagged
from modelexport.graph.nested import Subgraph, SubgraphValue
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import is_within
from modelexport.onnx_file.model_file import StrPath
from modelexport.options import keyword_aliases

ChildCall = tuple[str, int | None]
"""The path of a child of the module, and the number of a call; None for all its calls."""

Edges = Mapping[int, Sequence[int]]
"""For each node those that it consumes values of; nodes are numbered in an order that runs."""

_Unit = tuple[ChildCall | None, int]
"""Nodes that stay together: a call of a child or a part of one, or a single node of the module."""

_UnitEdges = dict[_Unit, dict[_Unit, None]]
"""For each unit the others that it consumes values of, in order."""


@keyword_aliases(onnx_model="path")
def partition(
    path: onnx.ModelProto | StrPath, module: str = "", *, call: int | None = None
) -> Iterator[Extraction]:
    """Partition a module into an extracted model for each call of each child, and its own nodes.

    Each extracted model takes only inputs of the module and outputs of earlier ones. Together they
    hold every node of the module, and compute what it computes, bit for bit. A child that never
    runs itself, such as a list, is replaced by its own children. A call is split where something
    outside it has to run in between.

    Args:
        path: A tagged model or its path.
        module: A tag, a module path, an alias, or a glob that matches one module.
        call: The call to partition, from 0, of a module that ran more than once; None for all.

    Yields:
        The extracted models with all their initializers, in an order that runs.

    Raises:
        ArgumentError: If there is no such module or call, or it has no nodes.
        FileError: If a file cannot be read.
        FormatError: If the model is malformed, has no tags, or its nodes are in no order that runs.
    """
    with open_tagged(path) as file:
        target = file.find(module, call)
        members = file.members(target)
        if file.is_whole_model(target):
            yield from _partition_constants(file, target)
        # Names must be the same in all extracted models; within one subgraph they cannot clash.
        new_names: NewNames = {}
        if len(members) > 1:
            new_names = find_boundary(members).with_annotated_initializers().rename_clashes()
        for subgraph, nodes in members:
            yield from _partition_subgraph(file, target, subgraph, nodes, new_names)


def _partition_constants(file: OpenModel, target: ModuleRef) -> Iterator[Extraction]:
    """Yield a model without nodes for the initializers that are outputs of the model."""
    main = file.main
    values = tuple(
        SubgraphValue(main, value.name)
        for value in main.graph.output
        if value.name in main.initializers
    )
    if values:
        extracted = build_model(file, Boundary((), (), values, values), target, "")
        yield Extraction(extracted.load(), extracted.record)


def _partition_subgraph(
    file: OpenModel, target: ModuleRef, subgraph: Subgraph, nodes: list[int], new_names: NewNames
) -> Iterator[Extraction]:
    """Yield the extracted models of the module's nodes in one subgraph."""
    values = _ModuleValues(file, target, subgraph, nodes)
    constants = set(subgraph.flow(len(subgraph.nodes)).constant.values())
    calls: dict[int, ChildCall | None] = {}
    for index in nodes:
        call = _child_call(file, target, subgraph, index)
        # The module's own constants are copied to where they are consumed.
        if call is not None or index not in constants or values.is_needed(index):
            calls[index] = call
    groups = list(order_groups(calls, values.edges(calls)))
    totals = Counter(call for call, _ in groups)
    parts: Counter[ChildCall | None] = Counter()
    for call, members in groups:
        part = parts[call] if totals[call] > 1 else None
        parts[call] += 1
        ref = target
        if call is not None:
            ref = ModuleRef(call[0], file.modules.tags.get(call[0]), call[1])
        boundary = find_boundary([(subgraph, members)], leaving=values.find_outputs(members))
        extracted = build_model(file, boundary, ref, "", part, new_names)
        yield Extraction(extracted.load(), extracted.record)


def _child_call(
    file: OpenModel, target: ModuleRef, subgraph: Subgraph, index: int
) -> ChildCall | None:
    """Return the child and the call that a node belongs to; None for the module's own nodes."""
    tag = subgraph.tags[index]
    path = target.path if tag is None else tag.hierarchy_module
    if tag is None or path == target.path or not is_within(path, target.path):
        return None
    return file.modules.child_call(path, tag.hierarchy_call, target.path)


class _ModuleValues:
    """The producers and consumers of values among the nodes of a module in one subgraph."""

    def __init__(
        self, file: OpenModel, target: ModuleRef, subgraph: Subgraph, nodes: Sequence[int]
    ) -> None:
        self._subgraph, self._nodes = subgraph, set(nodes)
        self._consumers = consumers_by_value(subgraph)
        self._constant = subgraph.flow(len(subgraph.nodes)).constant
        results = file.modules.results(target)
        self._leaving = set(leaving_values(subgraph, nodes, results, self._consumers))

    def is_needed(self, index: int) -> bool:
        """Return whether an output of a constant node leaves the module, or none is consumed."""
        names = [name for name in self._subgraph.nodes[index].output if name]
        return not self._leaving.isdisjoint(names) or all(
            self._nodes.isdisjoint(self._consumers.get(name, ())) for name in names
        )

    def edges(self, nodes: Iterable[int]) -> dict[int, list[int]]:
        """Return for each of these nodes those among them that it consumes values of."""
        producer = {name: i for i in nodes for name in self._subgraph.nodes[i].output if name}
        edges: dict[int, list[int]] = {}
        for index in nodes:
            inputs = self._subgraph.inputs_of(index)
            edges[index] = [producer[name] for name in inputs if name in producer]
            if any(other >= index for other in edges[index]):
                raise FormatError(
                    "the nodes are in no order that runs",
                    hint="a node consumes a later value, or two produce a value of the same name",
                )
        return edges

    def find_outputs(self, members: Sequence[int]) -> list[str]:
        """Return what some of the nodes give to the others, or out of the module."""
        own = set(members)
        produced = SubgraphPart(self._subgraph, tuple(members)).values()
        leaving = [
            name
            for name in produced
            if name in self._leaving
            or (name not in self._constant and not own.issuperset(self._consumers.get(name, ())))
        ]
        return leaving or list(produced)


def order_groups(
    calls: Mapping[int, ChildCall | None], edges: Edges
) -> Iterator[tuple[ChildCall | None, list[int]]]:
    """Group nodes by call, so that each group consumes only values of earlier ones.

    A call of a child is one group, unless something outside it has to run in the middle. The
    module's own nodes, whose call is None, are in as few groups as the children between them allow.

    Yields:
        The call and the nodes of each group, in an order that runs.
    """
    units = split_calls(calls, edges)
    ranks = _rank_units(units, edges)
    groups: defaultdict[tuple[int, ChildCall | None, int], list[int]] = defaultdict(list)
    for node, unit in units.items():
        call, number = unit
        groups[ranks[unit], call, 0 if call is None else number].append(node)
    for (_, call, _), nodes in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        yield call, nodes


def split_calls(calls: Mapping[int, ChildCall | None], edges: Edges) -> dict[int, _Unit]:
    """Keep each call whole, unless it is in a cycle: then split it where another has to run.

    Args:
        calls: The call of each node, None for one in no call; in an order that runs.
        edges: For each of these nodes those among them that it consumes values of.

    Returns:
        For each node the unit that it is in. Each node of no call is a unit.
    """
    whole: dict[int, _Unit] = {
        node: (call, node if call is None else -1) for node, call in calls.items()
    }
    cycles = _find_cycles(_unit_edges(whole, edges))
    depth: dict[int, int] = {}
    units: dict[int, _Unit] = {}
    for node, unit in whole.items():
        cycle = cycles.get(unit)
        # How often the longest path to the node, within the cycle, goes from one unit to another.
        depth[node] = max(
            (
                depth[other] + (whole[other] != unit)
                for other in edges[node]
                if cycle is not None and cycles.get(whole[other]) == cycle
            ),
            default=0,
        )
        is_split = cycle is not None and unit[0] is not None
        units[node] = (unit[0], depth[node]) if is_split else unit
    return units


def _unit_edges(units: Mapping[int, _Unit], edges: Edges) -> _UnitEdges:
    """Return for each unit the others that it consumes values of."""
    sources: _UnitEdges = {unit: {} for unit in units.values()}
    for node, unit in units.items():
        sources[unit].update((units[other], None) for other in edges[node] if units[other] != unit)
    return sources


def _find_cycles(sources: _UnitEdges) -> dict[_Unit, int]:
    """Number the strongly connected components of several units, by Kosaraju's algorithm."""
    consumers: _UnitEdges = {unit: {} for unit in sources}
    for unit, others in sources.items():
        for other in others:
            consumers[other][unit] = None
    cycles: dict[_Unit, int] = {}
    seen: set[_Unit] = set()
    for number, root in enumerate(reversed(_sources_first(sources))):
        component = [] if root in seen else [root]
        seen.add(root)
        for unit in component:
            new = [other for other in consumers[unit] if other not in seen]
            seen.update(new)
            component += new
        if len(component) > 1:
            cycles.update(dict.fromkeys(component, number))
    return cycles


def _sources_first(sources: _UnitEdges) -> list[_Unit]:
    """Order units by a depth-first search, each after all that it can reach, cycles aside."""
    order: list[_Unit] = []
    seen: set[_Unit] = set()
    for root in sources:
        stack = [] if root in seen else [(root, iter(sources[root]))]
        seen.add(root)
        while stack:
            unit, others = stack[-1]
            other = next((other for other in others if other not in seen), None)
            if other is None:
                order.append(unit)
                stack.pop()
            else:
                seen.add(other)
                stack.append((other, iter(sources[other])))
    return order


def _rank_units(units: Mapping[int, _Unit], edges: Edges) -> dict[_Unit, int]:
    """Number the units so that each has a greater number than all that it consumes values of.

    The module's own nodes have even numbers and children odd ones. Own nodes may have the same
    number as others that they consume: nothing has to run between them, so they are one group.
    """
    sources = _unit_edges(units, edges)
    ranks: dict[_Unit, int] = {}
    for unit in _sources_first(sources):
        is_own = unit[0] is None
        ranks[unit] = 0 if is_own else 1
        for other in sources[unit]:
            step = int(other[0] is not None) if is_own else 1 + (other[0] is not None)
            ranks[unit] = max(ranks[unit], ranks[other] + step)
    return ranks
