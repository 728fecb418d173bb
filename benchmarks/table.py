"""Format the rows that every part yields, as lines and as the table of docs/benchmarks.md."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

_INTRODUCTION = """\
What modelexport costs and what it finds, compared with `torch.onnx.export`, torch's own metadata,
`onnx.load` and `onnx.utils.extract_model`. Written by `make bench`; not edited by hand. Seconds
depend on the machine. Peer and ours are measured in turn, so the ratios can be compared.
"""
_NOTES = """\
- Exports are compared by the median of several runs, everything else by the best run. In
  parentheses are the smallest and the largest ratio of one round, in which peer and ours ran one
  after the other.
- torch *names a module* for a node in its metadata: dynamo in a list of scopes, torchscript in the
  name of the node, which is read with the help of the module tree.
- The *results* of a module are the tensors that it computed in PyTorch and that a node of the file
  computes. They are at its nodes if each is consumed or produced by a node of the module or of a
  module below it.
- A node has the *right* module if torch names the module of the map. Nodes at which the map itself
  misses a result are not counted.
- After another tool, *doc_string only* counts the tags that the tool kept, *names only* the nodes
  with the output or the name of an original node. A module is *wrong* if the value of the node, on
  inputs that were not used for the match, is that of nodes of other modules.
- After another tool, all nodes of its file are counted, including those that it added. *Of another
  module* are nodes whose module differs from that of the node with the same value before.
"""


class Row(NamedTuple):
    """One measurement: the task, the figure of the peer, ours, and how they compare."""

    what: str
    peer: str
    ours: str
    verdict: str


def format_seconds(value: float) -> str:
    """Format a time."""
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def format_size(value: float) -> str:
    """Format a number of bytes with a suitable unit."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= bytes_:
            return f"{value / bytes_:.1f} {unit}"
    return f"{value:.0f} B"


def ratio_row(
    what: str,
    name: str,
    peer: Sequence[float],
    ours: Sequence[float],
    aim: float | None = None,
    show: Callable[[float], str] = format_seconds,
    typical: Callable[[Sequence[float]], float] = min,
) -> Row:
    """Return a row whose verdict is the ratio of ours to the peer's, with the spread over rounds.

    Args:
        what: The task.
        name: The peer.
        peer: What the peer took in each round.
        ours: What modelexport took in the same rounds.
        aim: The largest ratio that is good enough.
        show: Formats what one of them took.
        typical: Returns the figure that stands for all rounds.
    """
    best_peer, best_ours = typical(peer), typical(ours)
    # A peer that takes long is measured in fewer rounds.
    ratios = [own / other for other, own in zip(peer, ours, strict=False)]
    spread = ""
    if len(ratios) > 1:
        spread = f" ({_format_ratio(min(ratios))} to {_format_ratio(max(ratios))})"
    ratio = best_ours / best_peer
    verdict = f"{_format_ratio(ratio)}{spread}"
    if aim is not None:
        verdict += f", {judge(ratio, aim)}"
    return Row(what, f"{name} {show(best_peer)}", show(best_ours), verdict)


def _format_ratio(ratio: float) -> str:
    return f"{ratio:{'.2f' if ratio >= 0.1 else '.1g'}}"


def growth_row(what: str, unit: str, times: Mapping[int, float], aim: float | None = None) -> Row:
    """Return a row that compares the time of a large case with that of a small one."""
    (small, first), (large, second) = times.items()
    times_text = (
        f"{format_seconds(first)} at {small:,} {unit}, {format_seconds(second)} at {large:,} {unit}"
    )
    growth = second / first
    verdict = f"grows {growth:.2f} times"
    return Row(what, "", times_text, verdict if aim is None else f"{verdict}, {judge(growth, aim)}")


def judge(value: float, aim: float, show: Callable[[float], str] = "{:g}".format) -> str:
    """Return the aim, and whether it is missed."""
    return f"aim at most {show(aim)}{': missed' if value > aim else ''}"


def format_line(row: Row) -> str:
    """Format a row for the terminal."""
    return "  ".join((f"{row.what:64}", *(cell for cell in row[1:-1] if cell), f"-> {row.verdict}"))


def format_page(rows: Iterable[tuple[Row, str]], earlier: str = "") -> str:
    """Format the page.

    Args:
        rows: The rows, and the command that measures each.
        earlier: An earlier page, whose rows of other commands are kept.
    """
    rows = list(rows)
    measured = {f"`{command}` |" for _, command in rows}
    kept = [
        line
        for line in earlier.splitlines()
        if line.endswith("` |") and not line.endswith(tuple(measured))
    ]
    return "\n".join(_page(kept, rows)) + "\n"


def _page(kept: Iterable[str], rows: Iterable[tuple[Row, str]]) -> Iterator[str]:
    names = ("torch", "transformers", "onnx", "onnxruntime")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield "# Benchmarks"
    yield ""
    yield from _INTRODUCTION.splitlines()
    yield ""
    yield f"{versions}; {os.cpu_count()} processors."
    yield ""
    yield "| task | peer | ours | ratio or verdict | command |"
    yield "|---|---|---|---|---|"
    yield from kept
    for row, command in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} | `{command}` |"
    yield ""
    yield _NOTES.rstrip()
