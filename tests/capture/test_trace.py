"""Follow values through an optimisation."""

from __future__ import annotations

import pytest

from modelexport.capture.trace import Operation, ValueMatcher

pytestmark = pytest.mark.sanity


def op(output: str, kind: str, *inputs: str, plain: bool = True) -> Operation:
    return Operation((output,), inputs, lambda: kind, plain)


def test_a_value_that_kept_its_name() -> None:
    graph = [op("y", "f", "x")]
    assert ValueMatcher(graph, graph, frozenset({"x"})).find("y") == "y"
    assert ValueMatcher(graph, graph, frozenset({"x"})).find("x") == "x"


def test_a_removed_copy_has_the_name_that_its_consumer_has() -> None:
    before = [op("a", "f", "x"), op("b", "copy", "a"), op("c", "g", "b")]
    after = [op("a", "f", "x"), op("c", "g", "a")]
    assert ValueMatcher(before, after, frozenset({"x"})).find("b") == "a"


def test_a_value_may_take_the_name_of_a_removed_operation() -> None:
    before = [
        op("a", "norm", "x", "w", plain=False),
        op("b", "turn", "a", plain=False),
        op("c", "turn", "b", plain=False),
    ]
    after = [op("c", "norm", "x", "w", plain=False)]
    matcher = ValueMatcher(before, after, frozenset({"x", "w"}))
    assert matcher.find("a") == "c"


def test_a_value_is_found_through_a_removed_copy() -> None:
    before = [
        op("a", "f", "x", "y"),
        op("b", "like", "a", "x"),
        op("c", "copy", "b"),
        op("d", "g", "c"),
    ]
    after = [op("a", "f", "x", "y"), op("d", "g", "a")]
    assert ValueMatcher(before, after, frozenset({"x", "y"})).find("b") == "a"


def test_a_value_fused_into_its_consumer_has_no_name() -> None:
    before = [
        op("a", "conv", "x", "w", plain=False),
        op("b", "norm", "a", plain=False),
        op("c", "g", "b"),
    ]
    after = [op("b", "conv", "x", "w2", plain=False), op("c", "g", "b")]
    matcher = ValueMatcher(before, after, frozenset({"x", "w2"}))
    assert matcher.find("a") is None
    assert matcher.find("b") == "b"


def test_a_changed_consumer_is_no_evidence() -> None:
    before = [op("a", "transpose", "x", plain=False), op("b", "transpose", "a", plain=False)]
    after = [op("b", "reshape", "x", plain=False)]
    assert ValueMatcher(before, after, frozenset({"x"})).find("a") is None


def test_a_copy_with_changed_consumers_only_is_its_source() -> None:
    before = [op("a", "f", "x"), op("b", "copy", "a"), op("c", "g", "b", plain=False)]
    after = [op("a", "f", "x"), op("c", "fused", "a", plain=False)]
    assert ValueMatcher(before, after, frozenset({"x"})).find("b") == "a"
