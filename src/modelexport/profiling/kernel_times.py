"""Measure the kernel time of every node of the graph that ONNX Runtime runs."""

from __future__ import annotations

import bisect
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, flatten
from modelexport.modules.record import NodeTag
from modelexport.retagging.derived_names import base_names
from modelexport.retagging.retag import retag_result
from modelexport.tagged.example_inputs import Array
from modelexport.tagged.model import TaggedModel, load
from modelexport.verification.runtime import Session, SessionSettings

_KERNEL = "_kernel_time"
_RUN = "model_run"
_MILLISECONDS = 1e-3
"""ONNX Runtime counts microseconds."""


class NodeTime(NamedTuple):
    """One node of the graph that ran: its tag, and its own milliseconds in each run."""

    tag: NodeTag | None
    op_type: str
    own_ms: tuple[float, ...]


class KernelTimes(msgspec.Struct, frozen=True):
    """The kernel times of all nodes, over several runs."""

    nodes: list[NodeTime]
    run_ms: tuple[float, ...]
    """The time of each run, kernels and the runtime's own."""
    joined: float
    """The share of the kernel time that belongs to a node with a tag."""
    saved: bool
    """Whether the optimized graph was saved, mapped and run; else it was profiled directly."""
    speed_ratio: float | None
    """The time of the saved graph relative to that of the session that optimizes the file."""
    plain_ms: float | None = None
    """The median time of a run of that session without the profiler."""


class Measurement(msgspec.Struct, frozen=True):
    """What to measure, and how often."""

    settings: SessionSettings
    feeds: Mapping[str, Array]
    runs: int
    warmup: int


def measure_kernels(
    model: TaggedModel, measurement: Measurement, step: Callable[[str], None]
) -> KernelTimes:
    """Measure the nodes of a tagged file, as ONNX Runtime optimizes and runs it.

    The optimized graph is saved, mapped to modules by `retag`, and run with optimization off, so
    that every kernel has a node of a file. Some providers compile parts of a graph and cannot save
    it: then the file itself is profiled, and kernels are joined by the names of nodes.

    Args:
        model: The file.
        measurement: The settings, inputs and number of runs.
        step: Called with a line of progress.

    Returns:
        The times of all nodes.

    Raises:
        FormatError: ONNX Runtime rejects the model or cannot run it.
    """
    settings = measurement.settings
    with tempfile.TemporaryDirectory(prefix="modelexport-") as folder:
        saved = Path(folder) / "optimized.onnx"
        step("optimize the model")
        optimized = Session(model.path, settings=settings)  # its own errors are the caller's
        try:
            Session(model.path, settings=msgspec.structs.replace(settings, save_to=saved))
        except FormatError:
            del optimized
            return measure_directly(model, measurement, step)
        step("map the optimized graph")
        tagged = Path(folder) / "tagged.onnx"
        retag_result(model.path, saved, tagged, measurement.feeds)
        named = _name_nodes(tagged)
        as_saved = msgspec.structs.replace(settings, optimization="off")
        step(f"run it {measurement.runs + measurement.warmup} times")
        # One session at a time: the idle threads of another one would slow it down.
        plain_ms = _run_plain(optimized, measurement)
        del optimized
        saved_ms = _run_plain(Session(named, settings=as_saved), measurement)
        times = _profile(named, as_saved, measurement)
        after = load(tagged)
        nodes = list(_join_by_index(after.graph, after.tags, times))
    share = _joined_share(nodes)
    return KernelTimes(nodes, times.run_ms, share, True, saved_ms / plain_ms, plain_ms)


def measure_directly(
    model: TaggedModel, measurement: Measurement, step: Callable[[str], None]
) -> KernelTimes:
    """Profile the session that optimizes a file, and join its kernels by the names of nodes."""
    step(f"run it {measurement.runs + measurement.warmup} times")
    times = _profile(model.path, measurement.settings, measurement)
    pairs = list(zip(model.graph.nodes, model.effective_tags, strict=True))
    by_name = {node.name: tag for node, tag in pairs if node.name}
    by_output = {name: tag for node, tag in pairs for name in node.outputs}
    nodes = []
    for name, kernel in times.kernels.items():
        names = (name, *base_names(name))
        tag = next((known[n] for known in (by_name, by_output) for n in names if n in known), None)
        nodes.append(NodeTime(tag, kernel.op_type, tuple(kernel.run_ms)))
    return KernelTimes(nodes, times.run_ms, _joined_share(nodes), False, None)


def _name_nodes(path: Path) -> Path:
    """Write a model beside another one, with the index of each node as its name."""
    proto = onnx.load(path, load_external_data=False)
    for index, node in enumerate(flatten(proto).protos):
        node.name = str(index)
    named = path.with_name("named.onnx")
    onnx.save(proto, named)
    return named


def _run_plain(session: Session, measurement: Measurement) -> float:
    """Run a session without the profiler; return the median milliseconds of a run."""
    times = []
    for _ in range(measurement.warmup + measurement.runs):
        start = time.perf_counter()
        session.run(measurement.feeds)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[measurement.warmup :])


class _Kernel(msgspec.Struct):
    """The milliseconds of one node in each run."""

    op_type: str
    run_ms: list[float]


class _Times(NamedTuple):
    """A profile: the kernels by node name, and the time of each run."""

    kernels: dict[str, _Kernel]
    run_ms: tuple[float, ...]


def _profile(path: Path, settings: SessionSettings, measurement: Measurement) -> _Times:
    """Run a file with profiling on, and read the profile."""
    with tempfile.TemporaryDirectory(prefix="modelexport-") as folder:
        prefix = Path(folder) / "profile"
        session = Session(path, settings=msgspec.structs.replace(settings, profile_prefix=prefix))
        for _ in range(measurement.warmup + measurement.runs):
            session.run(measurement.feeds)
        events = json.loads(session.end_profile().read_bytes())
    return read_profile(events, measurement.warmup)


def read_profile(events: Sequence[Mapping[str, Any]], warmup: int) -> _Times:
    """Read the events of a profile of ONNX Runtime.

    Args:
        events: The events of the file that ONNX Runtime wrote.
        warmup: How many runs at the beginning to leave out.

    Returns:
        The kernels by the name of their node, and the time of each run.

    Raises:
        FormatError: It has no run after the warm-up.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == _RUN)[warmup:]
    if not spans:
        raise FormatError(
            "ONNX Runtime recorded none of the measured runs", hint="measure fewer runs"
        )
    starts = [start for start, _ in spans]
    kernels: dict[str, _Kernel] = {}
    for event in events:
        if event["cat"] != "Node" or not event["name"].endswith(_KERNEL):
            continue
        run = bisect.bisect_right(starts, event["ts"]) - 1
        if run < 0 or event["ts"] > spans[run][1]:
            continue  # of a warm-up run, or of one that ONNX Runtime did not record to its end
        name = event["name"].removesuffix(_KERNEL)
        kernel = kernels.setdefault(
            name, _Kernel(event["args"].get("op_name", ""), [0.0] * len(spans))
        )
        kernel.run_ms[run] += event["dur"] * _MILLISECONDS  # a node in a loop runs more than once
    return _Times(kernels, tuple((end - start) * _MILLISECONDS for start, end in spans))


def _join_by_index(
    graph: Graph, tags: Sequence[NodeTag | None], times: _Times
) -> Iterator[NodeTime]:
    """Join kernels whose names are the indices of nodes, and yield those that are no node's."""
    runs = len(times.run_ms)
    own = {index: [0.0] * runs for index in range(len(graph.nodes))}
    for name, kernel in times.kernels.items():
        if not name.isdecimal() or int(name) >= len(graph.nodes):
            yield NodeTime(None, kernel.op_type, tuple(kernel.run_ms))
            continue
        index = int(name)
        own[index] = [a + b for a, b in zip(own[index], kernel.run_ms, strict=True)]
        outer = graph.nodes[index].enclosing
        if outer >= 0:  # the time of an If or a Loop includes that of its subgraph
            own[outer] = [a - b for a, b in zip(own[outer], kernel.run_ms, strict=True)]
    for index, node in enumerate(graph.nodes):
        yield NodeTime(tags[index], node.op_type, tuple(max(each, 0.0) for each in own[index]))


def _joined_share(nodes: Sequence[NodeTime]) -> float:
    total = sum(sum(node.own_ms) for node in nodes)
    joined = sum(sum(node.own_ms) for node in nodes if node.tag is not None)
    return joined / total if total else 1.0
