"""Compare each reading command with `onnx.load` of its files: best times, in turn."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnx

from benchmarks.generated import write_graph, write_renamed
from benchmarks.shares import profile_row
from benchmarks.table import Row, format_size, growth_row, ratio_row
from modelexport.analysis.analyze import analyze
from modelexport.analysis.compare import compare
from modelexport.analysis.validate import validate
from modelexport.tagged.strip import strip

SIZES = (10_000, 100_000)
ROUNDS = 5
AIM, AIM_ANALYZE, AIM_GROWTH, AIM_MEMORY, AIM_INLINE = 3.0, 2.5, 12.0, 4.0, 0.1

COMMANDS: dict[str, tuple[tuple[str, ...], Callable[..., object]]] = {
    "load": (("tagged",), onnx.load),
    "analyze": (("tagged",), lambda path: analyze(path, details=False)),
    "analyze, with all details": (("tagged",), analyze),
    "validate --check-consistency": (
        ("tagged",),
        lambda path: validate(path, check_consistency=True),
    ),
    "compare with the baseline": (("stripped", "tagged"), compare),
    "compare, renamed and reordered": (("renamed", "tagged"), compare),
}
"""The files and the function of each command."""


def write_files(folder: Path, nodes: int) -> dict[str, Path]:
    """Write the generated graph: tagged, stripped, and renamed and reordered without tags."""
    files = {name: folder / f"{name}{nodes}.onnx" for name in ("tagged", "stripped", "renamed")}
    write_graph(files["tagged"], nodes)
    strip(files["tagged"], files["stripped"])
    write_renamed(files["tagged"], files["renamed"])
    return files


def measure_seconds(work: Callable[..., object], *arguments: object) -> float:
    """Measure one call."""
    gc.collect()
    start = time.perf_counter()
    result = work(*arguments)
    seconds = time.perf_counter() - start
    del result
    return seconds


def measure(files: dict[str, Path]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the times of loading a command's files and of the command, in turn."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for name, (kinds, work) in COMMANDS.items():
        paths = [files[kind] for kind in kinds]
        loads, runs = times[name] = [], []
        for _ in range(ROUNDS):
            loads.append(sum(measure_seconds(onnx.load, path) for path in paths))
            runs.append(measure_seconds(work, *paths))
    return times


def measure_peak(name: str, files: dict[str, Path]) -> int:
    """Return the peak memory in bytes of a process that runs a command, without its imports."""
    paths = [str(files[kind]) for kind in COMMANDS[name][0]]
    command = [sys.executable, "-m", "benchmarks.reading", name, *paths]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(printed.split()[-1]) << 10


def peak_memory_kib() -> int:
    """Return the peak memory of this process; getrusage would include that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_once(name: str, paths: list[str]) -> None:
    """Child process: run a command, and print the memory that it needs."""
    before = peak_memory_kib()
    result = COMMANDS[name][1](*map(Path, paths))
    print(peak_memory_kib() - before)
    del result


def inline_row() -> Row:
    """Measure `analyze` of BERT-base with its initializers in the model file."""
    import torch

    from benchmarks.models import bert
    from modelexport.pipeline import export_model

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "bert-base.onnx"
        export_model(*bert("bert-base"), path, strategy="htp")
        loads, runs = zip(
            *(
                (measure_seconds(onnx.load, path), measure_seconds(COMMANDS["analyze"][1], path))
                for _ in range(ROUNDS)
            ),
            strict=True,
        )
        what = f"analyze, {format_size(path.stat().st_size)} of initializers in the file"
        return ratio_row(what, "onnx.load", loads, runs, AIM_INLINE)


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        measured = {}
        for nodes in SIZES:
            files = write_files(Path(folder), nodes)
            measured[nodes] = measure(files)
            for name, times in measured[nodes].items():
                if name != "load":
                    aim = AIM_ANALYZE if name == "analyze" else AIM
                    what = f"{name}, {nodes:,} nodes"
                    yield ratio_row(what, "onnx.load", *times, aim)
                    if nodes == SIZES[-1] and min(times[1]) > aim * min(times[0]):
                        kinds, work = COMMANDS[name]
                        yield profile_row(what, partial(work, *(files[kind] for kind in kinds)))
        for name in COMMANDS:
            best = {nodes: min(measured[nodes][name][1]) for nodes in SIZES}
            yield growth_row("onnx.load" if name == "load" else name, "nodes", best, AIM_GROWTH)
        loaded = [measure_peak("load", files)]
        for name in COMMANDS:
            if name != "load":
                what = f"{name}, {SIZES[1]:,} nodes, peak memory without the imports"
                peak = [measure_peak(name, files)]
                yield ratio_row(what, "onnx.load", loaded, peak, AIM_MEMORY, format_size)
    yield inline_row()


if __name__ == "__main__":
    run_once(sys.argv[1], sys.argv[2:])
