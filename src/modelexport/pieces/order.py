"""Puts groups of nodes into an order in which they can run one after the other, splitting as little as it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

Key = tuple[str, int | None]
"""A child of a module and one of its calls; where None stands instead, a node is the module's own."""


Edges = Mapping[int, Sequence[int]]
"""For each node those that it reads from; nodes are numbered in an order in which they can run."""

_Unit = tuple[Key | None, int]
"""What stays together: a call of a child, or a part of one; a node of the module's own stands alone."""


def in_order(keys: Mapping[int, Key | None], edges: Edges) -> Iterator[tuple[Key | None, list[int]]]:
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
    first: dict[int, _Unit] = {node: (key, node if key is None else -1) for node, key in keys.items()}
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
            depth[node] = max((depth[other] + (first[other] != unit) for other in before), default=0)
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
