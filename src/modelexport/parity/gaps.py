"""Which modules a verification cannot compare, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from modelexport.analysis.modules import Lineage
from modelexport.attribution.status import Status
from modelexport.pieces.extract import TaggedFile
from modelexport.tagged.codec import NodeTag

_NO_FORWARD = ((), ("*input",))
"""The arguments of a module without a forward of its own: `nn.Module.forward` takes `*input`, and raises."""


class Gaps:
    """Knows where the nodes of each module are: in the main graph, in a subgraph, or in nodes of other modules."""

    def __init__(self, file: TaggedFile) -> None:
        main = file.source.main
        self._modules = file.modules
        lineage = Lineage(file.modules.records)
        everywhere = [tag for tag in main.tags_inside() if tag is not None]
        self._own = {tag.hierarchy_module for tag in everywhere}
        in_main = {tag.hierarchy_module for tag in main.tags if tag is not None}
        self._with_nodes = _with_ancestors(lineage, self._own)
        self._in_main = _with_ancestors(lineage, in_main)
        self._merged_into = _merged_into(everywhere)

    def unseen(self, seen: Collection[str]) -> list[str]:
        """The modules that ran in the export and have not been seen to run in PyTorch.

        A container such as a ModuleList never runs itself, so there is nothing to miss.
        """
        return [path for path in self._modules.tags if path not in seen and self._ran(path)]

    def _ran(self, path: str) -> bool:
        record = self._modules.records.get(path)
        if path in self._own or record is None:
            return path in self._own
        return record.calls > 0 or (record.forward_args not in _NO_FORWARD and self._in_subgraph(path))

    def is_absorbed(self, path: str) -> bool:
        """Whether the exporter left no nodes of a module that ran."""
        record = self._modules.records.get(path)
        return record is not None and record.status == Status.ABSORBED

    def why(self, path: str, call: int = 0) -> str:
        """Why a call of a module cannot be compared."""
        if self._in_subgraph(path):
            return "its nodes are in the subgraph of a conditional or a loop"
        record = self._modules.records.get(path)
        if record is not None and record.status == Status.UNUSED:
            return "it did not run in the export"
        recorded = () if record is None or call >= len(record.results) else record.results[call]
        into = self._merged_into.get(path)
        if into is not None and not any(recorded):
            return f"its operations are merged into a node of {into or '(root)'}"
        if self.is_absorbed(path):
            return "the exporter folded its operations or left them out"
        if any(recorded):
            return f"its result {next(filter(None, recorded))!r} is not in the file anymore"
        return "its result is not in the file"

    def why_unseen(self, path: str) -> str:
        """Why a module that ran in the export was not seen to run in PyTorch."""
        if self._in_subgraph(path) or self.is_absorbed(path):
            return self.why(path)
        return "its calls cannot be observed in PyTorch: it is compiled, or it was called past its forward hooks"

    def _in_subgraph(self, path: str) -> bool:
        return path in self._with_nodes and path not in self._in_main


def _with_ancestors(lineage: Lineage, paths: Iterable[str]) -> set[str]:
    return {above for path in paths for above in lineage.of(path)}


def _merged_into(tags: Iterable[NodeTag]) -> dict[str, str]:
    """For each module that has operations in a node of another, that other module."""
    found: dict[str, str] = {}
    for tag in tags:
        for path in tag.hierarchy_covers:
            if path != tag.hierarchy_module:
                found.setdefault(path, tag.hierarchy_module)
    return found
