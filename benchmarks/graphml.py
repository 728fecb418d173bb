"""What GraphML costs, written and read: time, growth with the graph, and memory against the graph and the weights.

Every figure is that of a process of its own. The memory is the peak above what the program takes before it
begins; the graph is the model's protobuf without the values of its weights, as it lies on disk.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.generated import write_graph
from benchmarks.reading import peak_kib
from modelexport.graphml.dialect import MODES, data_path, graphml_path
from modelexport.tagged import wire
from modelexport.tagged.files import mapped

SIZES = (10_000, 100_000)
ROUNDS = 4
WEIGHTS = 400 << 20
AIM_GROWTH, AIM_MEMORY, AIM_WEIGHTS = 12.0, 6.0, 0.1
WORKS = ("write", "read")


def work_once(work: str, path: Path, mode: str) -> None:
    import modelexport

    write, read = modelexport.export_graphml, modelexport.import_onnx
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_kib(), time.perf_counter()
    if work == "write":
        write(path, parameters=mode)
    else:
        read(graphml_path(path), path.with_name("back.onnx"))
    print(time.perf_counter() - start, 1024 * (peak_kib() - before))


def measured(work: str, path: Path, mode: str = MODES[0]) -> tuple[float, float]:
    """Seconds and bytes of a process that writes or reads once."""
    command = [sys.executable, "-m", "benchmarks.graphml", work, str(path), mode]
    seconds, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(size)


def graph_size(path: Path) -> int:
    with mapped(path) as data:
        return len(wire.without_payload(data))


def add_weight(path: Path) -> None:
    """One more weight, as large as all of a large model's."""
    model = onnx.load(path)
    values = np.zeros(WEIGHTS // 4, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, "large"))
    path.write_bytes(model.SerializeToString())


def main() -> None:
    print("GraphML: written and read, each in a process of its own", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = {nodes: Path(folder) / f"graph{nodes}.onnx" for nodes in SIZES}
        for nodes, path in paths.items():
            write_graph(path, nodes, types=True)
        found: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):  # small and large in turn: the machine may be faster now and slower then
            for nodes, path in paths.items():
                for work in WORKS:
                    found.setdefault((nodes, work), []).append(measured(work, path))
                if path.read_bytes() != path.with_name("back.onnx").read_bytes():
                    raise RuntimeError("what came back is another model")
        times: dict[str, list[float]] = {work: [] for work in WORKS}
        for (nodes, work), pairs in found.items():
            size = graph_size(paths[nodes])
            seconds, memory = min(s for s, _ in pairs), min(m for _, m in pairs)
            times[work].append(seconds)
            print(
                f"  {nodes:7,} nodes   {work:5} {seconds:6.2f} s   memory {memory / 2**20:4.0f} MiB, "
                f"{memory / size:4.2f} times the graph of {size / 2**20:.0f} MiB   aim at most {AIM_MEMORY:.0f}",
                flush=True,
            )
        for work, (small, large) in times.items():
            print(f"  {work}: growth {large / small:5.2f}   aim at most {AIM_GROWTH:.0f}", flush=True)
        path = paths[SIZES[0]]
        for mode in MODES:
            write_graph(path, SIZES[0], types=True)
            without = {work: measured(work, path, mode)[1] for work in WORKS}
            add_weight(path)
            for work in WORKS:
                more = measured(work, path, mode)[1] - without[work]
                print(
                    f"  {mode:9} {work:5} with {WEIGHTS >> 20} MiB of weights: {more / 2**20:5.1f} MiB more, "
                    f"{more / WEIGHTS:6.3f} of them   aim at most {AIM_WEIGHTS}",
                    flush=True,
                )
            for file in (graphml_path(path), data_path(graphml_path(path)), path.with_name("back.onnx")):
                file.unlink(missing_ok=True)


if __name__ == "__main__":
    work_once(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
