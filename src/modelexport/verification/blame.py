"""Find the modules that cause a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.extraction.boundary import find_boundary
from modelexport.extraction.build import build_model
from modelexport.extraction.extract import OpenModel
from modelexport.extraction.initializers import load_initializers
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import is_within
from modelexport.verification.pairing import PairedCall
from modelexport.verification.records import Array, Blame, Tolerance, measure_difference, value_kind
from modelexport.verification.runtime import run_model_bytes

Values = dict[str, Array]
Suspect = tuple[PairedCall, Values]
"""A call, and for each tensor of the file that differs what it should be."""


_STEPS = 10
"""How often progress is told."""


class Verdict(NamedTuple):
    """Where a difference comes from, and how great it is on PyTorch's own inputs, where that was tried."""

    blame: Blame
    own_abs: float | None = None


class BlameFinder:
    """Judges calls one after the other, those that finished first before those around them.

    PyTorch's values are known of what the model is given, and of what its calls returned. A module is run with
    everything that lies between it and such values, so that nothing it is given is a guess.
    """

    def __init__(
        self,
        file: OpenModel,
        calls: Sequence[PairedCall],
        feeds: Mapping[str, Array],
        tolerance: Tolerance,
    ) -> None:
        self._file = file
        self._tolerance = tolerance
        self._feeds = feeds
        self._known: Values = dict(feeds)
        self._returned_by: dict[str, set[str]] = {}
        for paired in calls:
            for pair in paired.pairs:
                if len(pair.names) == 1:
                    self._known.setdefault(pair.names[0], pair.expected)
                    self._returned_by.setdefault(pair.names[0], set()).add(paired.call.path)
        self._own_work: dict[str, float | None] = {}
        main = file.source.main
        self._maker = {
            name: place for place, node in enumerate(main.nodes) for name in node.output if name
        }
        self._made_by: dict[tuple[str, int | None], list[int]] = {}
        for place, tag in enumerate(main.tags):
            if tag is not None:
                self._made_by.setdefault((tag.hierarchy_module, tag.hierarchy_call), []).append(
                    place
                )

    def blame(self, suspects: Sequence[Suspect], step: Callable[[str], None]) -> list[Verdict]:
        """For each suspect, in the order in which they finished, where its difference comes from."""
        judged: list[tuple[PairedCall, Verdict]] = []
        for number, (paired, wrong) in enumerate(suspects):
            if number % (1 + len(suspects) // _STEPS) == 0:
                step(f"run what differs by itself, {number + 1} of {len(suspects)}")
            inside = {verdict.blame for other, verdict in judged if self._is_inside(other, paired)}
            judged.append((paired, self._verdict(paired, wrong, inside)))
        return [verdict for _, verdict in judged]

    def _verdict(self, paired: PairedCall, wrong: Values, inside: set[Blame]) -> Verdict:
        """A module's own work, given what its children return in PyTorch; else its children; else all of it."""
        path = paired.call.path
        if path in self._own_work:
            return Verdict(Blame.HERE, self._own_work[path])
        if inside:
            own = self._run(
                paired,
                {n: v for n, v in wrong.items() if not self._is_returned_inside(n, path)},
                True,
            )
            if own is not None and own.blame == Blame.HERE:
                return own
            if inside & {Blame.HERE, Blame.INSIDE}:
                return Verdict(Blame.INSIDE)
            if Blame.UNCLEAR in inside:
                return Verdict(Blame.UNCLEAR)
        return self._run(paired, wrong, False) or Verdict(Blame.INHERITED)

    def _is_inside(self, inner: PairedCall, outer: PairedCall) -> bool:
        modules, path = self._file.modules, outer.call.path
        if inner.call.path == path or not is_within(inner.call.path, path):
            return False
        return modules.call_within(inner.call.path, inner.call.index, path) in (
            outer.call.index,
            None,
        )

    def _is_returned_inside(self, name: str, path: str) -> bool:
        return any(
            other != path and is_within(other, path) for other in self._returned_by.get(name, ())
        )

    def _is_others_result(self, name: str, path: str) -> bool:
        """Whether another module returned a tensor, one that is neither inside this one nor around it."""
        returned_by = self._returned_by.get(name, ())
        return any(
            not is_within(other, path) and not is_within(path, other) for other in returned_by
        )

    def _run(self, paired: PairedCall, wrong: Values, own_work: bool) -> Verdict | None:
        """Run what makes these tensors, back to PyTorch's values; None where no node of the module is in it."""
        path = paired.call.path

        def is_known(name: str) -> bool:
            if name in self._feeds or self._is_others_result(name, path):
                return True
            return own_work and name not in wrong and self._is_returned_inside(name, path)

        places = self._back_from(wrong, is_known)
        mine = self._places(paired)
        tags = self._file.source.main.tags
        if not any(place in mine or tags[place] is None for place in places):
            return None
        # What other modules' nodes make of those values, on the way to this one.
        border = [
            name
            for place in sorted(places & mine)
            for name in self._reads_from(place, places - mine)
        ]
        try:
            given = self._values(paired, places, [*wrong, *border], self._known)
            verdict = self._compared(wrong, given)
            if verdict.blame == Blame.HERE and (taken := self._closest(paired, border, given)):
                fed = {**self._known, **given, **taken}
                again = self._values(
                    paired, {p for p in places if p in mine or tags[p] is None}, list(wrong), fed
                )
                better = self._compared(wrong, again)
                if better.blame == Blame.INHERITED:
                    self._note_own_work(taken, verdict.own_abs)
                    verdict = better
        except (FormatError, KeyError):
            return Verdict(Blame.UNCLEAR)
        return verdict

    def _note_own_work(self, names: Iterable[str], size: float | None) -> None:
        """A module's own nodes, on the way to one of its children, make something else than PyTorch does."""
        for name in names:
            tag = self._file.source.main.tags[self._maker[name]]
            if tag is not None:
                self._own_work.setdefault(tag.hierarchy_module, size)

    def _places(self, paired: PairedCall) -> set[int]:
        """The module's nodes in the main graph."""
        call = paired.call
        record = self._file.modules.records.get(call.path)
        number = call.index if record is not None and record.calls > 1 else None
        belongs = self._file.modules.holds(ModuleRef(call.path, None, number))
        return {
            place
            for made_by, places in self._made_by.items()
            if belongs(*made_by)
            for place in places
        }

    def _back_from(self, names: Iterable[str], is_known: Callable[[str], bool]) -> set[int]:
        """All nodes that these tensors are made of, back to what is known."""
        main = self._file.source.main
        places: set[int] = set()
        pending = [self._maker[name] for name in names if name in self._maker]
        while pending:
            place = pending.pop()
            if place not in places:
                places.add(place)
                reads = (name for name in main.reads(place) if not is_known(name))
                pending += [self._maker[name] for name in reads if name in self._maker]
        return places

    def _reads_from(self, place: int, others: set[int]) -> list[str]:
        return [
            name for name in self._file.source.main.reads(place) if self._maker.get(name) in others
        ]

    def _values(
        self, paired: PairedCall, places: set[int], names: Sequence[str], known: Mapping[str, Array]
    ) -> dict[str, Array]:
        """What these nodes make, from PyTorch's values."""
        main = self._file.source.main
        made = {name for place in places for name in main.nodes[place].output}
        wanted = [name for name in dict.fromkeys(names) if name in made]
        found = find_boundary([(main, sorted(places))], leaving=wanted)
        target = ModuleRef(paired.call.path, None, paired.call.index)
        piece = load_initializers(
            build_model(self._file.source, found, target, ""), self._file.weights
        )
        feeds = {value.name: known[value.name] for value in piece.graph.input}
        return run_model_bytes(piece.SerializeToString(), Path(), feeds)

    def _compared(self, wrong: Values, given: Mapping[str, Array]) -> Verdict:
        own, blame = 0.0, Blame.INHERITED
        for name, expected in wrong.items():
            if name not in given:
                continue
            if given[name].shape != expected.shape or value_kind(given[name]) != value_kind(
                expected
            ):
                return Verdict(Blame.HERE)
            apart = measure_difference(expected, given[name], self._tolerance)
            own = max(own, apart.max_abs)
            blame = blame if apart.within else Blame.HERE
        return Verdict(blame, own)

    def _closest(
        self, paired: PairedCall, border: Iterable[str], given: Mapping[str, Array]
    ) -> Values:
        """Of PyTorch's arguments those that a tensor on the way should be, where it is none of them."""
        found: Values = {}
        for name in border:
            value = given.get(name)
            if value is None or value_kind(value) != "f":
                continue
            fitting = [
                other
                for other in paired.call.taken
                if other.shape == value.shape and value_kind(other) == "f"
            ]
            if not fitting or any(
                measure_difference(other, value, self._tolerance).within for other in fitting
            ):
                continue
            found[name] = min(
                fitting, key=lambda other: measure_difference(other, value, self._tolerance).max_abs
            )
        return found
