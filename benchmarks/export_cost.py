"""What the map costs: a whole export against a plain `torch.onnx.export`, alternating, best of several."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import modelexport
from benchmarks.models import bert

STRATEGIES = {"torchscript": "htp", "dynamo": "fx"}
ROUNDS = {("bert-tiny", "torchscript"): 15, ("bert-tiny", "dynamo"): 7, ("bert-base", "torchscript"): 7}
AIM = {"bert-tiny": 1.20, "bert-base": 1.03}


def plain(model: Any, inputs: Any, path: Path, exporter: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, str(path), dynamo=exporter == "dynamo", verbose=False)


def ours(model: Any, inputs: Any, path: Path, exporter: str) -> None:
    modelexport.export_model(model, inputs, path, strategy=STRATEGIES[exporter])


def timed(work: Callable[[], None], folder: Path) -> float:
    """The time of one export into an empty folder, as a first export is."""
    for path in folder.iterdir():
        path.unlink()
    gc.collect()
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: str, exporter: str) -> tuple[float, float]:
    """The best time of a plain export and of ours."""
    model, inputs = bert(size)
    best = {plain: float("inf"), ours: float("inf")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for export in best:
            export(model, inputs, path, exporter)
        for number in range(ROUNDS.get((size, exporter), 3)):
            for export in (plain, ours) if number % 2 else (ours, plain):
                seconds = timed(lambda e=export: e(model, inputs, path, exporter), path.parent)
                best[export] = min(best[export], seconds)
    return best[plain], best[ours]


def main() -> None:
    print("whole export, ours against plain torch.onnx.export")
    for size in AIM:
        for exporter in STRATEGIES:
            base, own = measure(size, exporter)
            print(
                f"  {size:10} {exporter:12} plain {base:7.3f} s   ours {own:7.3f} s   "
                f"ratio {own / base:5.3f}   aim at most {AIM[size]:.2f}",
                flush=True,
            )
