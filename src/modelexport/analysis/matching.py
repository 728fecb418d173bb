"""Finds for each node of one graph the same node in another, where the two graphs differ somewhere.

Nodes are paired by what they are computed from and what is made of them, then by either, so that a change
in the middle leaves everything before and behind it paired; the rest goes by the names of tensors, by what
is read, and last by operator within a module.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from modelexport.graph.flat import Graph


class Side:
    """One of the two graphs, with what is known of its nodes."""

    def __init__(
        self,
        graph: Graph,
        labels: Sequence[str],
        weights: Mapping[str, str],
        modules: Sequence[str | None],
    ) -> None:
        self.graph = graph
        self.labels = labels
        self.weights = weights
        self.modules = modules
        self.input_place = {name: place for place, name in enumerate(graph.inputs)}


def match(a: Side, b: Side) -> dict[int, int]:
    """For nodes of `a` the same node of `b`; nodes without a partner are not in it."""
    numbers: dict[Hashable, int] = {}
    pairs = _Pairs(a, b)
    before = [_computed_from(side, numbers) for side in (a, b)]
    behind = [_made_of_it(side, numbers) for side in (a, b)]
    pairs.add(*(list(zip(*both, strict=True)) for both in zip(before, behind, strict=True)))
    pairs.add(*before)
    pairs.add(*behind)
    pairs.add(*([(node.key, node.op_type) for node in side.graph.nodes] for side in (a, b)))
    pairs.add(_reads(a, pairs.found), _reads(b, None))
    if any(a.modules) and any(b.modules):
        pairs.add(*(_by_module(side) for side in (a, b)))
    return pairs.found


class _Pairs:
    def __init__(self, a: Side, b: Side) -> None:
        self.found: dict[int, int] = {}
        self._a, self._b = a, b
        self._taken: set[int] = set()

    def add(self, keys_a: Sequence[Hashable], keys_b: Sequence[Hashable]) -> None:
        """Pair what is not paired yet and has the same key; of several, those of the same name first."""
        left = _grouped(keys_a, self.found)
        right = _grouped(keys_b, self._taken)
        for key, firsts in left.items():
            seconds = right.get(key, [])
            if key is None or not seconds:
                continue
            if len(firsts) > 1 or len(seconds) > 1:
                named = {self._b.graph.nodes[index].key: index for index in seconds}
                for first in firsts:
                    self._pair(first, named.get(self._a.graph.nodes[first].key))
                firsts = [index for index in firsts if index not in self.found]
                seconds = [index for index in seconds if index not in self._taken]
            for first, second in zip(firsts, seconds, strict=False):
                self._pair(first, second)

    def _pair(self, first: int, second: int | None) -> None:
        if second is not None:
            self.found[first] = second
            self._taken.add(second)


def _grouped(
    keys: Sequence[Hashable], taken: Mapping[int, int] | set[int]
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if index not in taken:
            groups.setdefault(key, []).append(index)
    return groups


def _computed_from(side: Side, numbers: dict[Hashable, int]) -> list[Hashable]:
    """A number for each node that says what it does and what everything before it does."""
    graph = side.graph
    inside: dict[int, list[str]] = {}
    for index, node in enumerate(graph.nodes):
        if node.enclosing >= 0:
            inside.setdefault(node.enclosing, []).append(side.labels[index])
    known: dict[str, Hashable] = {name: ("weight", digest) for name, digest in side.weights.items()}
    known |= {name: ("input", place) for name, place in side.input_place.items()}
    found: list[Hashable] = []
    for index, node in enumerate(graph.nodes):
        sources = tuple([known.get(name) for name in node.inputs])
        holds = tuple(sorted(inside[index])) if index in inside else ()
        number = numbers.setdefault((side.labels[index], sources, holds), len(numbers))
        found.append(number)
        for place, name in enumerate(node.outputs):
            known[name] = (number, place)
    return found


def _made_of_it(side: Side, numbers: dict[Hashable, int]) -> list[Hashable]:
    """A number for each node that says what it does and what everything behind it does."""
    graph = side.graph
    ends: dict[str, list[Hashable]] = {}
    for place, name in enumerate(graph.outputs):
        ends.setdefault(name, []).append((0, "output", place))
    for bodies in graph.bodies.values():
        for body in bodies:
            for place, name in enumerate(body.outputs):
                ends.setdefault(name, []).append((1, body.label, place))
    found: list[int] = [-1] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        uses: list[Hashable] = []
        for output, name in enumerate(graph.nodes[index].outputs):
            uses += [(output, end) for end in ends.get(name, ())]
            for reader in graph.consumers.get(name, ()):
                places = tuple(
                    p for p, read in enumerate(graph.nodes[reader].inputs) if read == name
                )
                uses.append((output, found[reader], places))
        key = (
            "behind",
            side.labels[index],
            tuple(sorted(uses, key=repr)) if len(uses) > 1 else tuple(uses),
        )
        found[index] = numbers.setdefault(key, len(numbers))
    return list(found)


def _reads(side: Side, partner: Mapping[int, int] | None) -> list[Hashable]:
    """What each node reads, in terms of the other graph where a partner is known."""
    graph = side.graph

    def source(name: str) -> Hashable:
        index = graph.producer.get(name)
        if index is None:
            return side.weights.get(name, side.input_place.get(name))
        return (
            index if partner is None else partner.get(index),
            graph.nodes[index].outputs.index(name),
        )

    return [tuple([source(name) for name in node.inputs]) or None for node in graph.nodes]


def _by_module(side: Side) -> list[Hashable]:
    return [
        None if module is None else (module, node.op_type)
        for node, module in zip(side.graph.nodes, side.modules, strict=True)
    ]
