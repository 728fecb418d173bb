"""Measure what profiling by module adds: to the time of a run, and in all to plain runs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.models import MODELS
from benchmarks.table import Row, ratio_row
from modelexport.pipeline import export_model
from modelexport.profiling.profile import profile
from modelexport.tagged.example_inputs import Array
from modelexport.verification.runtime import Session, SessionSettings

SIZES = ("bert-tiny", "bert-base")
ROUNDS, RUNS, WARMUP = 3, 20, 3
AIM_RUN, AIM = 1.1, 5.0


def run_plain(path: Path, feeds: dict[str, Array]) -> float:
    """Load a file, run it as often as `profile` does, and return the median time of a run."""
    session = Session(path, settings=SessionSettings("all"))
    times = []
    for _ in range(WARMUP + RUNS):
        start = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARMUP:])


def run_profile(path: Path, feeds: dict[str, Array]) -> float:
    """Profile a file, and return the time of a run that the profile reports."""
    return profile(path, runs=RUNS, warmup=WARMUP, inputs=feeds).total_ms / 1000


def measure(path: Path, feeds: dict[str, Array]) -> tuple[float, float, float, float]:
    """Return the seconds of a plain and of a profiled run, of all plain runs, and of `profile`."""
    seconds = []
    for work in (run_plain, run_profile):
        start = time.perf_counter()
        seconds += [work(path, feeds), time.perf_counter() - start]
    return seconds[0], seconds[2], seconds[1], seconds[3]


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    for name in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.onnx"
            model, inputs = MODELS[name]()
            report = export_model(model, inputs, path, strategy="htp")
            names = [info.name for info in report.hierarchy.export.inputs]
            feeds = {one: value.numpy() for one, value in zip(names, inputs, strict=True)}
            rounds = [measure(path, feeds) for _ in range(ROUNDS)]
        plain_run, run, plain, ours = zip(*rounds, strict=True)
        yield ratio_row(f"a run in profile, {name}", "ONNX Runtime", plain_run, run, AIM_RUN)
        peer = f"ONNX Runtime, load and {WARMUP + RUNS} runs"
        yield ratio_row(f"profile, {name}", peer, plain, ours, AIM)
