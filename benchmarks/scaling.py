"""How capture and tagging grow: their time without torch at 1,000 and at 8,000 modules."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modelexport
from benchmarks.models import tower
from benchmarks.table import Row, growth_row
from modelexport.capture import hooks, jit_lowering, torchscript
from modelexport.capture.module_tree import read_module_tree
from modelexport.modules.tags import assign_tags, make_policy

SIZES = (1_000, 8_000)
ROUNDS = 3
AIM = 10.0


def tagging_seconds(modules: int) -> float:
    """Measure all steps of an export except torch's."""
    model, inputs = tower(modules)
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            report = modelexport.export_model(
                model, inputs, Path(folder) / "m.onnx", strategy="htp"
            )
            own = sum(
                seconds
                for step, seconds in report.timings.items()
                if not step.startswith("export with torch")
            )
            best = min(best, own)
    return best


CAPTURE = [
    (hooks.Recorder, ("before", "after")),
    (jit_lowering.Lowering, ("inline", "_note_added", "_translate", "renumber", "finish")),
    (torchscript, ("read_trace",)),
]
"""The functions of modelexport that run inside torch's export."""


def capture_seconds(modules: int) -> float:
    """Measure the functions of CAPTURE in one export."""
    model, inputs = tower(modules)
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder, timers() as spent:
        for _ in range(ROUNDS):
            spent[0] = 0.0
            modelexport.export_model(model, inputs, Path(folder) / "m.onnx", strategy="htp")
            best = min(best, spent[0])
    return best


@contextmanager
def timers() -> Iterator[list[float]]:
    """Sum the time of every function of CAPTURE."""
    spent = [0.0]

    def add_timer(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    originals = [(owner, name, getattr(owner, name)) for owner, names in CAPTURE for name in names]
    for owner, name, function in originals:
        setattr(owner, name, add_timer(function))
    try:
        yield spent
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def tree_seconds(modules: int) -> float:
    """Measure reading the module tree and assigning tags."""
    model, _ = tower(modules)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        assign_tags(read_module_tree(model), make_policy())
        best = min(best, time.perf_counter() - start)
    return best


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    measures = {
        "module tree and tags": tree_seconds,
        "tagging": tagging_seconds,
        "capture": capture_seconds,
    }
    totals = dict.fromkeys(SIZES, 0.0)
    for name, measure in measures.items():
        times = {modules: measure(modules) for modules in SIZES}
        if name != "module tree and tags":
            for modules, spent in times.items():
                totals[modules] += spent
        yield growth_row(f"{name}, without torch", "modules", times)
    yield growth_row("capture plus tagging, without torch", "modules", totals, AIM)
