"""Pair the results of modules in PyTorch with values of the file, and explain the gaps."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from modelexport.analysis.subgraph import BoundaryValues
from modelexport.extraction.boundary import OpenModel
from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleStatus
from modelexport.modules.tree import Ancestry
from modelexport.verification.pytorch_run import PyTorchCall
from modelexport.verification.records import Array

_NO_FORWARD = ((), ("*input",))
"""The arguments of a module without its own forward: `nn.Module.forward` takes `*input`."""


class Pair(NamedTuple):
    """One tensor of PyTorch, and the names of the values of the file that may be equal to it."""

    expected: Array
    names: tuple[str, ...]
    guessed: bool = False
    """Whether the export recorded no name: a value that differs is then a different value."""


class PairedCall(NamedTuple):
    """One call in PyTorch, and a pair for each tensor that it returned."""

    call: PyTorchCall
    pairs: tuple[Pair, ...]
    absorbed: bool


class Pairing:
    """Pairs the calls of one run with values of the file.

    Names come from the records of the export, or else from the values that leave the module.
    """

    def __init__(self, file: OpenModel) -> None:
        main = file.main
        self._file = file
        self._available = {name for node in main.nodes for name in node.output if name}
        self._available |= set(main.initializers)
        self._graph_outputs = [value.name for value in main.graph.output]

    def pair(self, calls: Iterable[PyTorchCall]) -> list[PairedCall]:
        """Pair the calls of a run in PyTorch with values of the file."""
        paired = []
        for call in calls:
            record = self._file.modules.records.get(call.path)
            absorbed = record is not None and record.status != ModuleStatus.NODES
            pairs = () if absorbed else tuple(self._pair_outputs(call))
            paired.append(PairedCall(call, pairs, absorbed))
        return paired

    def _pair_outputs(self, call: PyTorchCall) -> Iterator[Pair]:
        """Pair each tensor that a call returned."""
        if not call.path and call.number == 0:
            for outputs in (call.outputs, call.plain):
                tensors = [array for array in outputs if array is not None]
                if len(tensors) == len(self._graph_outputs):
                    for array, name in zip(tensors, self._graph_outputs, strict=True):
                        yield Pair(array, (name,))
                    return
        record = self._file.modules.records.get(call.path)
        recorded = () if record is None else record.results
        names = recorded[call.number] if call.number < len(recorded) else ()
        outputs = call.plain if len(names) == len(call.plain) else call.outputs
        if len(names) != len(outputs):
            names = (None,) * len(outputs)
        for output, name in zip(outputs, names, strict=True):
            if output is None:
                continue
            if name is not None:
                yield Pair(output, (name,) if name in self._available else ())
            else:
                yield Pair(output, tuple(self._candidates(call)), guessed=record is not None)

    def _candidates(self, call: PyTorchCall) -> Iterator[str]:
        """Find the values that leave a module that ran once, except its recorded results."""
        record = self._file.modules.records.get(call.path)
        if call.number or (record is not None and record.calls > 1):
            return
        recorded = {name for names in (record.results if record else ()) for name in names}
        for name in self._leaving.get(call.path, ()):
            if name in self._available and name not in recorded:
                yield name

    @functools.cached_property
    def _leaving(self) -> dict[str, dict[str, None]]:
        """The values that leave each module, without constants; few files need them."""
        graph, main = flatten(self._file.proto), self._file.main
        tags = list(main.all_tags())
        tags += [None] * (
            len(graph.nodes) - len(tags)
        )  # nodes of functions belong to their callers
        constants = main.flow(len(main.nodes)).constant
        return BoundaryValues(graph, tags, Ancestry(self._file.modules.records), constants).outputs


class Gaps:
    """Explains which modules cannot be compared, and why."""

    def __init__(self, file: OpenModel) -> None:
        main = file.main
        ancestry = Ancestry(file.modules.records)
        tags = [tag for tag in main.all_tags() if tag is not None]
        self._modules = file.modules
        records = file.records
        self._is_retagged = records is not None and records.export.retag is not msgspec.UNSET
        self._with_own_nodes = {tag.hierarchy_module for tag in tags}
        in_main = {tag.hierarchy_module for tag in main.tags if tag is not None}
        everywhere = {above for path in self._with_own_nodes for above in ancestry.of(path)}
        self._only_in_subgraphs = everywhere.difference(*map(ancestry.of, in_main))
        # Each module with operations in a node of another module, and the first such module.
        self._merged_into = {
            path: tag.hierarchy_module
            for tag in reversed(tags)
            for path in tag.hierarchy_covers
            if path != tag.hierarchy_module
        }

    def unobserved(self, observed: Collection[str]) -> list[str]:
        """List the modules that ran in the export and have no calls in PyTorch, in file order.

        Containers such as a ModuleList never run, so they are not among them.
        """
        return [path for path in self._modules.tags if path not in observed and self._ran(path)]

    def _ran(self, path: str) -> bool:
        """Return whether a module ran in the export."""
        record = self._modules.records.get(path)
        if path in self._with_own_nodes or record is None:
            return path in self._with_own_nodes
        # The calls of modules in subgraphs are not recorded.
        has_forward = record.forward_args not in _NO_FORWARD
        return record.calls > 0 or (has_forward and path in self._only_in_subgraphs)

    def is_absorbed(self, path: str) -> bool:
        """Return whether the exporter left no nodes of a module that ran."""
        record = self._modules.records.get(path)
        return record is not None and record.status == ModuleStatus.ABSORBED

    def is_removed(self, path: str, call: int) -> bool:
        """Return whether the tool that changed a retagged file left no result of a call."""
        record = self._modules.records.get(path)
        if not self._is_retagged or record is None or call >= len(record.results):
            return False
        return not any(record.results[call])

    def explain(self, path: str, call: int = 0) -> str:
        """Explain in a clause why a call of a module cannot be compared."""
        if path in self._only_in_subgraphs:
            return "its nodes are in the subgraph of a conditional or a loop"
        record = self._modules.records.get(path)
        if record is not None and record.status == ModuleStatus.UNUSED:
            return "it did not run in the export"
        results = record.results[call] if record is not None and call < len(record.results) else ()
        recorded = next((name for name in results if name), None)
        host = self._merged_into.get(path)
        if host is not None and recorded is None:
            return f"its operations are merged into a node of {host or '(root)'}"
        if self.is_absorbed(path):
            return "the exporter folded its operations or left them out"
        if recorded is not None:
            return f"its result {recorded!r} is not in the file anymore"
        if self.is_removed(path, call):
            return "another tool fused its result into a later node"
        return "its result is not in the file"

    def explain_unobserved(self, path: str) -> str:
        """Explain in a clause why a module that ran in the export was not observed in PyTorch."""
        if path in self._only_in_subgraphs or self.is_absorbed(path):
            return self.explain(path)
        return (
            "its calls cannot be observed in PyTorch: "
            "it is compiled, or it was called past its forward hooks"
        )
