"""Which call an operation belongs to, from positions alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexport.capture.hooks import assign_operations
from modelexport.capture.trace import Call, CallLog

pytestmark = pytest.mark.sanity

trees = st.recursive(st.integers(0, 3), lambda inner: st.lists(inner, max_size=4), max_leaves=20)


def run(
    tree: object, spans: list[list[int]], truth: dict[str, int], clock: list[int], caller: int
) -> None:
    """Play a call tree: numbers are operations made, lists are calls."""
    if isinstance(tree, int):
        for _ in range(tree):
            clock[0] += 1
            truth[f"op{clock[0]}"] = caller
        return
    number = len(spans)
    spans.append([clock[0], 0])
    for part in tree:  # type: ignore[attr-defined]
        run(part, spans, truth, clock, number)
    spans[number][1] = clock[0]


@given(trees)
def test_every_operation_goes_to_its_innermost_call(tree: object) -> None:
    spans: list[list[int]] = []
    truth: dict[str, int] = {}
    run([tree], spans, truth, [0], -1)
    marks = [(name, int(name[2:])) for name in truth]
    assert assign_operations([(start, end) for start, end in spans], marks) == truth


def test_calls_know_what_they_were_made_in() -> None:
    calls = (Call("", 0, -1, 4), Call("a", 0, 0, 3), Call("a.b", 0, 1, 3), Call("c", 0, 0, 4))
    log = CallLog(calls)
    assert log.enclosing(2, "") == 0
    assert log.enclosing(2, "c") is None
    assert log.within(2, 1)
    assert not log.within(3, 1)
    assert log.only_calls() == {"": 0, "a": 1, "a.b": 2, "c": 3}
