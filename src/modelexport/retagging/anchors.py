"""Anchors: which original node each node of a changed file stands for, and why.

Names come first, because most tools keep them. Values confirm or overrule them, and find nodes that
were renamed. Structure finds the rest of what was only renamed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from modelexport.analysis.matching import LabeledGraph, match_nodes
from modelexport.graph.flat import Graph, Node
from modelexport.graph.inference import only_moves_data
from modelexport.modules.record import NodeTag
from modelexport.onnx_file.digests import attribute_digests
from modelexport.retagging.derived_names import base_names
from modelexport.retagging.sketch import RE_ENCODED, SAME, Sketch, SketchIndex

_CONTRADICTS = 0.7
"""The correlation below which the values of a quantized node contradict its derived name."""
_SIMILAR = 0.15
"""The relative error that 8 bits leave, up to which a value without any name is a match."""


class Side(msgspec.Struct, frozen=True, eq=False):
    """One of the two files: its nodes, and the sketches of its values if it was run."""

    graph: Graph
    sketches: Mapping[str, Sketch] = {}
    initializers: Callable[[set[str]], dict[str, Sketch]] = lambda names: {}
    """Returns the sketches of some initializers of the main graph."""

    def sketch(self, index: int) -> Sketch | None:
        """Return the sketch of the first output of a node."""
        return self.sketches.get(self.graph.nodes[index].key)

    def moves_data(self, index: int) -> bool:
        """Return whether a node returns the elements of one of its inputs, in any order.

        Values decide; in a file that was not run, the operator's schema.
        """
        node = self.graph.nodes[index]
        if not self.sketches:
            return only_moves_data(node.domain, node.op_type)
        own = self.sketch(index)
        if own is None:
            return False
        inputs = (self.sketches.get(name) for name in node.inputs)
        return any(
            own.order_error(each) <= SAME or own.content_error(each) <= SAME
            for each in inputs
            if each is not None
        )

    def re_encodes(self, index: int) -> bool:
        """Return whether a node returns one of its inputs in another encoding."""
        own = self.sketch(index)
        inputs = (self.sketches.get(name) for name in self.graph.nodes[index].inputs)
        return own is not None and any(
            own.correlation(each) > RE_ENCODED for each in inputs if each is not None
        )


class Anchor(msgspec.Struct, frozen=True, gc=False):
    """The original node that a node stands for."""

    origin: int
    """Its index in the original file."""
    by: str
    """`name`, `value`, `structure` or `derived`."""


class Anchors(msgspec.Struct, frozen=True, eq=False):
    """The anchors of a changed file."""

    nodes: dict[int, Anchor]
    """By the index of the node in the changed file."""
    values: dict[str, str]
    """The original value that equals a value of the changed file, by name."""


def find_anchors(
    original: Side, changed: Side, kept: Sequence[NodeTag | None], modules: Sequence[NodeTag | None]
) -> Anchors:
    """Find the original node of each node, where there is one.

    Args:
        original: The original file.
        changed: The changed file.
        kept: The tags that nodes of the changed file still have.
        modules: The tags of the original nodes.

    Returns:
        The anchors.
    """
    finder = _Finder(original, changed, kept, modules)
    finder.match_inputs()
    finder.match_names()
    finder.match_structure()
    finder.match_values()
    finder.match_derived_names()
    finder.match_initializers()
    finder.propagate()
    finder.match_similar_values()
    finder.propagate()
    return Anchors(finder.anchors, finder.values)


class _Finder:
    def __init__(
        self,
        original: Side,
        changed: Side,
        kept: Sequence[NodeTag | None],
        modules: Sequence[NodeTag | None],
    ) -> None:
        self.original, self.changed = original, changed
        self._kept, self._modules = kept, modules
        self.anchors: dict[int, Anchor] = {}
        self.values: dict[str, str] = {}
        self._taken: set[int] = set()

    def match_inputs(self) -> None:
        """Match the inputs of the graphs, by name or else by position."""
        old, new = self.original.graph.inputs, self.changed.graph.inputs
        known = set(old)
        for position, name in enumerate(new):
            if name in known:
                self.values[name] = name
            elif len(old) == len(new):
                self.values[name] = old[position]

    def match_names(self) -> None:
        """Match nodes by the name of their first output and by their own name."""
        graph = self.original.graph
        once = _functions_called_once(self.changed.graph)
        for index, node in enumerate(self.changed.graph.nodes):
            if node.function and node.function not in once:
                continue  # its nodes stand for several original ones
            local = node.key.removeprefix(f"{node.function}/") if node.function else node.key
            origin = graph.producer.get(local)
            if node.name and (origin is None or not _same_operator(graph.nodes[origin], node)):
                same_name = self._unique_names.get(node.name)
                origin = origin if same_name is None else same_name
            if origin is not None:
                self._anchor(index, origin, "name")

    @functools.cached_property
    def _unique_names(self) -> dict[str, int | None]:
        """The index of the original node with each name; None for a name of several nodes."""
        by_name: dict[str, int | None] = {}
        for index, node in enumerate(self.original.graph.nodes):
            by_name[node.name] = None if node.name in by_name else index
        return by_name

    def match_structure(self) -> None:
        """Match the nodes that are left by what surrounds them."""
        left = [i for i in range(len(self.changed.graph.nodes)) if i not in self.anchors]
        if not left:
            return
        new, old = (
            LabeledGraph(side.graph, _labels(side.graph), {}, [None] * len(side.graph.nodes))
            for side in (self.changed, self.original)
        )
        matches = match_nodes(new, old, certain=True)
        for index in left:
            origin = matches.get(index)
            if origin is not None and origin not in self._taken:
                self._anchor(index, origin, "structure")

    def match_values(self) -> None:
        """Match nodes by the values of their first outputs, and overrule names that lie."""
        if not self.original.sketches:
            return
        graph = self.original.graph
        found = SketchIndex(
            {k: v for k, v in self.original.sketches.items() if k in graph.producer}
        )
        for index, node in enumerate(self.changed.graph.nodes):
            for number, name in enumerate(node.outputs):
                own = self.changed.sketches.get(name)
                equal = [] if own is None else found.find(own)
                if number == 0 and equal:
                    self._match_value(index, equal)
                elif equal:
                    self.values[name] = name if name in equal else equal[0]

    def match_similar_values(self) -> None:
        """Match the nodes that are left by values that quantization changed a little."""
        graph = self.original.graph
        left = [i for i in range(len(self.changed.graph.nodes)) if i not in self.anchors]
        if not left or not self.original.sketches:
            return
        found = SketchIndex(
            {k: v for k, v in self.original.sketches.items() if k in graph.producer}
        )
        for index in left:
            own = self.changed.sketch(index)
            similar = [] if own is None else found.find_similar(own, _SIMILAR)
            if similar:
                self._match_value(index, similar)

    def _match_value(self, index: int, equal: list[str]) -> None:
        graph, node = self.original.graph, self.changed.graph.nodes[index]
        anchor = self.anchors.get(index)
        by_origin = {graph.producer[name]: name for name in reversed(equal)}
        moves = self.changed.moves_data(index)
        # On these inputs a node may move data that computes on others, as a Clip does: then a name
        # and an operator that agree decide.
        if (
            anchor is not None
            and anchor.origin in by_origin
            and (
                self.original.moves_data(anchor.origin) == moves
                or _same_operator(graph.nodes[anchor.origin], node)
            )
        ):
            self.values[node.key] = by_origin[anchor.origin]
            return
        own = self.changed.sketches[node.key]
        alike = [i for i in by_origin if self.original.moves_data(i) == moves]
        if moves:
            shapes = {i: self.original.sketches[by_origin[i]].shape for i in alike}
            alike = [i for i in alike if shapes[i] == own.shape]
        # A node that moves data as no original node did has the value of the one that computed it.
        computing = [i for i in by_origin if not self.original.moves_data(i)]
        candidates = alike or computing or list(by_origin)
        best = max(candidates, key=lambda i: (self._likeness(index, i, by_origin[i]), -i))
        self.values[node.key] = by_origin[best]
        self.anchors[index] = Anchor(best, "value")
        self._taken.add(best)

    def _likeness(self, index: int, origin: int, name: str) -> tuple[int, ...]:
        old, new = self.original.graph.nodes[origin], self.changed.graph.nodes[index]
        kept, module = self._kept[index], self._modules[origin]
        same_module = (
            kept is not None
            and module is not None
            and kept.hierarchy_module == module.hierarchy_module
        )
        sources = {self.values.get(name) for name in new.inputs}
        shape = self.original.sketches[name].shape == self.changed.sketches[new.key].shape
        return (
            _same_operator(old, new),
            same_module,
            len(sources.intersection(old.inputs)),
            shape,
        )

    def propagate(self) -> None:
        """Match nodes whose neighbours agree on their original, until nothing changes."""
        self._propagate(same_operator=True)
        self._propagate(same_operator=False)

    def _propagate(self, same_operator: bool) -> None:
        new, anchors = self.changed.graph, self.anchors
        if len(anchors) == len(new.nodes):
            return
        pending = list(anchors)
        while pending:
            index = pending.pop()
            around = {*new.producers_of(index), *new.consumers_of(index)}
            for neighbour in [each for each in around if each not in anchors]:
                origin = self._agreed_origin(neighbour, same_operator)
                if origin is not None:
                    self._anchor(neighbour, origin, "structure")
                    pending.append(neighbour)

    def _agreed_origin(self, index: int, same_operator: bool) -> int | None:
        """Return the original node that the anchored neighbours of a node point to."""
        old, new = self.original.graph, self.changed.graph
        node = new.nodes[index]
        votes = self._votes_of_consumers(node)
        if same_operator:
            votes += self._votes_of_producers(node)
            votes = [{i for i in vote if _same_operator(old.nodes[i], node)} for vote in votes]
        elif self.changed.moves_data(index) or self.changed.re_encodes(index):
            return None
        votes = [vote - self._taken if len(vote) > 1 else vote for vote in votes]
        votes = [vote for vote in votes if vote]
        if not votes:
            return None
        agreed = set.intersection(*votes)
        if len(agreed) == 1:
            return agreed.pop()
        if all(len(vote) == 1 for vote in votes) and same_operator:
            # Equal nodes were merged into one: optimisers keep the first.
            return min(set.union(*votes))
        return None

    def _votes_of_producers(self, node: Node) -> list[set[int]]:
        """Return, for each input that the original has, the nodes that consume it likewise."""
        old, inputs = self.original.graph, self.changed.graph.inputs
        return [
            {i for i in old.consumers.get(value, ()) if _at(old.nodes[i].inputs, position) == value}
            for position, name in enumerate(node.inputs)
            if (value := self.values.get(name)) is not None and name not in inputs
        ]

    def _votes_of_consumers(self, node: Node) -> list[set[int]]:
        """Return, for each consumer that the original has, the node that produces its input."""
        old, new = self.original.graph, self.changed.graph
        votes = []
        for name in node.outputs[:1]:
            for consumer in new.consumers.get(name, ()):
                anchor = self.anchors.get(consumer)
                if anchor is None:
                    continue
                origin, other = old.nodes[anchor.origin], new.nodes[consumer]
                source = _at(origin.inputs, other.inputs.index(name))
                if _same_operator(origin, other) and source in old.producer:
                    votes.append({old.producer[source]})
        return votes

    def match_initializers(self) -> None:
        """Match nodes that consume an initializer with the content of one of the original file."""
        old, new = self.original.graph, self.changed.graph
        left = [i for i in range(len(new.nodes)) if i not in self.anchors]
        stored = set(new.initializers)
        wanted = {name for i in left for name in new.nodes[i].inputs if name in stored}
        if not wanted or not self.original.sketches:
            return
        content = self.changed.initializers(wanted)
        known = SketchIndex(self.original.initializers(set(old.initializers)))
        for index in left:
            votes = [
                {i for name in known.find(content[each]) for i in old.consumers.get(name, ())}
                for each in new.nodes[index].inputs
                if each in content
            ]
            origins = {
                i
                for i in set().union(*votes) - self._taken
                if _same_operator(old.nodes[i], new.nodes[index])
            }
            if len(origins) == 1:
                self._anchor(index, origins.pop(), "structure")

    def match_derived_names(self) -> None:
        """Match the rest by names that tools derive from others, unless values disagree."""
        if len(self.anchors) == len(self.changed.graph.nodes):
            return
        graph = self.original.graph
        by_name = {node.name: index for index, node in enumerate(graph.nodes) if node.name}
        for index, node in enumerate(self.changed.graph.nodes):
            if index in self.anchors:
                continue
            names = [*base_names(node.key), *base_names(node.name)]
            bases = [graph.producer.get(base) for base in names]
            bases += [by_name.get(base) for base in names]
            for origin in bases:
                if origin is not None and self._may_derive(index, origin):
                    self._anchor(index, origin, "derived")
                    break

    def _may_derive(self, index: int, origin: int) -> bool:
        own, old = self.changed.sketch(index), self.original.sketch(origin)
        is_quantized = own is not None and not own.is_float
        moves = self.changed.moves_data(index) and not self.original.moves_data(origin)
        if moves and not is_quantized:
            return False  # it serves the node with that name, and has the value of another
        if own is None or old is None or own.size != old.size or not old.is_distinct:
            return True
        return own.correlation(old) > _CONTRADICTS

    def _anchor(self, index: int, origin: int, by: str) -> None:
        self.anchors[index] = Anchor(origin, by)
        self._taken.add(origin)
        old, new = self.original.graph.nodes[origin], self.changed.graph.nodes[index]
        if len(new.outputs) < 2:
            self.values[new.key] = old.key
        elif by != "derived" and _same_operator(old, new) and len(old.outputs) == len(new.outputs):
            self.values.update(zip(new.outputs, old.outputs, strict=True))
        else:
            self.values[new.key] = old.key


def _functions_called_once(graph: Graph) -> set[str]:
    calls = Counter(node.calls_function for node in graph.nodes) if graph.functions else {}
    return {function for function, count in calls.items() if count == 1}


def _at(names: Sequence[str], position: int) -> str | None:
    return names[position] if position < len(names) else None


def _labels(graph: Graph) -> list[str]:
    attributes = attribute_digests(graph)
    return [
        f"{node.domain}:{node.op_type} {len(node.outputs)} {digest}"
        for node, digest in zip(graph.nodes, attributes, strict=True)
    ]


def _same_operator(first: Node, second: Node) -> bool:
    return first.op_type == second.op_type and first.domain == second.domain
