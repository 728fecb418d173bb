"""Compare writing modules as functions, and inlining them, with `onnx.load` of the flat file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx

from benchmarks.generated import write_graph
from benchmarks.reading import measure_seconds
from benchmarks.table import Row, growth_row, ratio_row
from modelexport.viewing.functions import from_functions, to_functions

SIZES = (10_000, 100_000)
ROUNDS = 5
AIM, AIM_GROWTH = 10.0, 12.0


def measure(folder: Path, nodes: int) -> dict[str, list[float]]:
    """Return the times of loading the file, of converting it, and of the way back."""
    flat, functions, back = (folder / f"{name}.onnx" for name in ("flat", "functions", "back"))
    write_graph(flat, nodes)
    work: dict[str, Callable[[], object]] = {
        "load": lambda: onnx.load(flat),
        "functions": lambda: to_functions(flat, functions),
        "functions --inline": lambda: from_functions(functions, back),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):  # in turn, so that a busy machine slows all of them
        for name, run in work.items():
            times[name].append(measure_seconds(run))
    if back.read_bytes() != flat.read_bytes():
        raise RuntimeError("the flat file is not restored")
    return times


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        measured = {nodes: measure(Path(folder), nodes) for nodes in SIZES}
    for name in ("functions", "functions --inline"):
        for nodes, times in measured.items():
            what = f"{name}, {nodes:,} nodes"
            yield ratio_row(what, "onnx.load", times["load"], times[name], AIM)
        growth = {nodes: min(times[name]) for nodes, times in measured.items()}
        yield growth_row(name, "nodes", growth, AIM_GROWTH)
