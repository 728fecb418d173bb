"""A model of more than 2 GiB: time and peak memory of an export against a plain one, and of reading the result.

Each measurement has a process of its own. Needs 8 GiB of disk and of memory; not part of `make bench`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, against, seconds, size

AIM = 1.1
_WIDTH, _LAYERS = 4096, 40
_ROUNDS = 2


def export_once(kind: str, exporter: str, target: str) -> None:
    """Export a tower of 2.5 GiB; prints seconds and bytes."""
    import torch
    from torch import nn

    from benchmarks.export_cost import ours, plain

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    start = time.perf_counter()
    {"plain": plain, "ours": ours}[kind](model, (torch.ones(1, _WIDTH),), Path(target), exporter)
    _tell(time.perf_counter() - start)


def read_once(command: str, path: str) -> None:
    """Read the file with one of the commands; prints seconds and bytes."""
    import modelexport

    start = time.perf_counter()
    if command == "validate":
        assert modelexport.validate(path, check_consistency=True).valid
    elif command == "analyze":
        assert modelexport.analyze(path).totals
    else:
        modelexport.strip(path, Path(path).with_name("stripped.onnx"))
    _tell(time.perf_counter() - start)


def _tell(seconds: float) -> None:
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _measure(*arguments: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.large", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(answer[-2]), float(answer[-1])


def rows() -> Iterator[Row]:
    for exporter in ("dynamo", "torchscript"):
        with tempfile.TemporaryDirectory() as folder:
            best: dict[str, tuple[float, float]] = {}
            for _ in range(_ROUNDS):
                for kind in ("plain", "ours"):
                    place = Path(folder) / kind
                    place.mkdir(exist_ok=True)
                    spent, memory = _measure("export", kind, exporter, str(place / "m.onnx"))
                    before = best.get(kind, (spent, memory))
                    best[kind] = (min(spent, before[0]), min(memory, before[1]))
            files = sum(1 for _ in (Path(folder) / "ours").iterdir())
            what = f"export a model of 2.5 GiB, {exporter}"
            for detail, show, plain, own in zip(
                ("", ", peak memory"), (seconds, size), *best.values(), strict=True
            ):
                yield against(what + detail, "torch.onnx.export", plain, own, AIM, show)
            yield Row(f"{what}, files written", "", str(files), "")
            for command in ("validate", "analyze", "strip"):
                spent, memory = _measure("read", command, str(Path(folder) / "ours" / "m.onnx"))
                yield Row(
                    f"{command} a model of 2.5 GiB, {exporter}",
                    "",
                    f"{seconds(spent)}, {size(memory)}",
                    "",
                )


if __name__ == "__main__":
    {"export": export_once, "read": read_once}[sys.argv[1]](*sys.argv[2:])
