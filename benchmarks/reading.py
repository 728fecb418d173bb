"""What reading costs: each command against `onnx.load` of the files it is given, alternating, best of several."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx

from benchmarks.generated import write_disguised, write_graph
from benchmarks.table import Row, against, growth, size
from modelexport.analysis.analyze import analyze
from modelexport.analysis.compare import compare
from modelexport.analysis.validate import validate
from modelexport.tagged.strip import strip

SIZES = (10_000, 100_000)
ROUNDS = 5
AIM, AIM_GROWTH, AIM_MEMORY, AIM_WEIGHTS = 3.0, 12.0, 4.0, 0.1

COMMANDS: dict[str, tuple[tuple[str, ...], Callable[..., object]]] = {
    "load": (("tagged",), onnx.load),
    "analyze": (("tagged",), lambda path: analyze(path, details=False)),
    "analyze, with all details": (("tagged",), analyze),
    "validate --check-consistency": (
        ("tagged",),
        lambda path: validate(path, check_consistency=True),
    ),
    "compare with the baseline": (("stripped", "tagged"), compare),
    "compare, renamed and reordered": (("disguised", "tagged"), compare),
}
"""Each with the files it is given."""


def write_files(folder: Path, nodes: int) -> dict[str, Path]:
    """The generated graph, tagged; stripped; and renamed, reordered and without tags."""
    files = {name: folder / f"{name}{nodes}.onnx" for name in ("tagged", "stripped", "disguised")}
    write_graph(files["tagged"], nodes)
    strip(files["tagged"], files["stripped"])
    write_disguised(files["tagged"], files["disguised"])
    return files


def timed(work: Callable[..., object], *arguments: object) -> float:
    gc.collect()
    start = time.perf_counter()
    result = work(*arguments)
    seconds = time.perf_counter() - start
    del result
    return seconds


def measure(files: dict[str, Path]) -> dict[str, tuple[float, float]]:
    """The best time of loading a command's files and of the command, in turn."""
    best: dict[str, tuple[float, float]] = {}
    for name, (given, work) in COMMANDS.items():
        paths = [files[one] for one in given]
        loads, runs = [], []
        for _ in range(ROUNDS):
            loads.append(sum(timed(onnx.load, path) for path in paths))
            runs.append(timed(work, *paths))
        best[name] = min(loads), min(runs)
    return best


def peak(name: str, files: dict[str, Path]) -> int:
    """Peak resident size in KiB of a fresh process that does one thing, beyond that of its imports."""
    paths = [str(files[one]) for one in COMMANDS[name][0]]
    command = [sys.executable, "-m", "benchmarks.reading", name, *paths]
    return int(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def peak_kib() -> int:
    """The largest size so far of this process alone; getrusage would count the parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_once(name: str, paths: list[str]) -> None:
    before = peak_kib()
    result = COMMANDS[name][1](*map(Path, paths))
    print(peak_kib() - before)
    del result


def inline_weights() -> Row:
    """analyze of BERT-base with all its weights inside the file."""
    import torch

    from benchmarks.models import bert
    from modelexport.pipeline import export_model

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "bert-base.onnx"
        export_model(*bert("bert-base"), path, strategy="htp")
        loads, runs = zip(
            *((timed(onnx.load, path), timed(COMMANDS["analyze"][1], path)) for _ in range(ROUNDS)),
            strict=True,
        )
        what = f"analyze, {size(path.stat().st_size)} of weights inside the file"
        return against(what, "onnx.load", min(loads), min(runs), AIM_WEIGHTS)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for nodes in SIZES:
            files = write_files(Path(folder), nodes)
            found[nodes] = measure(files)
            for name, (load, own) in found[nodes].items():
                if name != "load":
                    yield against(f"{name}, {nodes:,} nodes", "onnx.load", load, own, AIM)
        for name in COMMANDS:
            times = {nodes: found[nodes][name][1] for nodes in SIZES}
            yield growth("onnx.load itself" if name == "load" else name, "nodes", times, AIM_GROWTH)
        loaded = peak("load", files)
        for name in COMMANDS:
            if name != "load":
                what = f"{name}, {SIZES[1]:,} nodes, peak memory beyond the imports"
                yield against(
                    what, "onnx.load", loaded << 10, peak(name, files) << 10, AIM_MEMORY, size
                )
    yield inline_weights()


if __name__ == "__main__":
    run_once(sys.argv[1], sys.argv[2:])
