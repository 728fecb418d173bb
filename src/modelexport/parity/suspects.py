"""Runs a module that differs by itself, on PyTorch's own inputs: did it cause the difference, or inherit it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.hierarchy.tree import is_within
from modelexport.parity.measure import Array, Tolerance, difference, kind
from modelexport.parity.pairs import PairedCall
from modelexport.parity.records import Blame
from modelexport.parity.runtime import run_bytes
from modelexport.pieces.build import build
from modelexport.pieces.cut import Cut, cut, members_of
from modelexport.pieces.extract import TaggedFile
from modelexport.pieces.target import Target
from modelexport.pieces.write import loaded

Suspect = tuple[PairedCall, dict[str, Array]]
"""A call, and for each tensor of the file that differs what it should be."""


class Verdict(NamedTuple):
    """Where a difference comes from, and how great it is on PyTorch's own inputs, where that was tried."""

    blame: Blame
    own_abs: float | None = None


class Judge:
    """Judges calls one after the other, those that finished first before those around them.

    PyTorch's values are known of what the model is given, and of what its calls returned.
    """

    def __init__(
        self, file: TaggedFile, calls: Sequence[PairedCall], feeds: Mapping[str, Array], tolerance: Tolerance
    ) -> None:
        self._file = file
        self._tolerance = tolerance
        self._known: dict[str, Array] = dict(feeds)
        self._returned_by: dict[str, set[str]] = {}
        for paired in calls:
            for pair in paired.pairs:
                if len(pair.names) == 1:
                    self._known.setdefault(pair.names[0], pair.expected)
                    self._returned_by.setdefault(pair.names[0], set()).add(paired.call.path)
        self._untagged = {
            name: place
            for place, (node, tag) in enumerate(zip(file.source.main.nodes, file.source.main.tags, strict=True))
            if tag is None
            for name in node.output
            if name
        }

    def blame(self, suspects: Sequence[Suspect], fetch: Callable[[set[str]], dict[str, Array]]) -> list[Verdict]:
        """For each suspect where its difference comes from; `fetch` gives the file's own values of tensors."""
        cuts = [self._cut(paired, wrong) for paired, wrong in suspects]
        needed = {b.name for found in cuts if isinstance(found, Cut) for b in found.inputs if b.name not in self._known}
        values = fetch(needed) if needed else {}
        verdicts: list[Verdict] = []
        for number, ((paired, wrong), found) in enumerate(zip(suspects, cuts, strict=True)):
            inside = (
                other
                for (other, _), verdict in zip(suspects[:number], verdicts, strict=True)
                if verdict.blame in (Blame.HERE, Blame.INSIDE)
            )
            if any(self._is_inside(other, paired) for other in inside):
                verdicts.append(Verdict(Blame.INSIDE))
            elif isinstance(found, Blame):
                verdicts.append(Verdict(found))
            else:
                verdicts.append(self._run(paired, wrong, found, values))
        return verdicts

    def _is_inside(self, inner: PairedCall, outer: PairedCall) -> bool:
        modules, path = self._file.modules, outer.call.path
        below = inner.call.path != path and (not path or inner.call.path.startswith(f"{path}."))
        return below and modules.call_within(inner.call.path, inner.call.index, path) in (outer.call.index, None)

    def _cut(self, paired: PairedCall, wrong: Mapping[str, Array]) -> Cut | Blame:
        """The module's nodes, with those without a tag that stand before them: other tools add such."""
        call, main = paired.call, self._file.source.main
        record = self._file.modules.records.get(call.path)
        number = call.index if record is not None and record.calls > 1 else None
        target = Target(call.path, None, number)
        levels = members_of(main, self._file.modules.holds(target))
        members = {place for level, places in levels if level is main for place in places}
        pending = [*wrong, *(name for place in members for name in main.reads(place))]
        while pending:
            name = pending.pop()
            place = None if self._is_others_result(name, call.path) else self._untagged.get(name)
            if place is not None and place not in members:
                members.add(place)
                pending += main.reads(place)
        made = {name for place in members for name in main.nodes[place].output}
        leaving = [name for name in wrong if name in made]
        if not leaving:
            return Blame.INHERITED if len(levels) == 1 or not levels else Blame.UNCLEAR
        return cut([(main, sorted(members))], leaving=leaving)

    def _is_others_result(self, name: str, path: str) -> bool:
        """Whether another module returned a tensor, one that is neither inside this one nor around it."""
        returned_by = self._returned_by.get(name, ())
        return any(not is_within(other, path) and not is_within(path, other) for other in returned_by)

    def _run(self, paired: PairedCall, wrong: Mapping[str, Array], found: Cut, values: Mapping[str, Array]) -> Verdict:
        feeds = {border.name: self._value(border.name, paired, values) for border in found.inputs}
        target = Target(paired.call.path, None, paired.call.index)
        try:
            piece = loaded(build(self._file.source, found, target, ""), self._file.weights)
            given = run_bytes(piece.SerializeToString(), Path(), {n: v for n, v in feeds.items() if v is not None})
        except (FormatError, KeyError):
            return Verdict(Blame.UNCLEAR)
        own = 0.0
        blame = Blame.INHERITED
        for name, value in given.items():
            if value.shape != wrong[name].shape:
                return Verdict(Blame.HERE)
            apart = difference(wrong[name], value, self._tolerance)
            own = max(own, apart.max_abs)
            blame = blame if apart.within else Blame.HERE
        return Verdict(blame, own)

    def _value(self, name: str, paired: PairedCall, values: Mapping[str, Array]) -> Array | None:
        """PyTorch's value of a tensor that enters the module: recorded, or that of its arguments which is closest."""
        if name in self._known:
            return self._known[name]
        own = values.get(name)
        if own is None:
            return None
        fitting = [value for value in paired.call.taken if value.shape == own.shape and kind(value) == kind(own)]
        return min(fitting, key=lambda value: difference(value, own, self._tolerance).max_abs, default=own)
