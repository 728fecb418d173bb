"""Groups of nodes in an order that runs, for any edges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelexport.extraction.partition import ChildCall, order_groups

A, B = ("a", None), ("b", None)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[int, ChildCall | None], dict[int, list[int]]]:
    count = draw(st.integers(1, 25))
    keys = {node: draw(st.sampled_from([None, A, B, ("c", 0), ("c", 1)])) for node in range(count)}
    edges = {
        node: draw(st.lists(st.integers(0, node - 1), max_size=3, unique=True)) if node else []
        for node in range(count)
    }
    return keys, edges


@given(graphs())
def test_every_group_consumes_only_from_earlier_ones(
    graph: tuple[dict[int, ChildCall | None], dict[int, list[int]]],
) -> None:
    keys, edges = graph
    groups = list(order_groups(keys, edges))
    position = {node: number for number, (_, nodes) in enumerate(groups) for node in nodes}
    assert sorted(position) == sorted(keys)
    assert sum(len(nodes) for _, nodes in groups) == len(keys)
    for node, sources in edges.items():
        assert all(position[source] <= position[node] for source in sources)
    for key, nodes in groups:
        assert {keys[node] for node in nodes} == {key}
        assert nodes == sorted(nodes)


def test_a_call_is_one_group_where_nothing_runs_in_between() -> None:
    keys = {0: None, 1: A, 2: None, 3: A, 4: B, 5: None}
    edges = {0: [], 1: [0], 2: [0], 3: [1], 4: [3, 2], 5: [4]}
    assert list(order_groups(keys, edges)) == [(None, [0, 2]), (A, [1, 3]), (B, [4]), (None, [5])]


def test_a_call_is_split_where_another_runs_in_between() -> None:
    keys = {0: A, 1: B, 2: A}
    assert list(order_groups(keys, {0: [], 1: [0], 2: [1]})) == [(A, [0]), (B, [1]), (A, [2])]
