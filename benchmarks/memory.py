"""Compare the peak memory of an export with that of a plain one, each in its own process."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, format_size, ratio_row

ROUNDS = 2
AIM = 1.1


def measure_peak(kind: str, size: str, exporter: str) -> int:
    """Return the peak resident size in MiB of a process that exports once."""
    command = [sys.executable, "-m", "benchmarks.memory", kind, size, exporter]
    return int(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def export_once(kind: str, size: str, exporter: str) -> None:
    """Child process: export once, and print the peak resident size in MiB."""
    from benchmarks.export_cost import EXPORTS
    from benchmarks.models import bert

    model, inputs = bert(size)
    with tempfile.TemporaryDirectory() as folder:
        EXPORTS[kind](model, inputs, Path(folder) / "m.onnx", exporter)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    for exporter in ("torchscript", "dynamo"):
        peaks: dict[str, list[int]] = {"plain": [], "ours": []}
        for _ in range(ROUNDS):
            for kind, sizes in peaks.items():
                sizes.append(measure_peak(kind, "bert-base", exporter) << 20)
        what = f"export bert-base, {exporter}, peak memory of the process"
        yield ratio_row(what, "torch.onnx.export", *peaks.values(), AIM, format_size)


if __name__ == "__main__":
    export_once(*sys.argv[1:])
