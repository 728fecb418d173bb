"""Pair the results of modules in PyTorch with values of the file, and explain the gaps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from modelexport.extraction.extract import OpenModel, boundary_values
from modelexport.modules.record import ModuleStatus, NodeTag
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
        main = file.source.main
        self._file = file
        self._available = {name for node in main.nodes for name in node.output if name}
        self._available |= set(main.initializers)
        self._graph_outputs = [value.name for value in main.graph.output]
        self._leaving: dict[str, dict[str, None]] | None = None

    def pair(self, calls: Iterable[PyTorchCall]) -> list[PairedCall]:
        """Pair calls with values of the file.

        Args:
            calls: The calls of a run in PyTorch.

        Returns:
            The same calls with their pairs, in the same order.
        """
        paired = []
        for call in calls:
            record = self._file.modules.records.get(call.path)
            absorbed = record is not None and record.status != ModuleStatus.NODES
            pairs = () if absorbed else tuple(self._pair_outputs(call))
            paired.append(PairedCall(call, pairs, absorbed))
        return paired

    def _pair_outputs(self, call: PyTorchCall) -> Iterator[Pair]:
        """Pair each tensor that a call returned."""
        tensors = [array for array in call.outputs if array is not None]
        if not call.path and call.number == 0 and len(tensors) == len(self._graph_outputs):
            for array, name in zip(tensors, self._graph_outputs, strict=True):
                yield Pair(array, (name,))
            return
        record = self._file.modules.records.get(call.path)
        has_call = record is not None and call.number < len(record.results)
        names = record.results[call.number] if record is not None and has_call else ()
        if len(names) != len(call.outputs):
            names = (None,) * len(call.outputs)
        for output, name in zip(call.outputs, names, strict=True):
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
        if self._leaving is None:  # walks the whole graph, which few files need
            self._leaving = boundary_values(self._file).outputs
        recorded = {name for names in (record.results if record else ()) for name in names}
        for name in self._leaving.get(call.path, ()):
            if name in self._available and name not in recorded:
                yield name


class Gaps:
    """Explains which modules cannot be compared, and why."""

    def __init__(self, file: OpenModel) -> None:
        main = file.source.main
        ancestry = Ancestry(file.modules.records)
        tags = [tag for tag in main.all_tags() if tag is not None]
        self._modules = file.modules
        self._with_own_nodes = {tag.hierarchy_module for tag in tags}
        in_main = {tag.hierarchy_module for tag in main.tags if tag is not None}
        self._only_in_subgraphs = {
            above for path in self._with_own_nodes for above in ancestry.of(path)
        } - {above for path in in_main for above in ancestry.of(path)}
        self._merged_into = _merged_modules(tags)

    def unobserved(self, observed: Collection[str]) -> list[str]:
        """List the modules that ran in the export and were not observed in PyTorch.

        Containers such as a ModuleList never run, so they are not among them.

        Args:
            observed: The paths of the modules with calls in PyTorch.

        Returns:
            Module paths, in the order of the file.
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
        """Return whether the exporter left no nodes of a module that ran.

        Args:
            path: A module path.
        """
        record = self._modules.records.get(path)
        return record is not None and record.status == ModuleStatus.ABSORBED

    def explain(self, path: str, call: int = 0) -> str:
        """Explain why a call of a module cannot be compared.

        Args:
            path: The module path.
            call: The number of the call.

        Returns:
            A clause for a message.
        """
        if path in self._only_in_subgraphs:
            return "its nodes are in the subgraph of a conditional or a loop"
        record = self._modules.records.get(path)
        if record is not None and record.status == ModuleStatus.UNUSED:
            return "it did not run in the export"
        has_call = record is not None and call < len(record.results)
        results = record.results[call] if record is not None and has_call else ()
        recorded = next((name for name in results if name), None)
        host = self._merged_into.get(path)
        if host is not None and recorded is None:
            return f"its operations are merged into a node of {host or '(root)'}"
        if self.is_absorbed(path):
            return "the exporter folded its operations or left them out"
        if recorded is not None:
            return f"its result {recorded!r} is not in the file anymore"
        return "its result is not in the file"

    def explain_unobserved(self, path: str) -> str:
        """Explain why a module that ran in the export was not observed in PyTorch.

        Args:
            path: The module path.

        Returns:
            A clause for a message.
        """
        if path in self._only_in_subgraphs or self.is_absorbed(path):
            return self.explain(path)
        return (
            "its calls cannot be observed in PyTorch: "
            "it is compiled, or it was called past its forward hooks"
        )


def _merged_modules(tags: Iterable[NodeTag]) -> dict[str, str]:
    """Map each module with operations in a node of another module to that module."""
    merged: dict[str, str] = {}
    for tag in tags:
        for path in tag.hierarchy_covers:
            if path != tag.hierarchy_module:
                merged.setdefault(path, tag.hierarchy_module)
    return merged
