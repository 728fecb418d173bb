"""Partition a module into one extracted model per child call, in execution order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx

from modelexport.errors import FormatError
from modelexport.extraction.boundary import Boundary, find_boundary, leaving_of
from modelexport.extraction.build import Renamed, build_model, clashes
from modelexport.extraction.extract import Extraction, OpenModel, open_tagged
from modelexport.extraction.initializers import load_initializers
from modelexport.graph.nested import Subgraph, SubgraphValue
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import is_within
from modelexport.onnx_file.model_file import StrPath
from modelexport.options import keyword_aliases


@keyword_aliases(onnx_model="path")
def partition(
    path: onnx.ModelProto | StrPath, module: str = "", *, call: int | None = None
) -> Iterator[Extraction]:
    """Take a module apart: a piece for each call of each child, and pieces of the module's own nodes between them.

    The pieces come in an order in which they can be run: each takes (`record.inputs`) what the
    module is given or what an earlier one gives (`record.outputs`). Together they hold every node of
    the module, and compute what it computes, bit for bit. A child that never runs itself, such as a
    list, stands for its own children. A call is split where something outside it runs in between.
    """
    with open_tagged(path) as file:
        target = file.find(module, call)
        members = file.members(target)
        if file.is_all(target):
            yield from _constants(file, target)
        renamed = (
            clashes(find_boundary(members)) if len(members) > 1 else {}
        )  # one level has no name twice
        for level, places in members:
            yield from _partition_subgraph(file, target, level, places, renamed)


def _constants(file: OpenModel, target: ModuleRef) -> Iterator[Extraction]:
    """A piece without nodes for what a model gives back though no node makes it."""
    main = file.source.main
    given = tuple(
        SubgraphValue(main, value.name) for value in main.graph.output if value.name in main.weights
    )
    if given:
        piece = build_model(file.source, Boundary((), (), given, given), target, "")
        yield Extraction(load_initializers(piece, file.weights), piece.record)


def _partition_subgraph(
    file: OpenModel, target: ModuleRef, level: Subgraph, places: list[int], renamed: Renamed
) -> Iterator[Extraction]:
    """The pieces of one level."""
    flow = level.flow(len(level.nodes))
    readers = _Readers(level, places, leaving_of(level, places, file.modules.results(target)))
    constant = set(flow.constant.values())
    keys: dict[int, Key | None] = {}
    for place in places:
        key = _child(file, target, level, place)
        if key is not None or place not in constant or readers.needed(place):
            keys[place] = key
    pieces = list(order_groups(keys, readers.edges(keys)))
    counts = Counter(key for key, _ in pieces)
    seen: Counter[Key | None] = Counter()
    for key, members in pieces:
        part = seen[key] if counts[key] > 1 else None
        seen[key] += 1
        child = target if key is None else ModuleRef(key[0], file.modules.tags.get(key[0]), key[1])
        piece = find_boundary([(level, members)], leaving=readers.leaving(members))
        built = build_model(file.source, piece, child, "", part, renamed)
        yield Extraction(load_initializers(built, file.weights), built.record)


def _child(file: OpenModel, target: ModuleRef, level: Subgraph, place: int) -> Key | None:
    """The child and the call of it that a node belongs to; None for the module's own nodes."""
    tag = level.tags[place]
    if (
        tag is None
        or not is_within(tag.hierarchy_module, target.path)
        or tag.hierarchy_module == target.path
    ):
        return None
    return file.modules.child_call(tag.hierarchy_module, tag.hierarchy_call, target.path)


class _Readers:
    """Who reads what among the nodes of a module in one level."""

    def __init__(self, level: Subgraph, places: Sequence[int], leaving: Sequence[str]) -> None:
        self._level = level
        self._leaving = set(leaving)
        self._constant = level.flow(len(level.nodes)).constant
        self._maker = {
            name: place for place in places for name in level.nodes[place].output if name
        }
        self._reads = {place: level.reads(place) for place in places}
        self._read_by: dict[str, list[int]] = {}
        for place, names in self._reads.items():
            for name in names:
                self._read_by.setdefault(name, []).append(place)

    def needed(self, place: int) -> bool:
        """Whether what a constant node makes leaves the module, or is read by nobody in it."""
        names = [name for name in self._level.nodes[place].output if name]
        return any(name in self._leaving for name in names) or not any(
            name in self._read_by for name in names
        )

    def edges(self, kept: Mapping[int, object]) -> dict[int, list[int]]:
        """For each of these nodes those among them that it reads from, all of which come before it."""
        makers = {place: map(self._maker.get, self._reads[place]) for place in kept}
        edges = {
            place: [maker for maker in found if maker is not None and maker in kept]
            for place, found in makers.items()
        }
        if any(maker >= place for place, found in edges.items() for maker in found):
            raise FormatError(
                "the nodes are in no order that runs",
                hint="one reads what comes after it, or two make a tensor of the same name",
            )
        return edges

    def leaving(self, members: Sequence[int]) -> list[str]:
        """What a piece gives: to other pieces, or out of the module."""
        own = set(members)
        made = [name for place in members for name in self._level.nodes[place].output if name]
        given = [
            name
            for name in made
            if name in self._leaving
            or (
                name not in self._constant
                and any(reader not in own for reader in self._read_by.get(name, ()))
            )
        ]
        return given or made


Key = tuple[str, int | None]
"""A child of a module and one of its calls; where None stands instead, a node is the module's own."""


Edges = Mapping[int, Sequence[int]]
"""For each node those that it reads from; nodes are numbered in an order in which they can run."""

_Unit = tuple[Key | None, int]
"""What stays together: a call of a child, or a part of one; a node of the module's own stands alone."""


def order_groups(
    keys: Mapping[int, Key | None], edges: Edges
) -> Iterator[tuple[Key | None, list[int]]]:
    """Pieces as (key, nodes): each reads only from earlier ones.

    A call of a child is one piece, unless something outside it has to run in the middle. The
    module's own nodes are gathered into as few pieces as the children between them allow.
    """
    units = _units(keys, edges)
    ranks = _ranks(units, edges)
    pieces: dict[tuple[int, Key | None, int], list[int]] = {}
    for node, unit in units.items():
        rank = ranks[unit]
        pieces.setdefault((rank, unit[0], 0 if unit[0] is None else unit[1]), []).append(node)
    for (_, key, _), nodes in sorted(pieces.items(), key=lambda item: (item[0][0], item[1][0])):
        yield key, nodes


def _units(keys: Mapping[int, Key | None], edges: Edges) -> dict[int, _Unit]:
    """Calls as they are where they form no circle, else cut where another one has to run in between."""
    first: dict[int, _Unit] = {
        node: (key, node if key is None else -1) for node, key in keys.items()
    }
    circles = _circles(first, edges)
    depth: dict[int, int] = {}
    units: dict[int, _Unit] = {}
    for node, unit in first.items():
        circle = circles.get(unit)
        if circle is None or unit[0] is None:
            units[node] = unit
        depth[node] = 0
        if circle is not None:
            before = [other for other in edges[node] if circles.get(first[other]) == circle]
            depth[node] = max(
                (depth[other] + (first[other] != unit) for other in before), default=0
            )
            if unit[0] is not None:
                units[node] = (unit[0], depth[node])
    return units


def _circles(units: Mapping[int, _Unit], edges: Edges) -> dict[_Unit, int]:
    """The units that read from each other in a circle, with a number for each such circle."""
    reads: dict[_Unit, dict[_Unit, None]] = {unit: {} for unit in units.values()}
    for node, unit in units.items():
        reads[unit].update((units[other], None) for other in edges[node] if units[other] != unit)
    found: dict[_Unit, int] = {}
    for number, component in enumerate(_components(reads)):
        if len(component) > 1:
            found.update(dict.fromkeys(component, number))
    return found


def _components(reads: Mapping[_Unit, Mapping[_Unit, None]]) -> Iterator[list[_Unit]]:
    """Strongly connected components, by Tarjan's walk with a stack of its own."""
    index: dict[_Unit, int] = {}
    low: dict[_Unit, int] = {}
    waiting: list[_Unit] = []
    on_stack: set[_Unit] = set()
    for root in reads:
        if root in index:
            continue
        walk = [(root, iter(reads[root]))]
        index[root] = low[root] = len(index)
        waiting.append(root)
        on_stack.add(root)
        while walk:
            unit, following = walk[-1]
            for other in following:
                if other not in index:
                    index[other] = low[other] = len(index)
                    waiting.append(other)
                    on_stack.add(other)
                    walk.append((other, iter(reads[other])))
                    break
                if other in on_stack:
                    low[unit] = min(low[unit], index[other])
            else:
                walk.pop()
                if walk:
                    low[walk[-1][0]] = min(low[walk[-1][0]], low[unit])
                if low[unit] == index[unit]:
                    component: list[_Unit] = []
                    while not component or component[-1] != unit:
                        component.append(waiting.pop())
                        on_stack.discard(component[-1])
                    yield component


def _ranks(units: Mapping[int, _Unit], edges: Edges) -> dict[_Unit, int]:
    """A number for each unit that is greater than those of all it reads from.

    The module's own nodes have even numbers, children odd ones, so own nodes of the same number
    can be one piece: nothing lies between them.
    """
    reads: dict[_Unit, set[_Unit]] = defaultdict(set)
    readers: dict[_Unit, set[_Unit]] = defaultdict(set)
    for node, unit in units.items():
        for source in edges[node]:
            if units[source] != unit:
                reads[unit].add(units[source])
                readers[units[source]].add(unit)
    ranks: dict[_Unit, int] = {}
    waits = {unit: len(reads[unit]) for unit in units.values()}
    ready = [unit for unit, count in waits.items() if not count]
    for unit in ready:
        own = unit[0] is None
        ranks[unit] = 0 if own else 1
        for other in reads[unit]:
            step = (0 if other[0] is None else 1) if own else (1 if other[0] is None else 2)
            ranks[unit] = max(ranks[unit], ranks[other] + step)
        for reader in readers[unit]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return ranks
