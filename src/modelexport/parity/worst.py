"""Of several runs the worst of each call of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from modelexport.parity.records import COMPARED, FAILED, Blame, ModuleParity

_Key = tuple[str, int]


def worst_of(runs: Sequence[Sequence[ModuleParity]]) -> list[ModuleParity]:
    """Take for each call the record of the run where it did worst, in the order of the first run."""
    worst: dict[_Key, ModuleParity] = {}
    for number, run in enumerate(runs):
        calls: Counter[str] = Counter()
        for found in run:
            key = (found.module, calls[found.module])
            calls[found.module] += 1
            before = worst.get(key)
            if before is None or _badness(found) > _badness(before):
                worst[key] = msgspec.structs.replace(found, run=number)
    return list(worst.values())


def _badness(found: ModuleParity) -> tuple[bool, bool, bool, float]:
    """Failed is worse than not compared, which is worse than agreeing: a run without an answer takes nothing back."""
    size = float("inf") if found.max_abs is None else found.max_abs
    return found.outcome in FAILED, found.outcome not in COMPARED, found.blame == Blame.HERE, size
