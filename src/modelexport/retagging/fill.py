"""Give every node of a changed file a module, from its anchor and region or its neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from modelexport.graph.flat import Graph
from modelexport.modules.record import Attribution, Method, ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry
from modelexport.retagging.anchors import Anchors, Side
from modelexport.retagging.regions import Regions


class Site(msgspec.Struct, frozen=True):
    """A module and which of its calls."""

    path: str
    call: int | None


class Modules:
    """The module records of the original file, and the calls that they are in."""

    def __init__(self, records: Mapping[str, ModuleRecord]) -> None:
        self.records = records
        self.ancestry = Ancestry(records)

    def carried_tag(self, path: str) -> str:
        """Return the tag that the nodes of a module have: its own, or the nearest one above it."""
        above = reversed(self.ancestry.of(path))
        records = (self.records.get(each) for each in above)
        return next((r.tag for r in records if r is not None and r.tag is not None), "/")

    def common(self, sites: Iterable[Site]) -> Site:
        """Find the lowest module that contains all sites, and its call around the first."""
        sites = list(sites)
        path = self.ancestry.common(site.path for site in sites)
        # A container has no forward: its nodes are those of the module that calls its items.
        while path and path in self.records and not self.records[path].calls:
            path = self.ancestry.of(path)[-2]
        return Site(path, self._enclosing_call(sites[0], path))

    def _enclosing_call(self, site: Site, path: str) -> int | None:
        """Return the call of a module around a call of a module below it."""
        record = self.records.get(path)
        if record is None or record.calls < 2:
            return None
        call = site.call or 0
        for below in reversed(self.ancestry.of(site.path)):
            if below == path:
                return call
            called_in = () if below not in self.records else self.records[below].called_in
            call = max(called_in[call], 0) if call < len(called_in) else 0
        return call


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

    def fill(self) -> list[Attribution]:
        """Return the answer for each node, in the order of the changed graph."""
        for index, anchor in self._anchors.nodes.items():
            if self._tags[anchor.origin] is not None:
                self._answers[index] = self._from_anchor(index)
        nodes = range(len(self._changed.nodes))
        for index in nodes:
            kept = self._kept[index]
            if index not in self._answers and kept is not None:
                self._answers[index] = Attribution(
                    kept.hierarchy_module, kept.hierarchy_call, kept.hierarchy_method,
                    kept.hierarchy_covers,
                )  # fmt: skip
        constant = _constant_nodes(self._changed)
        for index in nodes:
            if index not in self._answers and index not in constant:
                self._settle_encoder(index)
        for index in nodes:
            if index not in self._answers and index not in constant:
                self._settle_region(index)
        for index in reversed(nodes):
            if index not in self._answers:
                self._settle(index, self._changed.consumers_of(index))
        for index in nodes:
            if index not in self._answers:
                self._settle(index, self._changed.producers_of(index))
        for index in nodes:
            if index not in self._answers:
                outer = self._changed.nodes[index].enclosing
                around = self._answers.get(outer)
                self._answers[index] = (
                    Attribution("", None, Method.ROOT)
                    if around is None
                    else Attribution(around.path, around.call, Method.DATAFLOW)
                )
        return [self._answers[index] for index in nodes]

    def _from_anchor(self, index: int) -> Attribution:
        anchor = self._anchors.nodes[index]
        tag = self._tags[anchor.origin]
        assert tag is not None
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
        if self._side.sketches and self._side.moves_data(index):
            return
        region = self._regions.of(index)
        covers = self._covered(region)
        if covers:
            tags = [tag for origin in region if (tag := self._tags[origin]) is not None]
            sites = [Site(tag.hierarchy_module, tag.hierarchy_call) for tag in tags]
            site = self._modules.common(sites)
            several = tuple(sorted(covers)) if len(covers) > 1 else ()
            self._answers[index] = Attribution(site.path, site.call, Method.FUSION, several)

    def _settle_encoder(self, index: int) -> None:
        """Give a node that quantizes or dequantizes an activation to the module that made it."""
        if self._side.re_encodes(index) and not self._side.moves_data(index):
            self._settle(index, self._changed.producers_of(index))

    def _settle(self, index: int, around: Iterable[int]) -> None:
        node = self._changed.nodes[index]
        if node.enclosing >= 0 or node.function:
            return
        sites = list(self._sites(around))
        if sites:
            site = self._modules.common(sites)
            self._answers[index] = Attribution(site.path, site.call, Method.DATAFLOW)

    def _sites(self, around: Iterable[int]) -> Iterator[Site]:
        for other in around:
            while other >= 0 and other not in self._answers:
                other = self._changed.nodes[other].enclosing
            if other >= 0:
                answer = self._answers[other]
                yield Site(answer.path, answer.call)


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
