"""Following values through an optimisation."""

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


def test_a_removed_copy_is_found_where_its_reader_reads() -> None:
    before = [op("a", "f", "x"), op("b", "copy", "a"), op("c", "g", "b")]
    after = [op("a", "f", "x"), op("c", "g", "a")]
    assert ValueMatcher(before, after, frozenset({"x"})).find("b") == "a"


def test_a_value_may_live_on_under_the_name_of_a_removed_step() -> None:
    before = [
        op("a", "norm", "x", "w", plain=False),
        op("b", "turn", "a", plain=False),
        op("c", "turn", "b", plain=False),
    ]
    after = [op("c", "norm", "x", "w", plain=False)]
    survivors = ValueMatcher(before, after, frozenset({"x", "w"}))
    assert survivors.find("a") == "c"


def test_a_value_is_found_through_a_removed_copy() -> None:
    before = [
        op("a", "f", "x", "y"),
        op("b", "like", "a", "x"),
        op("c", "copy", "b"),
        op("d", "g", "c"),
    ]
    after = [op("a", "f", "x", "y"), op("d", "g", "a")]
    assert ValueMatcher(before, after, frozenset({"x", "y"})).find("b") == "a"


def test_a_value_fused_into_its_reader_is_gone() -> None:
    before = [
        op("a", "conv", "x", "w", plain=False),
        op("b", "norm", "a", plain=False),
        op("c", "g", "b"),
    ]
    after = [op("b", "conv", "x", "w2", plain=False), op("c", "g", "b")]
    survivors = ValueMatcher(before, after, frozenset({"x", "w2"}))
    assert survivors.find("a") is None
    assert survivors.find("b") == "b"


def test_a_reader_that_changed_does_not_vouch() -> None:
    before = [op("a", "transpose", "x", plain=False), op("b", "transpose", "a", plain=False)]
    after = [op("b", "reshape", "x", plain=False)]
    assert ValueMatcher(before, after, frozenset({"x"})).find("a") is None


def test_a_copy_read_only_by_changed_operations_is_its_source() -> None:
    before = [op("a", "f", "x"), op("b", "copy", "a"), op("c", "g", "b", plain=False)]
    after = [op("a", "f", "x"), op("c", "fused", "a", plain=False)]
    assert ValueMatcher(before, after, frozenset({"x"})).find("b") == "a"
