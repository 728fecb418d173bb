"""Regions: the original nodes whose operations a node of a changed file implements."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Iterator, Mapping

from modelexport.graph.flat import Graph, Node
from modelexport.retagging.anchors import Anchors
from modelexport.retagging.sketch import Sketch

_MOST_VISITED = 2000
"""How many nodes to visit for one region. Larger ones end there, so that the cost is linear."""
_MOST_FOLDED = 200


class Regions:
    """Finds regions in the original graph.

    Args:
        original: The original graph.
        changed: The changed graph.
        anchors: The anchors of the changed graph.
        sketches: The sketches of the original values, empty if it was not run.
    """

    def __init__(
        self, original: Graph, changed: Graph, anchors: Anchors, sketches: Mapping[str, Sketch]
    ) -> None:
        self._original, self._changed = original, changed
        self._anchors = anchors
        self._sketches = sketches
        self._captured = _captured_values(original)

    @functools.cached_property
    def _remaining(self) -> set[str]:
        """The original values that the changed file still has."""
        return set(self._anchors.values.values())

    def of(self, index: int) -> list[int]:
        """Return the region of a node.

        Args:
            index: The index of the node in the changed graph.

        Returns:
            The original nodes between the values that it consumes and those that it produces; for
            a node whose values the original does not have, those that the next nodes produce.
        """
        anchor = self._anchors.nodes.get(index)
        node = self._changed.nodes[index]
        if node.enclosing >= 0 or node.function:
            return [] if anchor is None else [anchor.origin]
        if anchor is not None and self._consumes_the_same(node, anchor.origin):
            return [anchor.origin]
        frontier = self._consumed(index)
        targets = self._produced(index) - frontier
        if anchor is not None:
            old = self._original.nodes[anchor.origin]
            is_same = frontier.issuperset(n for n in old.inputs if n in self._original.producer)
            if old.enclosing >= 0 or old.function or not targets or is_same:
                return [anchor.origin]
        producer = self._original.producer
        return list(self._walk({producer[n] for n in targets if n in producer}, frontier))

    def is_unchanged(self, index: int, origin: int) -> bool:
        """Return whether a node has the operator and the inputs of its original."""
        node, old = self._changed.nodes[index], self._original.nodes[origin]
        return (
            old.op_type == node.op_type
            and old.domain == node.domain
            and self._consumes_the_same(node, origin)
        )

    def _consumes_the_same(self, node: Node, origin: int) -> bool:
        """Whether a node consumes the values of its original, and no others."""
        is_computed = self._original.producer.__contains__
        old = filter(is_computed, self._original.nodes[origin].inputs)
        return [*old] == [*filter(is_computed, map(self._anchors.values.get, node.inputs))]

    def _produced(self, index: int) -> set[str]:
        """Return the original values that a node produces, else those of the nodes after it."""
        values, changed = self._anchors.values, self._changed
        produced: set[str] = set()
        pending, seen = [index], {index}
        while pending and len(seen) < _MOST_VISITED:
            for name in changed.nodes[pending.pop()].outputs:
                if name in values:
                    produced.add(values[name])
                    continue
                following = [i for i in changed.consumers.get(name, ()) if i not in seen]
                seen.update(following)
                pending += following
        return produced

    def _consumed(self, index: int) -> set[str]:
        """Return the original values that a node consumes, through nodes without an anchor."""
        values, producer = self._anchors.values, self._changed.producer
        frontier: set[str] = set()
        pending, seen = list(self._changed.nodes[index].inputs), {index}
        while pending and len(seen) < _MOST_VISITED:
            name = pending.pop()
            source = producer.get(name)
            if name in values and source not in seen:
                frontier.add(values[name])
            elif source is not None and source not in seen:
                seen.add(source)
                pending += self._changed.nodes[source].inputs
        return frontier

    def _walk(self, targets: Collection[int], frontier: Collection[str]) -> Iterator[int]:
        """Walk back from some nodes; ancestors of the frontier are not part of the region.

        The graph is in topological order: when the last one of the nodes to visit is visited, all
        its descendants were, and it is known whether one of them is an ancestor of the frontier.
        """
        graph = self._original
        inside = set(targets)
        outside = {graph.producer[name] for name in frontier if name in graph.producer} - inside
        heap = [-index for index in (*inside, *outside)]
        heapq.heapify(heap)
        left, visited = len(inside), 0
        while left and visited < _MOST_VISITED:
            index = -heapq.heappop(heap)
            visited += 1
            is_inside = index not in outside
            left -= index in inside
            if is_inside:
                yield index
            for name in (*graph.nodes[index].inputs, *self._captured.get(index, ())):
                source = graph.producer.get(name)
                if source is None or (is_inside and not self._computes(name)):
                    continue
                is_new = source not in inside and source not in outside
                if is_new:
                    heapq.heappush(heap, -source)
                if not is_inside or name in frontier:
                    outside.add(source)
                elif is_new:
                    inside.add(source)
                    left += 1
                elif source in outside:
                    yield from self._folded(source)

    def _folded(self, index: int) -> Iterator[int]:
        """Walk back from a node whose result was folded into a constant, as far as that goes."""
        graph = self._original
        pending, seen = [index], {index}
        while pending and len(seen) < _MOST_FOLDED:
            node = graph.nodes[pending.pop()]
            if self._remaining.intersection(node.outputs):
                continue
            yield graph.producer[node.key]
            sources = {graph.producer[n] for n in node.inputs if n in graph.producer}
            pending += sources - seen
            seen |= sources

    def _computes(self, name: str) -> bool:
        """Whether a value is of floats: sizes and indices that were folded are not followed."""
        known = self._sketches.get(name)
        return known is None or known.is_float


def _captured_values(graph: Graph) -> dict[int, list[str]]:
    """Return the outer values that the subgraphs of each node of the main graph consume."""
    captured: dict[int, list[str]] = {}
    if not graph.subgraphs:
        return captured
    for index, node in enumerate(graph.nodes):
        outer = index
        while graph.nodes[outer].enclosing >= 0:
            outer = graph.nodes[outer].enclosing
        if outer != index:
            captured.setdefault(outer, []).extend(
                name
                for name in node.inputs
                if (source := graph.producer.get(name)) is not None and source < outer
            )
    return captured
