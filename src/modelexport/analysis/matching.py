"""Match the nodes of two graphs that differ somewhere.

Nodes are matched by what they are computed from and what is computed from them, then by either
alone, so that a change in the middle leaves everything before and after it matched. The rest is
matched by the names of values, by inputs, and last by operator within a module.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import NamedTuple

from modelexport.graph.flat import Graph


class LabeledGraph(NamedTuple):
    """A graph with what identifies its nodes and leaves.

    `labels` are those of `node_labels`, `initializers` has the digest of the content of each
    initializer, and `modules` the module path of each node, None for a node without a tag.
    """

    graph: Graph
    labels: Sequence[str]
    initializers: Mapping[str, str]
    modules: Sequence[str | None]

    @property
    def leaves(self) -> dict[str, Hashable]:
        """What identifies each initializer, by content, and each input, by position."""
        leaves: dict[str, Hashable] = {
            name: ("initializer", digest) for name, digest in self.initializers.items()
        }
        leaves.update((name, ("input", i)) for i, name in enumerate(self.graph.inputs))
        return leaves


def match_nodes(a: LabeledGraph, b: LabeledGraph) -> dict[int, int]:
    """Find for each node of one graph the corresponding node of another.

    Args:
        a: The first graph.
        b: The second graph.

    Returns:
        The index in `b` for each node of `a` that has a match, by its index.
    """
    numbers: dict[Hashable, int] = {}
    matcher = _Matcher(a.graph, b.graph)
    upstream = [_upstream_numbers(graph, numbers) for graph in (a, b)]
    downstream = [_downstream_numbers(graph, numbers) for graph in (a, b)]
    both = [list(zip(*pair, strict=True)) for pair in zip(upstream, downstream, strict=True)]
    matcher.add(*both)
    matcher.add(*upstream)
    matcher.add(*downstream)
    matcher.add(*([(node.key, node.op_type) for node in side.graph.nodes] for side in (a, b)))
    matcher.add(_input_keys(a, matcher.matches), _input_keys(b, None))
    if any(a.modules) and any(b.modules):
        matcher.add(_module_keys(a), _module_keys(b))
    return matcher.matches


class _Matcher:
    """The matches so far; `add` extends them by one kind of key at a time."""

    def __init__(self, a: Graph, b: Graph) -> None:
        self.matches: dict[int, int] = {}
        self._a, self._b = a, b
        self._matched_in_b: set[int] = set()

    def add(self, keys_a: Sequence[Hashable], keys_b: Sequence[Hashable]) -> None:
        """Match unmatched nodes with equal keys; among several, those of the same name first."""
        groups_b = _group_by_key(keys_b, self._matched_in_b)
        for key, left in _group_by_key(keys_a, self.matches).items():
            right = groups_b.get(key, [])
            if key is None or not right:
                continue
            if len(left) > 1 or len(right) > 1:
                by_name = {self._b.nodes[index].key: index for index in right}
                for index in left:
                    other = by_name.get(self._a.nodes[index].key)
                    if other is not None:
                        self._match(index, other)
                left = [index for index in left if index not in self.matches]
                right = [index for index in right if index not in self._matched_in_b]
            for index, other in zip(left, right, strict=False):
                self._match(index, other)

    def _match(self, index: int, other: int) -> None:
        self.matches[index] = other
        self._matched_in_b.add(other)


def _group_by_key(keys: Sequence[Hashable], matched: Container[int]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        if index not in matched:
            groups.setdefault(key, []).append(index)
    return groups


def _upstream_numbers(side: LabeledGraph, numbers: dict[Hashable, int]) -> list[Hashable]:
    """Number nodes so that equal numbers mean the same operations on everything before."""
    graph = side.graph
    enclosed: dict[int, list[str]] = {}
    for index, node in enumerate(graph.nodes):
        if node.enclosing >= 0:
            enclosed.setdefault(node.enclosing, []).append(side.labels[index])
    known = side.leaves
    result: list[Hashable] = []
    for index, node in enumerate(graph.nodes):
        sources = tuple([known.get(name) for name in node.inputs])
        inner = tuple(sorted(enclosed.get(index, ())))
        number = numbers.setdefault((side.labels[index], sources, inner), len(numbers))
        result.append(number)
        known.update((name, (number, i)) for i, name in enumerate(node.outputs))
    return result


def _downstream_numbers(side: LabeledGraph, numbers: dict[Hashable, int]) -> list[Hashable]:
    """Number nodes so that equal numbers mean the same operations on everything after."""
    graph = side.graph
    ends: dict[str, list[Hashable]] = {}
    for i, name in enumerate(graph.outputs):
        ends.setdefault(name, []).append((0, "output", i))
    for subgraph in (subgraph for nested in graph.bodies.values() for subgraph in nested):
        for i, name in enumerate(subgraph.outputs):
            ends.setdefault(name, []).append((1, subgraph.label, i))
    result: list[Hashable] = [-1] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        uses: list[Hashable] = []
        for output, name in enumerate(graph.nodes[index].outputs):
            uses += [(output, end) for end in ends.get(name, ())]
            for consumer in graph.consumers.get(name, ()):
                inputs = graph.nodes[consumer].inputs
                at = tuple(i for i, read in enumerate(inputs) if read == name)
                uses.append((output, result[consumer], at))
        # Nothing orders the consumers of a value across two files, so they are sorted.
        key = ("downstream", side.labels[index], tuple(sorted(uses, key=repr)))
        result[index] = numbers.setdefault(key, len(numbers))
    return result


def _input_keys(side: LabeledGraph, matches: Mapping[int, int] | None) -> list[Hashable]:
    """Return the sources of each node's inputs, in terms of the other graph given `matches`."""
    graph, leaves = side.graph, side.leaves

    def source(name: str) -> Hashable:
        index = graph.producer.get(name)
        if index is None:
            return leaves.get(name)
        other = index if matches is None else matches.get(index)
        return other, graph.nodes[index].outputs.index(name)

    return [tuple([source(name) for name in node.inputs]) or None for node in graph.nodes]


def _module_keys(side: LabeledGraph) -> list[Hashable]:
    return [
        None if module is None else (module, node.op_type)
        for node, module in zip(side.graph.nodes, side.modules, strict=True)
    ]
