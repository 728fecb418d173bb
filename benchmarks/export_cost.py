"""What the map costs: a whole export against a plain `torch.onnx.export`, in turn, medians; and the files' sizes."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import modelexport
from benchmarks.models import MODELS
from benchmarks.table import Row, against, size

STRATEGIES = {"torchscript": "htp", "dynamo": "fx"}
ROUNDS = {"torchscript": 9, "dynamo": 3}
ROUNDS_OF_LARGE = {"torchscript": 5, "dynamo": 3}
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


def measure(model: Any, inputs: Any, exporter: str, rounds: int) -> tuple[float, float]:
    """The median time of a plain export and of ours."""
    times: dict[Callable[..., None], list[float]] = {plain: [], ours: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for export in times:
            export(model, inputs, path, exporter)
        for number in range(rounds):
            for export in (plain, ours) if number % 2 else (ours, plain):
                times[export].append(
                    timed(lambda e=export: e(model, inputs, path, exporter), path.parent)
                )
    return statistics.median(times[plain]), statistics.median(times[ours])


class Sizes(NamedTuple):
    """Bytes on disk: a plain export, ours and ours with `clean`, data files included; and the sidecar beside them."""

    plain: int
    tagged: int
    clean: int
    sidecar: int


def sizes(model: Any, inputs: Any, exporter: str) -> Sizes:
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("plain", "tagged", "clean")}
        for folder in folders.values():
            folder.mkdir()
        plain(model, inputs, folders["plain"] / "m.onnx", exporter)
        for kind in ("tagged", "clean"):
            path, strategy = folders[kind] / "m.onnx", STRATEGIES[exporter]
            modelexport.export_model(model, inputs, path, strategy=strategy, clean=kind == "clean")
        totals = [
            sum(file.stat().st_size for file in folder.glob("m.onnx*"))
            for folder in folders.values()
        ]
        return Sizes(*totals, (folders["tagged"] / "m_hierarchy.json").stat().st_size)


def rows() -> Iterator[Row]:
    for name, build in MODELS.items():
        model, inputs = build()
        large = sum(parameter.numel() for parameter in model.parameters()) > 50_000_000
        for exporter in STRATEGIES:
            rounds = (ROUNDS_OF_LARGE if large else ROUNDS)[exporter]
            spent = measure(model, inputs, exporter, rounds)
            yield against(f"export {name}, {exporter}", "torch.onnx.export", *spent, AIM.get(name))
            found = sizes(model, inputs, exporter)
            yield Row(
                f"size of {name}, {exporter}, weights included",
                f"torch.onnx.export {size(found.plain)}",
                f"{size(found.tagged)} tagged, {size(found.clean)} clean; sidecar {size(found.sidecar)}",
                f"{found.tagged / found.plain:.2f} tagged, {found.clean / found.plain:.2f} clean",
            )
