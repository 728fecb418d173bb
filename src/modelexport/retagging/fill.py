"""Give every node of a changed file a module, from its anchor and region or its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from modelexport.graph.flat import Graph
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import Attribution, Method, ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry
from modelexport.retagging.anchors import Anchor, Anchors, Side
from modelexport.retagging.regions import Regions

Call = tuple[str, int | None]
"""The path of a module, and which of its calls if it ran more than once."""


class Modules(ModuleIndex):
    """The modules of the original file."""

    def __init__(self, records: Mapping[str, ModuleRecord]) -> None:
        super().__init__(records, ())
        self.ancestry: Ancestry = Ancestry(records)

    def common(self, calls: Sequence[Call]) -> Call:
        """Find the lowest module that contains all of some calls, and its call around the first."""
        path = self.ancestry.common(path for path, _ in calls)
        # A container has no forward: its nodes are those of the module that calls its items.
        while path and path in self.records and not self.records[path].calls:
            path = self.ancestry.of(path)[-2]
        if path not in self.records or self.records[path].calls < 2:
            return path, None
        return path, self.call_within(*calls[0], path) or 0


class Filler:
    """Finds the module of each node of a changed file."""

    def __init__(
        self,
        original: Side,
        changed: Side,
        anchors: Anchors,
        tags: Sequence[NodeTag | None],
        kept: Sequence[NodeTag | None],
        modules: Modules,
    ) -> None:
        self._original, self._changed = original.graph, changed.graph
        self._side = changed
        self._anchors = anchors
        self._tags, self._kept = tags, kept
        self._modules = modules
        self._regions = Regions(original.graph, changed.graph, anchors, original.sketches)
        self._answers: dict[int, Attribution] = {}
        self._of_tags: dict[int, Attribution] = {}  # most nodes of a module share one tag

    def fill(self) -> list[Attribution]:
        """Return the answer for each node, in the order of the changed graph."""
        for index, anchor in self._anchors.nodes.items():
            tag = self._tags[anchor.origin]
            if tag is not None:
                self._answers[index] = self._from_anchor(index, anchor, tag)
        for index in self._left():
            kept = self._kept[index]
            if kept is not None:
                self._answers[index] = _attribution_of(kept)
        if self._left():
            self._fill_gaps()
        root = Attribution("", None, Method.ROOT)
        return [self._answers.get(index, root) for index in range(len(self._changed.nodes))]

    def _left(self) -> list[int]:
        """Return the nodes without an answer."""
        return [index for index in range(len(self._changed.nodes)) if index not in self._answers]

    def _fill_gaps(self) -> None:
        """Find the modules of nodes that have neither an anchor nor a tag."""
        constant = _constant_nodes(self._changed)
        for index in self._left():
            if index not in constant:
                if self._side.moves_data(index) or self._side.re_encodes(index):
                    # What it moves or encodes comes from its first input, as far as tools go.
                    self._settle(index, list(self._changed.producers_of(index))[:1])
                else:
                    self._settle_region(index)
        for index in reversed(self._left()):
            self._settle(index, self._changed.consumers_of(index))
        for index in self._left():
            self._settle(index, self._changed.producers_of(index))
        self._settle_nested()

    def _settle_nested(self) -> None:
        """Give the remaining nodes of subgraphs and functions to the modules around them."""
        callers = _callers(self._changed)
        left = self._left()
        while left:
            for index in left:
                self._settle_inside(index, callers)
            # A function may stand before the one that calls it, whose nodes have no answer yet.
            waiting = [index for index in left if index not in self._answers]
            left = waiting if len(waiting) < len(left) else []

    def _settle_inside(self, index: int, callers: Mapping[str, list[int]]) -> None:
        """Give a node of a subgraph or function to the module of the nodes that contain it."""
        node = self._changed.nodes[index]
        around = [node.enclosing] if node.enclosing >= 0 else callers.get(node.function, [])
        calls = list(self._calls(around))
        if calls:
            path, call = self._modules.common(calls)
            self._answers[index] = Attribution(path, call, Method.DATAFLOW)

    def _from_anchor(self, index: int, anchor: Anchor, tag: NodeTag) -> Attribution:
        is_sure = anchor.by == "name" or (anchor.by == "structure" and not tag.hierarchy_covers)
        if is_sure and self._regions.is_unchanged(index, anchor.origin):
            known = self._of_tags.get(id(tag))
            if known is None:
                known = self._of_tags[id(tag)] = _attribution_of(tag)
            return known
        region = self._regions.of(index)
        covers = {tag.hierarchy_module, *self._covered(region)}
        old, new = self._original.nodes[anchor.origin], self._changed.nodes[index]
        method = tag.hierarchy_method
        if anchor.by == "derived":
            method = Method.DATAFLOW if self._side.re_encodes(index) else Method.FUSION
        elif anchor.by == "value" and (len(region) == 1 or not covers - {tag.hierarchy_module}):
            method = Method.VALUE
        elif (old.op_type, old.domain) != (new.op_type, new.domain) or len(region) > 1:
            method = Method.FUSION
        return Attribution(
            tag.hierarchy_module,
            tag.hierarchy_call,
            method,
            tuple(sorted(covers)) if len(covers) > 1 else (),
        )

    def _covered(self, region: Iterable[int]) -> set[str]:
        """Return the modules of original nodes."""
        tags = (self._tags[origin] for origin in region)
        return {
            path
            for tag in tags
            if tag is not None
            for path in tag.hierarchy_covers or (tag.hierarchy_module,)
        }

    def _settle_region(self, index: int) -> None:
        """Give a node whose values are new to the module that contains its region."""
        region = self._regions.of(index)
        covers = self._covered(region)
        if covers:
            tags = [tag for origin in region if (tag := self._tags[origin]) is not None]
            path, call = self._modules.common(
                [(tag.hierarchy_module, tag.hierarchy_call) for tag in tags]
            )
            several = tuple(sorted(covers)) if len(covers) > 1 else ()
            # Without values, a node between known ones may implement any part of what they hold.
            is_sure = self._side.sketches or not several
            method = Method.FUSION if is_sure else Method.DATAFLOW
            self._answers[index] = Attribution(path, call, method, several)

    def _settle(self, index: int, around: Iterable[int]) -> None:
        node = self._changed.nodes[index]
        if node.enclosing >= 0 or node.function:
            return
        calls = list(self._calls(around))
        if calls:
            path, call = self._modules.common(calls)
            self._answers[index] = Attribution(path, call, Method.DATAFLOW)

    def _calls(self, around: Iterable[int]) -> Iterator[Call]:
        for other in around:
            while other >= 0 and other not in self._answers:
                other = self._changed.nodes[other].enclosing
            if other >= 0:
                answer = self._answers[other]
                yield answer.path, answer.call


def _attribution_of(tag: NodeTag) -> Attribution:
    return Attribution(
        tag.hierarchy_module, tag.hierarchy_call, tag.hierarchy_method, tag.hierarchy_covers
    )


def _callers(graph: Graph) -> dict[str, list[int]]:
    """Return the nodes that call each local function."""
    callers: dict[str, list[int]] = {key: [] for key in graph.functions}
    for index, node in enumerate(graph.nodes):
        if node.calls_function:
            callers[node.calls_function].append(index)
    return callers


def _constant_nodes(graph: Graph) -> set[int]:
    """Return the nodes that depend on no input of the model."""
    varying = set(graph.inputs)
    constant: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if node.enclosing >= 0 or node.function or varying.intersection(node.inputs):
            varying.update(node.outputs)
        else:
            constant.add(index)
    return constant
