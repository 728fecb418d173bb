"""Compare exporting and reading a model of more than 2 GiB: time and peak memory.

Each measurement has its own process. Needs 8 GiB of disk and of memory; not part of `make bench`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row, format_seconds, format_size, ratio_row

AIM = 1.1
_WIDTH, _LAYERS = 4096, 40
_ROUNDS = 2


def export_once(kind: str, exporter: str, target: str) -> None:
    """Child process: export a tower of 2.5 GiB, and print seconds and bytes."""
    import torch
    from torch import nn

    from benchmarks.export_cost import EXPORTS

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    start = time.perf_counter()
    EXPORTS[kind](model, (torch.ones(1, _WIDTH),), Path(target), exporter)
    _print_usage(time.perf_counter() - start)


def read_once(command: str, path: str) -> None:
    """Child process: run a command on the file, and print seconds and bytes."""
    import modelexport

    start = time.perf_counter()
    if command == "validate":
        assert modelexport.validate(path, check_consistency=True).valid
    elif command == "analyze":
        assert modelexport.analyze(path).totals
    else:
        modelexport.strip(path, Path(path).with_name("stripped.onnx"))
    _print_usage(time.perf_counter() - start)


def _print_usage(seconds: float) -> None:
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _measure(*arguments: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.large", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(answer[-2]), float(answer[-1])


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    for exporter in ("dynamo", "torchscript"):
        with tempfile.TemporaryDirectory() as folder:
            measured: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
            for _ in range(_ROUNDS):
                for kind, rounds in measured.items():
                    target = Path(folder) / kind
                    target.mkdir(exist_ok=True)
                    rounds.append(_measure("export", kind, exporter, str(target / "m.onnx")))
            files = sum(1 for _ in (Path(folder) / "ours").iterdir())
            what = f"export a model of 2.5 GiB, {exporter}"
            figures = [list(zip(*rounds, strict=True)) for rounds in measured.values()]
            for detail, show, plain, own in zip(
                ("", ", peak memory"), (format_seconds, format_size), *figures, strict=True
            ):
                yield ratio_row(what + detail, "torch.onnx.export", plain, own, AIM, show)
            yield Row(f"{what}, files written", "", str(files), "")
            for command in ("validate", "analyze", "strip"):
                spent, memory = _measure("read", command, str(Path(folder) / "ours" / "m.onnx"))
                yield Row(
                    f"{command} a model of 2.5 GiB, {exporter}",
                    "",
                    f"{format_seconds(spent)}, {format_size(memory)}",
                    "",
                )


if __name__ == "__main__":
    {"export": export_once, "read": read_once}[sys.argv[1]](*sys.argv[2:])
