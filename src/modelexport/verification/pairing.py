"""Pair what modules return in PyTorch with values of the ONNX graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from modelexport.extraction.extract import OpenModel, boundary_values
from modelexport.modules.record import ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry
from modelexport.verification.pytorch_run import PyTorchCall
from modelexport.verification.records import Array


class Pair(NamedTuple):
    """One tensor of PyTorch, and the names under which it may be in the file, the surest first.

    `guessed` says that the export knew no name for it: a tensor that differs is then another one.
    """

    expected: Array
    names: tuple[str, ...]
    guessed: bool = False


class PairedCall(NamedTuple):
    """One call, with those of its tensors that the file may have."""

    call: PyTorchCall
    pairs: tuple[Pair, ...]
    absorbed: bool


class Pairing:
    """Finds names by the export's records; where those have none, by what leaves the module in the graph."""

    def __init__(self, file: OpenModel) -> None:
        self._file = file
        main = file.source.main
        self._there = {name for node in main.nodes for name in node.output if name} | set(
            main.weights
        )
        self._outputs = [value.name for value in main.graph.output]
        self._leaving: dict[str, dict[str, None]] | None = None

    def of(self, calls: list[PyTorchCall]) -> Iterator[PairedCall]:
        """Each call in the order given."""
        for call in calls:
            record = self._file.modules.records.get(call.path)
            absorbed = record is not None and record.status != ModuleStatus.NODES
            pairs = () if absorbed else tuple(self._pairs(call))
            yield PairedCall(call, pairs, absorbed)

    def _pairs(self, call: PyTorchCall) -> Iterator[Pair]:
        tensors = [value for value in call.given if value is not None]
        if not call.path and call.index == 0 and len(tensors) == len(self._outputs):
            yield from (
                Pair(value, (name,)) for value, name in zip(tensors, self._outputs, strict=True)
            )
            return
        record = self._file.modules.records.get(call.path)
        results = (
            ()
            if record is None or call.index >= len(record.results)
            else record.results[call.index]
        )
        known = results if len(results) == len(call.given) else (None,) * len(call.given)
        for value, name in zip(call.given, known, strict=True):
            if value is None:
                continue
            if name is not None:
                yield Pair(value, (name,) if name in self._there else ())
            else:
                yield Pair(value, tuple(self._candidates(call)), guessed=record is not None)

    def _candidates(self, call: PyTorchCall) -> Iterator[str]:
        """What leaves a module that ran once, less what the records know to be another of its results."""
        record = self._file.modules.records.get(call.path)
        if call.index or (record is not None and record.calls > 1):
            return
        if self._leaving is None:
            self._leaving = boundary_values(self._file).outputs
        taken = {name for names in (() if record is None else record.results) for name in names}
        yield from (
            name
            for name in self._leaving.get(call.path, ())
            if name in self._there and name not in taken
        )


_NO_FORWARD = ((), ("*input",))
"""The arguments of a module without a forward of its own: `nn.Module.forward` takes `*input`, and raises."""


class Gaps:
    """Knows where the nodes of each module are: in the main graph, in a subgraph, or in nodes of other modules."""

    def __init__(self, file: OpenModel) -> None:
        main = file.source.main
        self._modules = file.modules
        lineage = Ancestry(file.modules.records)
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
        return record.calls > 0 or (
            record.forward_args not in _NO_FORWARD and self._in_subgraph(path)
        )

    def is_absorbed(self, path: str) -> bool:
        """Whether the exporter left no nodes of a module that ran."""
        record = self._modules.records.get(path)
        return record is not None and record.status == ModuleStatus.ABSORBED

    def why(self, path: str, call: int = 0) -> str:
        """Why a call of a module cannot be compared."""
        if self._in_subgraph(path):
            return "its nodes are in the subgraph of a conditional or a loop"
        record = self._modules.records.get(path)
        if record is not None and record.status == ModuleStatus.UNUSED:
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


def _with_ancestors(lineage: Ancestry, paths: Iterable[str]) -> set[str]:
    return {above for path in paths for above in lineage.of(path)}


def _merged_into(tags: Iterable[NodeTag]) -> dict[str, str]:
    """For each module that has operations in a node of another, that other module."""
    found: dict[str, str] = {}
    for tag in tags:
        for path in tag.hierarchy_covers:
            if path != tag.hierarchy_module:
                found.setdefault(path, tag.hierarchy_module)
    return found
