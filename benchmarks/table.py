"""The rows that every part yields, on the terminal and as the one table of docs/benchmarks.md."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


NOTES = """\
- Exports are compared by the median of several runs, everything else by the best.
- A node is *given to a module* by torch where its metadata names one. dynamo has a list of scopes; the node names of
  torchscript are read by someone who has the module tree at hand, and knows how it repeats and numbers names.
- A module's *values* are the tensors that it made in PyTorch and that a node of the file computes. They are at its
  nodes if each of them is read or written by a node that is said to be its own, or that of a module below it.
- A node is given to the *right* module if torch names the one that the map has. The map judges only where it places
  the values of its own module, and of the one that torch names.
- After another tool, all nodes of the file that it wrote are counted, also those that it made anew. *Of another
  module* are those that name another module than the node which made the same tensor before.
"""


class Row(NamedTuple):
    """One measurement: what was done, what the peer needs or gives, what ours does, and how they compare."""

    what: str
    peer: str
    ours: str
    verdict: str


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def size(value: float) -> str:
    """Bytes, in the unit that leaves a readable number."""
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= bytes_:
            return f"{value / bytes_:.1f} {unit}"
    return f"{value:.0f} B"


def against(
    what: str,
    name: str,
    peer: float,
    ours: float,
    aim: float | None = None,
    show: Callable[[float], str] = seconds,
) -> Row:
    """A row whose verdict is the ratio of ours to the peer's."""
    ratio = ours / peer
    return Row(
        what,
        f"{name} {show(peer)}",
        show(ours),
        f"{ratio:{'.2f' if ratio >= 0.1 else '.1g'}}{_aim(aim)}",
    )


def growth(what: str, unit: str, times: Mapping[int, float], aim: float | None = None) -> Row:
    """A row that has no peer but a smaller case of the same: times by the size of the case."""
    (small, first), (large, second) = times.items()
    told = f"{seconds(first)} at {small:,} {unit}, {seconds(second)} at {large:,} {unit}"
    return Row(what, "", told, f"grows {second / first:.2f} times{_aim(aim)}")


def _aim(aim: float | None) -> str:
    return "" if aim is None else f", aim at most {aim:g}"


def line(row: Row) -> str:
    """A row as the terminal shows it."""
    return "  ".join((f"{row.what:64}", *(cell for cell in row[1:-1] if cell), f"-> {row.verdict}"))


def page(rows: Iterable[tuple[Row, str]]) -> str:
    """The page, from the rows and the command that makes each."""
    return "\n".join(_page(rows)) + "\n"


def _page(rows: Iterable[tuple[Row, str]]) -> Iterator[str]:
    names = ("torch", "transformers", "onnx", "onnxruntime")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    yield "# Benchmarks"
    yield ""
    yield "What this costs and what it gives, against what one would use instead: `torch.onnx.export` alone, torch's"
    yield "own metadata, `onnx.load` and `onnx.utils.extract_model`. Written by `make bench` in one run, not edited by"
    yield "hand. Seconds are those of one machine; the ratios compare, since peer and ours are measured in turn."
    yield f"{versions}; {os.cpu_count()} processors."
    yield ""
    yield "| what | peer | ours | ours to the peer, or verdict | command |"
    yield "|---|---|---|---|---|"
    for row, command in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} | `{command}` |"
    yield ""
    yield NOTES.rstrip()
