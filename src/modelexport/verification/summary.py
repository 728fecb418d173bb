"""Sum up the compared calls of all runs in one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from modelexport.verification.records import (
    COMPARED,
    FAILED,
    Blame,
    ModuleParity,
    Tolerance,
    Verification,
)


def worst_calls(runs: Sequence[Sequence[ModuleParity]]) -> list[ModuleParity]:
    """Take the worst record of each call over all runs.

    Args:
        runs: The records of each run.

    Returns:
        One record for each call, in the order of the first run.
    """
    worst: dict[tuple[str, int], ModuleParity] = {}
    for number, run in enumerate(runs):
        calls: Counter[str] = Counter()
        for parity in run:
            key = (parity.module, calls[parity.module])
            calls[parity.module] += 1
            if key not in worst or _severity(parity) > _severity(worst[key]):
                worst[key] = msgspec.structs.replace(parity, run=number)
    return list(worst.values())


def _severity(parity: ModuleParity) -> tuple[bool, bool, bool, float]:
    """Rank a record: failed above not compared, and that above agreeing."""
    size = float("inf") if parity.max_abs is None else parity.max_abs
    is_cause = parity.blame == Blame.HERE
    return parity.outcome in FAILED, parity.outcome not in COMPARED, is_cause, size


def summarize(
    name: str, tolerance: Tolerance, modules: tuple[ModuleParity, ...], runs: int
) -> Verification:
    """Count the outcomes, and name the modules that differ and those that were not compared.

    Args:
        name: The name of the file.
        tolerance: The tolerance of the comparison.
        modules: The record of each call, in the order in which they finished.
        runs: Number of runs.

    Returns:
        The result of the verification.
    """
    failed = [parity for parity in modules if parity.outcome in FAILED]
    compared = {parity.module for parity in modules if parity.outcome in COMPARED}
    incomplete = (
        parity.module
        for parity in modules
        if parity.outcome not in COMPARED or len(parity.tensors) < parity.results
    )
    causes = sorted(
        (parity for parity in failed if parity.blame == Blame.HERE),
        key=lambda parity: float("inf") if parity.own_abs is None else parity.own_abs,
        reverse=True,
    )
    return Verification(
        file=name,
        runs=runs,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        agrees=not failed and bool(compared),
        first=failed[0].module if failed else None,
        causes=tuple(dict.fromkeys(parity.module for parity in causes)),
        outcomes=dict(Counter(str(parity.outcome) for parity in modules)),
        modules=modules,
        modules_total=len({parity.module for parity in modules}),
        modules_compared=len(compared),
        partly_compared=tuple(dict.fromkeys(path for path in incomplete if path in compared)),
        not_compared={
            parity.module: parity.note or "" for parity in modules if parity.module not in compared
        },
    )
