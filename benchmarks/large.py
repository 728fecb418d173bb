"""A model of more than 2 GiB: time and peak memory of an export against a plain one, and of reading the result.

Each measurement has a process of its own. Needs 8 GiB of disk and of memory; not part of `make bench`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AIM = 1.1
_WIDTH, _LAYERS = 4096, 40
_ROUNDS = 2


def export_once(kind: str, exporter: str, target: str) -> None:
    """Export a tower of 2.5 GiB; prints seconds and MiB."""
    import torch
    from torch import nn

    from benchmarks.export_cost import ours, plain

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    start = time.perf_counter()
    {"plain": plain, "ours": ours}[kind](model, (torch.ones(1, _WIDTH),), Path(target), exporter)
    _tell(time.perf_counter() - start)


def read_once(command: str, path: str) -> None:
    """Read the file with one of the commands; prints seconds and MiB."""
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
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _measure(*arguments: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.large", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(answer[-2]), float(answer[-1])


def main() -> None:
    print("a model of 2.5 GiB")
    for exporter in ("dynamo", "torchscript"):
        with tempfile.TemporaryDirectory() as folder:
            best: dict[str, tuple[float, float]] = {}
            for _ in range(_ROUNDS):
                for kind in ("plain", "ours"):
                    place = Path(folder) / kind
                    place.mkdir(exist_ok=True)
                    seconds, memory = _measure("export", kind, exporter, str(place / "m.onnx"))
                    before = best.get(kind, (seconds, memory))
                    best[kind] = (min(seconds, before[0]), min(memory, before[1]))
            files = sum(1 for _ in (Path(folder) / "ours").iterdir())
            ratios = [own / base for own, base in zip(best["ours"], best["plain"], strict=True)]
            print(
                f"  {exporter:12} plain {best['plain'][0]:6.1f} s {best['plain'][1]:6.0f} MiB  ours "
                f"{best['ours'][0]:6.1f} s {best['ours'][1]:6.0f} MiB  ratios {ratios[0]:.2f} {ratios[1]:.2f}  "
                f"{files} files   aim at most {AIM:.2f}",
                flush=True,
            )
            for command in ("validate", "analyze", "strip"):
                seconds, memory = _measure("read", command, str(Path(folder) / "ours" / "m.onnx"))
                print(f"  {'':12} {command:9} {seconds:6.2f} s {memory:6.0f} MiB", flush=True)


if __name__ == "__main__":
    {"export": export_once, "read": read_once}[sys.argv[1]](*sys.argv[2:])
