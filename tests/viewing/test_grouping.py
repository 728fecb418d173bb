"""Groups of nodes by module call, on graphs and modules of any kind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st

import modelexport
from modelexport.viewing.grouping import Call, Group, group_nodes
from viewing.handmade import node, write

MODULES = ("", "a", "b", "a.c", "a.d", "b.e", "a.c.f", "b.e.g.h")


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    """Draw nodes, each with its module and up to three earlier nodes that it consumes."""
    count = draw(st.integers(1, 14))
    return [
        (
            draw(st.sampled_from(MODULES)),
            draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else [],
        )
        for index in range(count)
    ]


def calls_of(module: str) -> tuple[Call, ...]:
    parts = module.split(".") if module else []
    return tuple((".".join(parts[: end + 1]), None) for end in range(len(parts)))


def check_group(group: Group, calls: list[tuple[Call, ...]], level: int) -> None:
    for item in group.items:
        if isinstance(item, Group):
            assert len(item.members) > 1
            assert all(calls[member][level] == item.call for member in item.members)
            check_group(item, calls, level + 1)
    flat = [m for i in group.items for m in (i.members if isinstance(i, Group) else [i])]
    assert sorted(flat) == sorted(group.members)


@given(graphs())
def test_groups_are_nested_and_run_in_order(graph: list[tuple[str, list[int]]]) -> None:
    calls = [calls_of(module) for module, _ in graph]
    sources = [consumed for _, consumed in graph]
    root = group_nodes(calls, sources)
    check_group(root, calls, 0)
    order = root.expand()
    assert sorted(order) == list(range(len(graph)))
    position = {member: place for place, member in enumerate(order)}
    for member, consumed in enumerate(sources):
        assert all(position[source] < position[member] for source in consumed)
    for group in root.inner():
        assert sorted(order[group.start : group.end]) == sorted(group.members)


@given(graphs())
def test_nodes_that_are_together_stay_so(graph: list[tuple[str, list[int]]]) -> None:
    """Where the nodes of each call are next to each other, nothing moves or is split."""
    ordered = sorted(range(len(graph)), key=lambda index: graph[index][0])
    place = {index: number for number, index in enumerate(ordered)}
    calls = [calls_of(graph[index][0]) for index in ordered]
    sources = [
        [place[source] for source in graph[index][1] if place[source] < place[index]]
        for index in ordered
    ]
    root = group_nodes(calls, sources)
    assert root.expand() == list(range(len(graph)))
    assert all(group.part is None for group in root.inner())


@settings(max_examples=40)
@given(graphs())
def test_any_graph_goes_there_and_back(graph: list[tuple[str, list[int]]]) -> None:
    nodes = [
        node(module, "Sum", [*(f"v{source}" for source in consumed), "x"], [f"v{index}"])
        for index, (module, consumed) in enumerate(graph)
    ]
    outputs = dict.fromkeys((f"v{len(graph) - 1}", f"v{len(graph) // 2}"))
    results = []
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "m.onnx", Path(name) / "out.onnx"
        write(path, nodes, outputs=[*outputs])
        modelexport.to_functions(path, out)
        back = modelexport.from_functions(out, Path(name) / "back.onnx")
        assert back.read_bytes() == path.read_bytes()
        onnx.checker.check_model(str(out), full_check=True)
        for file in (path, out):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(str(file), options)
            results.append(session.run(None, {"x": np.array([0.1, 0.7], np.float32)}))
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes()
