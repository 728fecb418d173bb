"""What belongs to each module of a tagged file: nodes, weights, and the tensors that cross its border."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from modelexport.graph import Graph
from modelexport.hierarchy.tree import join
from modelexport.tagged.codec import NodeTag
from modelexport.tagged.sidecar import ModuleRecord


class Lineage:
    """Parents of modules; paths that no record names hang on the nearest one above them, or on the root."""

    def __init__(self, modules: Mapping[str, ModuleRecord]) -> None:
        self._parent = {join(path, child): path for path, record in modules.items() for child in record.children}
        self._known: dict[str, tuple[str, ...]] = {"": ("",)}

    def of(self, path: str) -> tuple[str, ...]:
        """The module and all above it, from the root down."""
        pending = []
        while path not in self._known:
            pending.append(path)
            path = self._parent.get(path, path.rpartition(".")[0])
        line = self._known[path]
        for path in reversed(pending):
            line = self._known[path] = (*line, path)
        return line

    def common(self, paths: Iterable[str]) -> str:
        """The lowest module that holds all of these."""
        lines = [self.of(path) for path in dict.fromkeys(paths)]
        shared = ""
        for level in zip(*lines, strict=False):
            if any(path != level[0] for path in level):
                break
            shared = level[0]
        return shared


def totals(own: Mapping[str, int], lineage: Lineage) -> Counter[str]:
    """For each module the sum over itself and everything below it."""
    whole: dict[str, int] = {}
    for path, count in own.items():
        for above in lineage.of(path):
            whole[above] = whole.get(above, 0) + count
    return Counter(whole)


def weight_owners(graph: Graph, tags: Sequence[NodeTag | None], lineage: Lineage) -> dict[str, str | None]:
    """For each initializer the lowest module that holds all nodes which read it; None where none has a tag."""
    owners: dict[str, str | None] = {}
    for name in graph.initializers:
        readers = [tag.hierarchy_module for i in graph.consumers.get(name, ()) if (tag := tags[i]) is not None]
        owners[name] = None if not readers else readers[0] if len(readers) == 1 else lineage.common(readers)
    return owners


class Borders:
    """The tensors that enter and leave each module, in the order of the file; weights and what is `held` do not count.

    What a body is given comes from the node that holds it, and what it gives back goes there.
    """

    def __init__(
        self, graph: Graph, tags: Sequence[NodeTag | None], lineage: Lineage, held: Iterable[str] = ()
    ) -> None:
        self.inputs: dict[str, dict[str, None]] = {}
        self.outputs: dict[str, dict[str, None]] = {}
        self._lineage = lineage
        weights = {*graph.initializers, *held}
        modules = [None if tag is None else tag.hierarchy_module for tag in tags]
        made_by = {name: modules[index] for index, node in enumerate(graph.nodes) for name in node.outputs}
        for index, bodies in graph.bodies.items():
            for body in bodies:
                weights.update(body.initializers)
                made_by.update(dict.fromkeys(body.inputs, modules[index]))
        for index, node in enumerate(graph.nodes):
            for name in node.inputs:
                if name not in weights:
                    self._add(name, made_by.get(name), modules[index])
        ends: list[tuple[str, str | None]] = [(name, None) for name in graph.outputs]
        ends += [(name, modules[i]) for i, bodies in graph.bodies.items() for body in bodies for name in body.outputs]
        for name, reader in ends:
            if name in made_by:
                self._add(name, made_by[name], reader)

    def _add(self, name: str, source: str | None, reader: str | None) -> None:
        """A tensor leaves every module that holds its producer and not its reader, and the other way round."""
        if source == reader:
            return
        left = () if source is None else self._lineage.of(source)
        right = () if reader is None else self._lineage.of(reader)
        shared = 0
        for first, second in zip(left, right, strict=False):
            if first != second:
                break
            shared += 1
        for path in left[shared:]:
            self.outputs.setdefault(path, {})[name] = None
        for path in right[shared:]:
            self.inputs.setdefault(path, {})[name] = None
