"""Peak memory of a whole export against a plain one, each in a process of its own, alternating."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, against, size

ROUNDS = 2
AIM = 1.1


def peak(kind: str, size: str, exporter: str) -> int:
    """Peak resident size in MiB of a fresh process that exports once."""
    command = [sys.executable, "-m", "benchmarks.memory", kind, size, exporter]
    return int(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def export_once(kind: str, size: str, exporter: str) -> None:
    from benchmarks.export_cost import ours, plain
    from benchmarks.models import bert

    model, inputs = bert(size)
    with tempfile.TemporaryDirectory() as folder:
        {"plain": plain, "ours": ours}[kind](model, inputs, Path(folder) / "m.onnx", exporter)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def rows() -> Iterator[Row]:
    for exporter in ("torchscript", "dynamo"):
        peaks: dict[str, list[int]] = {"plain": [], "ours": []}
        for _ in range(ROUNDS):
            for kind, found in peaks.items():
                found.append(peak(kind, "bert-base", exporter) << 20)
        what = f"export bert-base, {exporter}, peak memory of the process"
        yield against(what, "torch.onnx.export", min(peaks["plain"]), min(peaks["ours"]), AIM, size)


if __name__ == "__main__":
    export_once(*sys.argv[1:])
