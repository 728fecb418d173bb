"""Measure the start of commands: in turn with the import of what they need, in new processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.generated import BLOCK, write_graph
from benchmarks.shares import import_row
from benchmarks.table import Row, ratio_row

ROUNDS = 9
AIM = 2.0
COMMANDS = {
    "--help": "import click",
    "analyze, 100 nodes": "import onnx",
    "view, 100 nodes": "import onnx",
    "export --help": "import click",
}
"""The packages that a command cannot do without."""


def measure_process(*arguments: str) -> float:
    """Measure a new Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.onnx"
        write_graph(path, BLOCK)
        for command, needed in COMMANDS.items():
            name, _, size = command.partition(", ")
            arguments = ("-m", "modelexport", *name.split(), *([str(path)] if size else []))
            peer, ours = [], []
            for _ in range(ROUNDS):
                peer.append(measure_process("-c", needed))
                ours.append(measure_process(*arguments))
            what = f"start: modelexport {command}"
            yield ratio_row(what, needed, peer, ours, AIM)
            if min(ours) > AIM * min(peer):
                yield import_row(what, arguments)
