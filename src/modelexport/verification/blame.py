"""Separate the modules that cause a difference from those that inherit it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.extraction.boundary import OpenModel, find_boundary
from modelexport.extraction.build import build_model
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import is_within
from modelexport.tagged.example_inputs import numeric_kind
from modelexport.verification.pairing import PairedCall
from modelexport.verification.records import (
    Array,
    Blame,
    Tolerance,
    is_comparable,
    measure_difference,
)
from modelexport.verification.runtime import Session

Values = dict[str, Array]
"""Values of the main graph by name."""

_PROGRESS_STEPS = 10


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
        """Collect PyTorch's values from the inputs of the file and all calls of the run."""
        self._file = file
        self._calls = calls
        self._main = file.main
        self._tolerance = tolerance
        self._feeds = feeds
        self._known: Values = dict(feeds)
        self._returned_by: defaultdict[str, set[str]] = defaultdict(set)
        for paired in calls:
            for pair in paired.pairs:
                if len(pair.names) == 1:
                    self._known.setdefault(pair.names[0], pair.expected)
                    self._returned_by[pair.names[0]].add(paired.call.path)
        self._producer = {
            name: index
            for index, node in enumerate(self._main.nodes)
            for name in node.output
            if name
        }
        self._nodes_of: defaultdict[tuple[str, int | None], list[int]] = defaultdict(list)
        for index, tag in enumerate(self._main.tags):
            if tag is not None:
                self._nodes_of[tag.hierarchy_module, tag.hierarchy_call].append(index)
        # Modules whose own nodes are known to differ, from judging a child that consumes them.
        self._own_difference: dict[str, float | None] = {}

    def judge(self, wrong: Mapping[int, Values], step: Callable[[str], None]) -> dict[int, Verdict]:
        """Find out where the difference of each call comes from.

        Args:
            wrong: By the index of a call that differs, PyTorch's value for each value of the file
                that is wrong, in the order in which the calls finished.
            step: Called with a line of progress.
        """
        verdicts: dict[int, Verdict] = {}
        for number, (index, values) in enumerate(wrong.items()):
            if number % (1 + len(wrong) // _PROGRESS_STEPS) == 0:
                step(f"run what differs by itself, {number + 1} of {len(wrong)}")
            call = self._calls[index]
            inside = {
                verdict.blame
                for other, verdict in verdicts.items()
                if self._is_inside(self._calls[other], call)
            }
            verdicts[index] = self._judge_one(call, values, inside)
        return verdicts

    def _judge_one(self, paired: PairedCall, wrong: Values, inside: set[Blame]) -> Verdict:
        """Judge a module's own nodes first, then the modules inside it, then all its nodes."""
        path = paired.call.path
        if path in self._own_difference:
            return Verdict(Blame.HERE, self._own_difference[path])
        if inside:
            own = {n: v for n, v in wrong.items() if not self._is_returned_inside(n, path)}
            verdict = self._run(paired, own, from_children=True)
            if verdict is not None and verdict.blame == Blame.HERE:
                return verdict
            if inside & {Blame.HERE, Blame.INSIDE}:
                return Verdict(Blame.INSIDE)
            if Blame.UNCLEAR in inside:
                return Verdict(Blame.UNCLEAR)
        return self._run(paired, wrong, from_children=False) or Verdict(Blame.INHERITED)

    def _is_inside(self, inner: PairedCall, outer: PairedCall) -> bool:
        """Return whether a call was made by another one, as far as that is known."""
        path = outer.call.path
        if inner.call.path == path or not is_within(inner.call.path, path):
            return False
        call = self._file.modules.call_within(inner.call.path, inner.call.number, path)
        return call in (outer.call.number, None)

    def _is_returned_inside(self, name: str, path: str) -> bool:
        """Return whether a module below this one returned a value."""
        modules = self._returned_by.get(name, ())
        return any(other != path and is_within(other, path) for other in modules)

    def _is_returned_outside(self, name: str, path: str) -> bool:
        """Return whether a module apart from this one, neither in it nor around it, returned it."""
        modules = self._returned_by.get(name, ())
        return any(not is_within(other, path) and not is_within(path, other) for other in modules)

    def _run(self, paired: PairedCall, wrong: Values, from_children: bool) -> Verdict | None:
        """Compute the wrong values again from PyTorch's values; None if no node here computes them.

        With `from_children`, what the modules inside returned is taken from PyTorch as well.
        """
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
            arguments: Values = {}
            if verdict.blame == Blame.HERE:
                arguments = self._match_arguments(paired, entering, values)
            if arguments:
                # Nodes of others may have gone wrong on the way: run again on PyTorch's arguments.
                known = {**self._known, **values, **arguments}
                computed = self._compute(paired, own_or_untagged, [*wrong], known)
                again = self._compare(wrong, computed)
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
        model = build_model(self._file, boundary, target, "").load()
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
        """Match entering values to the closest arguments of the call, if they are equal to none."""
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
