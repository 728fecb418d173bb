"""Choose the modules that stay in float, so that the error at the outputs stays below a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, describe_type
from modelexport.option_values import spell_option
from modelexport.quantization.candidates import Candidate, split_modules
from modelexport.quantization.results import ModuleSensitivity, Results
from modelexport.quantization.sensitivity import measure_all, nothing_to_convert
from modelexport.quantization.variants import Workbench

_MOST_RETURNED = 8
"""How many modules are tried back in low precision once the limit is met."""


class KeptModule(msgspec.Struct, frozen=True):
    """A module that stays in float, and why."""

    module: str
    own: bool
    """Whether these are only the nodes outside of its submodules."""
    nodes: int
    """How many nodes would have been converted."""
    bytes: int
    """The bytes of initializers that quantizing it would save."""
    relative: float | None
    """The relative error at the outputs if it alone is quantized; null where that fails."""

    @property
    def title(self) -> str:
        """The module, as messages name it."""
        return Candidate(self.module, self.own, frozenset()).title


class Choice(NamedTuple):
    """The modules that stay in float, and the indices of all nodes that do."""

    kept: tuple[KeptModule, ...]
    modules: int
    """How many modules there were to choose from."""
    nodes: frozenset[int]


class _Measured(NamedTuple):
    candidate: Candidate
    row: ModuleSensitivity

    @property
    def error_per_byte(self) -> float:
        return self.row.size**2 / max(self.row.saved, 1)


def check_limit(max_error: object) -> float | None:
    """Check the limit that a caller gave.

    Raises:
        ArgumentTypeError: It is not a number.
        ArgumentError: It is negative or not finite.
    """
    if max_error is None:
        return None
    if isinstance(max_error, bool) or not isinstance(max_error, int | float):
        raise ArgumentTypeError(
            f"{spell_option('max_error')} is {describe_type(max_error)}",
            hint="pass a number such as 0.01",
        )
    if not 0 <= max_error < math.inf:
        name = spell_option("max_error")
        raise ArgumentError(f"{name} must be a finite number, 0 or more, got {max_error}")
    return float(max_error)


def choose_kept(
    bench: Workbench,
    in_float: frozenset[int],
    limit: float,
    depth: int | None,
    step: Callable[[str], None],
) -> Choice:
    """Choose modules to leave in float until the error is at most the limit.

    The modules are ranked by the square of the error that each causes alone, per byte that it
    saves: errors of different modules add up roughly as squares. The fewest of the ranking that
    meet the limit are found by bisection, and those that turn out not to be needed are returned.

    Args:
        bench: The workbench.
        in_float: The nodes that stay in float in any case.
        limit: The largest relative error.
        depth: How deep the modules are; None for the default.
        step: Called with a line of progress.

    Raises:
        ArgumentError: No choice that quantizes anything meets the limit.
    """
    converted = bench.converted_nodes() - in_float
    within = [i for i in range(len(bench.prepared.names)) if i not in in_float]
    _, candidates = split_modules(bench.prepared.model, within, converted, depth)
    candidates = [each for each in candidates if not converted.isdisjoint(each.nodes)]
    if not candidates:
        raise nothing_to_convert(bench.original.name, bench.to)
    rows = measure_all(bench, candidates, converted, Results(None, "", {}), step)
    ranked = sorted(
        (_Measured(*pair) for pair in zip(candidates, rows, strict=True) if pair[1].has_effect),
        key=lambda each: (-each.error_per_byte, each.candidate.path),
    )
    search = _Search(bench, in_float, limit, ranked, step)
    kept = search.run()
    return Choice(
        tuple(
            KeptModule(row.module, row.own, row.nodes, row.saved,
                       row.error.relative if row.error else None)
            for _, row in kept
        ),
        len(ranked),
        search.floats(kept),
    )  # fmt: skip


class _Search:
    """The search for the fewest modules in float."""

    def __init__(
        self,
        bench: Workbench,
        in_float: Set[int],
        limit: float,
        ranked: Sequence[_Measured],
        step: Callable[[str], None],
    ) -> None:
        self._bench = bench
        self._in_float = frozenset(in_float)
        self._limit = limit
        self._ranked = ranked
        self._step = step
        self._errors: dict[frozenset[int], float] = {}

    def floats(self, kept: Iterable[_Measured]) -> frozenset[int]:
        """Return all nodes that stay in float."""
        return self._in_float.union(*(each.candidate.nodes for each in kept))

    def run(self) -> list[_Measured]:
        """Find modules whose absence from quantization meets the limit."""
        ranked = self._ranked
        if not ranked:
            return []
        fails, count = -1, len(ranked)
        while count - fails > 1:
            middle = (fails + count) // 2
            if self._error(ranked[:middle]) <= self._limit:
                count = middle
            else:
                fails = middle
        if count == len(ranked):
            return self._all_but_one()
        return self._without_needless(list(ranked[:count]))

    def _error(self, kept: Sequence[_Measured]) -> float:
        nodes = self.floats(kept)
        if nodes not in self._errors:
            self._step(f"measure with {len(kept)} of {len(self._ranked)} modules in float")
            try:
                self._errors[nodes] = self._bench.try_variant(nodes).error.size
            except FormatError:  # a part of the model that does not run in low precision
                self._errors[nodes] = math.inf
        return self._errors[nodes]

    def _all_but_one(self) -> list[_Measured]:
        """Quantize only the module with the smallest error, as the last resort."""
        saving = [each for each in self._ranked if each.row.saved > 0]
        least = min(saving or self._ranked, key=lambda each: each.row.size)
        kept = [each for each in self._ranked if each is not least]
        error = self._error(kept) if least.row.size <= self._limit else least.row.size
        if error > self._limit:
            raise ArgumentError(
                f"no choice of modules has a relative error of at most {self._limit:g}: "
                f"the smallest is {error:.3g}, with only {least.candidate.title} quantized",
                hint=f"allow a larger error, smaller modules with {spell_option('depth')}, or "
                f"another {spell_option('to')}",
            )
        return kept

    def _without_needless(self, kept: list[_Measured]) -> list[_Measured]:
        """Return modules to quantization that are expected to fit under the limit, and do."""
        if not kept:
            return kept
        error = self._error(kept)
        for each in sorted(kept, key=lambda each: each.row.size)[:_MOST_RETURNED]:
            if math.hypot(error, each.row.size) > self._limit:
                break
            rest = [other for other in kept if other is not each]
            tried = self._error(rest)
            if tried <= self._limit:
                kept, error = rest, tried
        return kept
