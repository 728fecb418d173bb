"""Separate the modules that cause a difference from those that inherit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.extraction.boundary import find_boundary
from modelexport.extraction.build import build_model
from modelexport.extraction.extract import OpenModel
from modelexport.extraction.initializers import load_initializers
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import is_within
from modelexport.verification.pairing import PairedCall
from modelexport.verification.records import (
    Array,
    Blame,
    Tolerance,
    is_comparable,
    measure_difference,
    numeric_kind,
)
from modelexport.verification.runtime import Session

Values = dict[str, Array]
"""Values of the main graph by name."""

_PROGRESS_STEPS = 10


class Suspect(NamedTuple):
    """A call that differs, and PyTorch's value for each value of the file that is wrong."""

    call: PairedCall
    wrong: Values


class Verdict(NamedTuple):
    """Where a difference comes from, and its size on PyTorch's own inputs if that was measured."""

    blame: Blame
    own_abs: float | None = None


class BlameFinder:
    """Judges the calls that differ, one after the other, inner calls before outer ones.

    PyTorch's values are known for the inputs of the model and for the results of its calls. To
    judge a module, its nodes are run from such values: where other nodes lie in between, they are
    run too, so that no value has to be guessed.
    """

    def __init__(
        self,
        file: OpenModel,
        calls: Sequence[PairedCall],
        feeds: Mapping[str, Array],
        tolerance: Tolerance,
    ) -> None:
        """Collect what PyTorch's values are known for.

        Args:
            file: The ONNX file.
            calls: All calls of the run.
            feeds: The inputs of the file.
            tolerance: The difference that is allowed.
        """
        self._file = file
        self._main = file.source.main
        self._tolerance = tolerance
        self._feeds = feeds
        self._known: Values = dict(feeds)
        self._returned_by: dict[str, set[str]] = {}
        for paired in calls:
            for pair in paired.pairs:
                if len(pair.names) == 1:
                    self._known.setdefault(pair.names[0], pair.expected)
                    self._returned_by.setdefault(pair.names[0], set()).add(paired.call.path)
        self._producer = {
            name: index
            for index, node in enumerate(self._main.nodes)
            for name in node.output
            if name
        }
        self._nodes_of: dict[tuple[str, int | None], list[int]] = {}
        for index, tag in enumerate(self._main.tags):
            if tag is not None:
                key = (tag.hierarchy_module, tag.hierarchy_call)
                self._nodes_of.setdefault(key, []).append(index)
        # Modules whose own nodes are known to differ, from judging a child that consumes them.
        self._own_difference: dict[str, float | None] = {}

    def judge(self, suspects: Sequence[Suspect], step: Callable[[str], None]) -> list[Verdict]:
        """Find out where the difference of each call comes from.

        Args:
            suspects: The calls that differ, in the order in which they finished.
            step: Called with a line of progress.

        Returns:
            A verdict for each of them.
        """
        judged: list[tuple[PairedCall, Verdict]] = []
        for number, suspect in enumerate(suspects):
            if number % (1 + len(suspects) // _PROGRESS_STEPS) == 0:
                step(f"run what differs by itself, {number + 1} of {len(suspects)}")
            inside = {
                verdict.blame for other, verdict in judged if self._is_inside(other, suspect.call)
            }
            judged.append((suspect.call, self._judge_one(suspect, inside)))
        return [verdict for _, verdict in judged]

    def _judge_one(self, suspect: Suspect, inside: set[Blame]) -> Verdict:
        """Judge a module's own nodes first, then the modules inside it, then all its nodes."""
        path = suspect.call.call.path
        if path in self._own_difference:
            return Verdict(Blame.HERE, self._own_difference[path])
        if inside:
            own = {n: v for n, v in suspect.wrong.items() if not self._is_returned_inside(n, path)}
            verdict = self._run(Suspect(suspect.call, own), from_children=True)
            if verdict is not None and verdict.blame == Blame.HERE:
                return verdict
            if inside & {Blame.HERE, Blame.INSIDE}:
                return Verdict(Blame.INSIDE)
            if Blame.UNCLEAR in inside:
                return Verdict(Blame.UNCLEAR)
        return self._run(suspect, from_children=False) or Verdict(Blame.INHERITED)

    def _is_inside(self, inner: PairedCall, outer: PairedCall) -> bool:
        """Return whether a call was made by another one, as far as that is known."""
        path = outer.call.path
        if inner.call.path == path or not is_within(inner.call.path, path):
            return False
        call = self._file.modules.call_within(inner.call.path, inner.call.number, path)
        return call in (outer.call.number, None)

    def _is_returned_inside(self, name: str, path: str) -> bool:
        """Return whether a module below this one returned a value."""
        returned_by = self._returned_by.get(name, ())
        return any(other != path and is_within(other, path) for other in returned_by)

    def _is_returned_outside(self, name: str, path: str) -> bool:
        """Return whether a module apart from this one, neither in it nor around it, returned it."""
        returned_by = self._returned_by.get(name, ())
        return any(
            not is_within(other, path) and not is_within(path, other) for other in returned_by
        )

    def _run(self, suspect: Suspect, from_children: bool) -> Verdict | None:
        """Compute the wrong values again from PyTorch's values.

        With `from_children`, what the modules inside returned is taken from PyTorch as well.
        Returns None if none of the module's nodes computes them.
        """
        paired, wrong = suspect
        path = paired.call.path

        def is_known(name: str) -> bool:
            if name in self._feeds or self._is_returned_outside(name, path):
                return True
            return from_children and name not in wrong and self._is_returned_inside(name, path)

        nodes = self._nodes_behind(wrong, is_known)
        own = self._own_nodes(paired)
        own_or_untagged = {i for i in nodes if i in own or self._main.tags[i] is None}
        if not own_or_untagged:
            return None
        # Values that enter the module from nodes of others, computed from PyTorch's values.
        others = nodes - own
        entering = [
            name
            for index in sorted(nodes & own)
            for name in self._main.inputs_of(index)
            if self._producer.get(name) in others
        ]
        try:
            values = self._compute(paired, nodes, [*wrong, *entering], self._known)
            verdict = self._compare(wrong, values)
            if verdict.blame == Blame.HERE and (
                arguments := self._match_arguments(paired, entering, values)
            ):
                # Nodes of others may have gone wrong on the way: run again on PyTorch's arguments.
                known = {**self._known, **values, **arguments}
                again = self._compare(
                    wrong, self._compute(paired, own_or_untagged, list(wrong), known)
                )
                if again.blame == Blame.INHERITED:
                    self._blame_producers(arguments, verdict.own_abs)
                    return again
        except FormatError:
            return Verdict(Blame.UNCLEAR)
        return verdict

    def _blame_producers(self, names: Iterable[str], difference: float | None) -> None:
        """Record that the modules that compute these values do so wrongly with their own nodes."""
        for name in names:
            tag = self._main.tags[self._producer[name]]
            if tag is not None:
                self._own_difference.setdefault(tag.hierarchy_module, difference)

    def _own_nodes(self, paired: PairedCall) -> set[int]:
        """Find the nodes of a call in the main graph."""
        call = paired.call
        record = self._file.modules.records.get(call.path)
        number = call.number if record is not None and record.calls > 1 else None
        belongs = self._file.modules.node_filter(ModuleRef(call.path, None, number))
        return {index for key, nodes in self._nodes_of.items() if belongs(*key) for index in nodes}

    def _nodes_behind(self, names: Iterable[str], is_known: Callable[[str], bool]) -> set[int]:
        """Find the nodes that compute these values from known ones."""
        nodes: set[int] = set()
        pending = [self._producer[name] for name in names if name in self._producer]
        while pending:
            index = pending.pop()
            if index not in nodes:
                nodes.add(index)
                unknown = (name for name in self._main.inputs_of(index) if not is_known(name))
                pending += [self._producer[name] for name in unknown if name in self._producer]
        return nodes

    def _compute(
        self, paired: PairedCall, nodes: set[int], names: Sequence[str], known: Mapping[str, Array]
    ) -> Values:
        """Run some nodes as a model of their own, and return those of the values they compute."""
        computed = {name for index in nodes for name in self._main.nodes[index].output}
        outputs = [name for name in dict.fromkeys(names) if name in computed]
        boundary = find_boundary([(self._main, sorted(nodes))], leaving=outputs)
        target = ModuleRef(paired.call.path, None, paired.call.number)
        extracted = build_model(self._file.source, boundary, target, "")
        model = load_initializers(extracted, self._file.weights)
        return Session(model.SerializeToString()).run(known)

    def _compare(self, wrong: Values, values: Mapping[str, Array]) -> Verdict:
        """Judge values that were computed again."""
        largest, blame = 0.0, Blame.INHERITED
        for name, expected in wrong.items():
            if name not in values:
                continue
            if not is_comparable(expected, values[name]):
                return Verdict(Blame.HERE)
            difference = measure_difference(expected, values[name], self._tolerance)
            largest = max(largest, difference.max_abs)
            blame = blame if difference.within else Blame.HERE
        return Verdict(blame, largest)

    def _match_arguments(
        self, paired: PairedCall, entering: Iterable[str], values: Mapping[str, Array]
    ) -> Values:
        """Match entering values to the call's arguments in PyTorch, where they are equal to none.

        The closest argument of the same shape is taken. Values that are equal to an argument are
        left out: nothing went wrong with them.
        """
        matches: Values = {}
        for name in entering:
            value = values.get(name)
            if value is None or numeric_kind(value.dtype) != "f":
                continue
            differences = [
                (measure_difference(argument, value, self._tolerance), argument)
                for argument in paired.call.inputs
                if is_comparable(argument, value)
            ]
            if differences and not any(difference.within for difference, _ in differences):
                matches[name] = min(differences, key=lambda pair: pair[0].max_abs)[1]
        return matches
