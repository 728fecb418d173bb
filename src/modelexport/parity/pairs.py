"""Which tensor of the file each tensor that PyTorch's modules return should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from modelexport.attribution.status import Status
from modelexport.parity.eager import EagerCall
from modelexport.parity.measure import Array
from modelexport.pieces.extract import TaggedFile
from modelexport.pieces.listing import all_borders


class Pair(NamedTuple):
    """One tensor of PyTorch, and the names under which it may be in the file, the surest first.

    `guessed` says that the export knew no name for it: a tensor that differs is then another one.
    """

    expected: Array
    names: tuple[str, ...]
    guessed: bool = False


class PairedCall(NamedTuple):
    """One call, with those of its tensors that the file may have."""

    call: EagerCall
    pairs: tuple[Pair, ...]
    absorbed: bool


class Pairing:
    """Finds names by the export's records; where those have none, by what leaves the module in the graph."""

    def __init__(self, file: TaggedFile) -> None:
        self._file = file
        main = file.source.main
        self._there = {name for node in main.nodes for name in node.output if name} | set(main.weights)
        self._outputs = [value.name for value in main.graph.output]
        self._leaving: dict[str, dict[str, None]] | None = None

    def of(self, calls: list[EagerCall]) -> Iterator[PairedCall]:
        """Each call in the order given."""
        for call in calls:
            record = self._file.modules.records.get(call.path)
            absorbed = record is not None and record.status != Status.NODES
            pairs = () if absorbed else tuple(self._pairs(call))
            yield PairedCall(call, pairs, absorbed)

    def _pairs(self, call: EagerCall) -> Iterator[Pair]:
        tensors = [value for value in call.given if value is not None]
        if not call.path and call.index == 0 and len(tensors) == len(self._outputs):
            yield from (Pair(value, (name,)) for value, name in zip(tensors, self._outputs, strict=True))
            return
        record = self._file.modules.records.get(call.path)
        results = () if record is None or call.index >= len(record.results) else record.results[call.index]
        known = results if len(results) == len(call.given) else (None,) * len(call.given)
        for value, name in zip(call.given, known, strict=True):
            if value is None:
                continue
            if name is not None:
                yield Pair(value, (name,) if name in self._there else ())
            else:
                yield Pair(value, tuple(self._candidates(call)), guessed=record is not None)

    def _candidates(self, call: EagerCall) -> Iterator[str]:
        """What leaves a module that ran once, less what the records know to be another of its results."""
        record = self._file.modules.records.get(call.path)
        if call.index or (record is not None and record.calls > 1):
            return
        if self._leaving is None:
            self._leaving = all_borders(self._file)[2].outputs
        taken = {name for names in (() if record is None else record.results) for name in names}
        yield from (name for name in self._leaving.get(call.path, ()) if name in self._there and name not in taken)
