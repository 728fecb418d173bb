"""How capture and tagging grow: the time that is ours at 1,000 and at 8,000 modules."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import modelexport
from benchmarks.export_cost import plain
from benchmarks.models import tower
from modelexport.hierarchy.capture import scan
from modelexport.hierarchy.tags import assign_tags, make_policy

SIZES = (1_000, 8_000)
ROUNDS = 3
AIM = 10.0


def tagging_seconds(modules: int) -> float:
    """All steps of an export that are not torch's."""
    model, inputs = tower(modules)
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            report = modelexport.export_model(model, inputs, Path(folder) / "m.onnx", strategy="htp")
            own = sum(seconds for step, seconds in report.timings.items() if not step.startswith("export with torch"))
            best = min(best, own)
    return best


def capture_seconds(modules: int) -> float:
    """What the hooks and the evidence add to torch's own export, alternating."""
    model, inputs = tower(modules)
    times = {"plain": float("inf"), "ours": float("inf")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        for _ in range(ROUNDS):
            start = time.perf_counter()
            plain(model, inputs, path, "torchscript")
            times["plain"] = min(times["plain"], time.perf_counter() - start)
            report = modelexport.export_model(model, inputs, path, strategy="htp")
            times["ours"] = min(times["ours"], report.timings["export with torch (torchscript)"])
    return max(times["ours"] - times["plain"], 1e-4)


def tree_seconds(modules: int) -> float:
    model, _ = tower(modules)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        assign_tags(scan(model), make_policy())
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    print("growth from 1,000 to 8,000 modules (8 times)")
    measures = {"module tree and tags": tree_seconds, "tagging": tagging_seconds, "capture": capture_seconds}
    totals = dict.fromkeys(SIZES, 0.0)
    for name, measure in measures.items():
        small, large = (measure(size) for size in SIZES)
        if name != "module tree and tags":
            totals[SIZES[0]] += small
            totals[SIZES[1]] += large
        print(f"  {name:22} {small:8.3f} s  {large:8.3f} s  ratio {large / small:6.2f}", flush=True)
    small, large = totals.values()
    name = "capture plus tagging"
    print(f"  {name:22} {small:8.3f} s  {large:8.3f} s  ratio {large / small:6.2f}   aim at most {AIM:.0f}")
