"""Measure writing and reading GraphML: time, growth with the graph, memory.

Every figure is that of one process. Memory is the peak without the imports. The graph is the
model's protobuf on disk without the values of its initializers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.generated import write_graph
from benchmarks.reading import peak_memory_kib
from benchmarks.table import Row, format_size, growth_row, ratio_row
from modelexport.graphml.format import data_path, graphml_path
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import open_mapped
from modelexport.options import PARAMETER_MODES

SIZES = (10_000, 100_000)
ROUNDS = 4
VALUES = 400 << 20
AIM_GROWTH, AIM_MEMORY, AIM_VALUES = 12.0, 6.0, 0.1
WORKS = ("write", "read")


def work_once(work: str, path: Path, mode: str) -> None:
    """Write or read once in this process, and print seconds and bytes."""
    import modelexport

    write, read = modelexport.export_graphml, modelexport.import_onnx
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_memory_kib(), time.perf_counter()
    if work == "write":
        write(path, parameters=mode)
    else:
        read(graphml_path(path), path.with_name("back.onnx"))
    print(time.perf_counter() - start, 1024 * (peak_memory_kib() - before))


def measure(work: str, path: Path, mode: str = PARAMETER_MODES[0]) -> tuple[float, float]:
    """Return the seconds and bytes of a process that writes or reads once."""
    command = [sys.executable, "-m", "benchmarks.graphml", work, str(path), mode]
    seconds, memory = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), float(memory)


def graph_size(path: Path) -> int:
    """Return the size of a model file without the values of its initializers."""
    with open_mapped(path) as data:
        return len(wire.without_payload(data))


def add_initializer(path: Path) -> None:
    """Add an initializer as large as all those of a large model."""
    model = onnx.load(path)
    values = np.zeros(VALUES // 4, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, "large"))
    path.write_bytes(model.SerializeToString())


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {nodes: Path(folder) / f"graph{nodes}.onnx" for nodes in SIZES}
        for nodes, path in paths.items():
            write_graph(path, nodes, types=True)
        measured: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):  # small and large in turn: the machine's speed may vary
            for nodes, path in paths.items():
                for work in WORKS:
                    measured.setdefault((nodes, work), []).append(measure(work, path))
                if path.read_bytes() != path.with_name("back.onnx").read_bytes():
                    raise RuntimeError("the imported model differs from the original")
        times: dict[str, dict[int, float]] = {work: {} for work in WORKS}
        for (nodes, work), pairs in measured.items():
            times[work][nodes] = min(spent for spent, _ in pairs)
            what = f"GraphML, {work} {nodes:,} nodes, peak memory without the imports"
            memory = [memory for _, memory in pairs]
            size = [graph_size(paths[nodes])] * ROUNDS
            yield ratio_row(what, "the graph on disk", size, memory, AIM_MEMORY, format_size)
        for work, spent in times.items():
            yield growth_row(f"GraphML, {work}", "nodes", spent, AIM_GROWTH)
        yield from _value_rows(paths[SIZES[0]])


def _value_rows(path: Path) -> Iterator[Row]:
    """Measure the memory that values of initializers add, in each mode."""
    for mode in PARAMETER_MODES:
        write_graph(path, SIZES[0], types=True)
        without = {work: measure(work, path, mode)[1] for work in WORKS}
        add_initializer(path)
        for work in WORKS:
            more = measure(work, path, mode)[1] - without[work]
            what = f"GraphML, {work}, parameters {mode}: memory for values of initializers"
            yield ratio_row(what, "the values", [VALUES], [more], AIM_VALUES, format_size)
        for file in (
            graphml_path(path),
            data_path(graphml_path(path)),
            path.with_name("back.onnx"),
        ):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    work_once(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
