"""`modelexport strip`: restore the baseline from a tagged file."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.console import listed, note
from modelexport.tagged.strip import strip_file


@click.command("strip")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def strip_command(onnx: Path, out: Path) -> None:
    """Write ONNX without its map to OUT: the very bytes that torch's own export wrote.

    Where initializers are in a data file and OUT is in another folder, the data file is copied.
    """
    written, data = strip_file(onnx, out)
    note(f"wrote {written}{f', weights in {listed(data)}' if data else ''}")
