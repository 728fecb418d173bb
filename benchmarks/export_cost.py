"""Compare an export with a plain `torch.onnx.export`: median times in turn, and file sizes."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import modelexport
from benchmarks.models import MODELS
from benchmarks.table import Row, format_seconds, format_size, ratio_row

STRATEGIES = {"torchscript": "htp", "dynamo": "fx"}
ROUNDS = {"torchscript": 9, "dynamo": 3}
ROUNDS_OF_LARGE = {"torchscript": 5, "dynamo": 3}
TORCH_STEP = "export with torch"
AIM = {"bert-tiny": 1.10, "bert-base": 1.03}


def export_plain(model: Any, inputs: Any, path: Path, exporter: str) -> None:
    """Export with torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, str(path), dynamo=exporter == "dynamo", verbose=False)


def export_ours(model: Any, inputs: Any, path: Path, exporter: str) -> None:
    """Export with modelexport."""
    modelexport.export_model(model, inputs, path, strategy=STRATEGIES[exporter])


EXPORTS = {"plain": export_plain, "ours": export_ours}


def measure_seconds(work: Callable[[], None], folder: Path) -> float:
    """Measure one export into an empty folder."""
    for path in folder.iterdir():
        path.unlink()
    gc.collect()
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(model: Any, inputs: Any, exporter: str, rounds: int) -> list[list[float]]:
    """Return the times of plain exports and of ours, in turn."""
    times: dict[Callable[..., None], list[float]] = {export_plain: [], export_ours: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for export in times:
            export(model, inputs, path, exporter)
        for number in range(rounds):
            for export in list(times) if number % 2 else reversed(times):
                work = partial(export, model, inputs, path, exporter)
                times[export].append(measure_seconds(work, path.parent))
    return [times[export_plain], times[export_ours]]


class Sizes(NamedTuple):
    """Bytes of a plain export, ours, and ours with `clean`, with data files; of the sidecar."""

    plain: int
    tagged: int
    clean: int
    sidecar: int


def measure_sizes(model: Any, inputs: Any, exporter: str) -> Sizes:
    """Export a model in each way, and return the sizes of the files."""
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("plain", "tagged", "clean")}
        for folder in folders.values():
            folder.mkdir()
        export_plain(model, inputs, folders["plain"] / "m.onnx", exporter)
        for kind in ("tagged", "clean"):
            path, strategy = folders[kind] / "m.onnx", STRATEGIES[exporter]
            modelexport.export_model(model, inputs, path, strategy=strategy, clean=kind == "clean")
        totals = [
            sum(file.stat().st_size for file in folder.glob("m.onnx*"))
            for folder in folders.values()
        ]
        return Sizes(*totals, (folders["tagged"] / "m_hierarchy.json").stat().st_size)


def measure_steps(model: Any, inputs: Any, exporter: str, rounds: int) -> dict[str, float]:
    """Return the median time of each step of our export."""
    timings = []
    with tempfile.TemporaryDirectory() as folder:
        path, strategy = Path(folder) / "m.onnx", STRATEGIES[exporter]
        for _ in range(rounds):
            timings.append(modelexport.export_model(model, inputs, path, strategy=strategy).timings)
    return {step: statistics.median(timing[step] for timing in timings) for step in timings[0]}


def steps_row(what: str, plain: float, ours: float, steps: dict[str, float]) -> Row:
    """Return a row that says what an export takes longer for than torch alone."""
    in_torch = sum(seconds for step, seconds in steps.items() if step.startswith(TORCH_STEP))
    return Row(
        f"{what}: where the time goes",
        f"torch.onnx.export {format_seconds(plain)}",
        ", ".join(f"{step} {format_seconds(seconds)}" for step, seconds in steps.items()),
        f"{format_seconds(in_torch - plain)} more while torch runs, with our hooks; "
        f"{format_seconds(ours - in_torch)} before and after",
    )


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    for name, build in MODELS.items():
        model, inputs = build()
        large = sum(parameter.numel() for parameter in model.parameters()) > 50_000_000
        for exporter in STRATEGIES:
            rounds = (ROUNDS_OF_LARGE if large else ROUNDS)[exporter]
            times = measure(model, inputs, exporter, rounds)
            what = f"export {name}, {exporter}"
            aim = AIM.get(name)
            yield ratio_row(what, "torch.onnx.export", *times, aim, typical=statistics.median)
            medians = [statistics.median(seconds) for seconds in times]
            if aim is not None and medians[1] > aim * medians[0]:
                yield steps_row(what, *medians, measure_steps(model, inputs, exporter, rounds))
            sizes = measure_sizes(model, inputs, exporter)
            plain, tagged, clean, sidecar = map(format_size, sizes)
            yield Row(
                f"size of {name}, {exporter}, with initializers",
                f"torch.onnx.export {plain}",
                f"{tagged} tagged, {clean} clean; sidecar {sidecar}",
                f"{sizes.tagged / sizes.plain:.2f} tagged, {sizes.clean / sizes.plain:.2f} clean",
            )
