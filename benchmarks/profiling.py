"""Measure what profiling by module adds: to the time of a run, and in all to plain runs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.models import MODELS
from benchmarks.table import Row, ratio_row
from modelexport.pipeline import export_model
from modelexport.profiling.profile import profile
from modelexport.tagged.example_inputs import Array
from modelexport.verification.runtime import Session, SessionSettings

SIZES = ("bert-tiny", "bert-base")
ROUNDS, RUNS, WARMUP = 3, 20, 3
AIM_RUN, AIM = 1.2, 10.0


def run_plain(path: Path, feeds: dict[str, Array]) -> float:
    """Load a file, run it as often as `profile` does, and return the median time of a run."""
    session = Session(path, settings=SessionSettings("all"))
    times = []
    for _ in range(WARMUP + RUNS):
        start = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARMUP:])


class Round(NamedTuple):
    """The seconds of a run and of the whole, in ONNX Runtime alone and in `profile`."""

    plain_run: float
    plain: float
    reported_run: float
    profiled_run: float
    profile: float


def measure(path: Path, feeds: dict[str, Array]) -> Round:
    """Run a file in ONNX Runtime alone, then profile it."""
    start = time.perf_counter()
    plain_run = run_plain(path, feeds)
    middle = time.perf_counter()
    result = profile(path, runs=RUNS, warmup=WARMUP, inputs=feeds)
    end = time.perf_counter()
    assert result.plain_ms is not None
    runs = result.plain_ms / 1000, result.total_ms / 1000
    return Round(plain_run, middle - start, *runs, end - middle)


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
        plain_run, plain, reported, profiled, ours = zip(*rounds, strict=True)
        peer = "ONNX Runtime"
        what = f"profile, {name}: a run"
        yield ratio_row(f"{what} without the profiler", peer, plain_run, reported, AIM_RUN, _ms)
        yield ratio_row(f"{what} with the profiler", peer, plain_run, profiled, show=_ms)
        peer = f"ONNX Runtime, load and {WARMUP + RUNS} runs"
        yield ratio_row(f"profile, {name}", peer, plain, ours, AIM)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
