"""What people see: progress and notes on stderr, summaries and trees on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from modelexport.report import ExportReport
from modelexport.tagged.sidecar import ModuleRecord, Sidecar

_WIDTH_WHEN_PIPED = 80
_STATUS_TEXT = {"nodes": "with nodes", "absorbed": "absorbed", "unused": "unused"}


def note(text: str) -> None:
    click.echo(text, err=True)


def console() -> Console:
    """stdout at the terminal's width, at 80 columns when piped."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_WHEN_PIPED)


@contextmanager
def progress(verbose: bool) -> Iterator[Callable[[str], None]]:
    """A spinner that names the running step; plain lines where stderr is no terminal."""
    screen = Console(stderr=True, highlight=False)
    if verbose or not screen.is_terminal:
        yield lambda step: note(f"{step} ...")
        return
    with screen.status("start") as status:
        yield lambda step: status.update(f"{step} ...")


def show_summary(report: ExportReport, verbose: bool = False) -> None:
    """The closing summary of an export."""
    if report.fallback_reason is not None:
        note(f"note: dynamo could not export this model ({report.fallback_reason}); {report.exporter} was used")
    for dropped in report.dropped_outputs:
        note(f"note: output dropped, not a tensor: {dropped}")
    out = console()
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    methods = ", ".join(f"{count} by {method}" for method, count in statistics.methods.items())
    status = ", ".join(f"{statistics.module_status.get(key, 0)} {text}" for key, text in _STATUS_TEXT.items())
    out.print(f"{report.onnx_path}: {hierarchy.model.class_}")
    out.print(f"  strategy {report.strategy}, exporter {report.exporter}, opset {hierarchy.model.opset}")
    out.print(f"  {statistics.tagged_nodes} of {statistics.nodes} nodes tagged ({methods}), {statistics.tags} tags")
    out.print(f"  {statistics.modules} modules: {status}")
    out.print(f"  sidecar {report.sidecar_path.name}")
    if verbose:
        for step, seconds in report.timings.items():
            out.print(f"  {seconds:8.3f} s  {step}")
    out.print()
    out.print(module_tree(hierarchy))


def plain_table() -> Table:
    """Columns without lines, two spaces apart."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def module_tree(hierarchy: Sidecar) -> Table:
    """The shown modules as a tree with their node counts; equal siblings in a row are drawn once."""
    children = _shown_children(hierarchy.modules)
    table = plain_table()
    table.add_column("module", no_wrap=True, overflow="ellipsis")
    table.add_column("nodes", justify="right", no_wrap=True, min_width=5)
    table.add_column("status", no_wrap=True, min_width=8)

    def add(path: str, label: str, lead: str, branch: str) -> None:
        record = hierarchy.modules[path]
        table.add_row(Text(lead + branch + label), str(record.nodes), "" if record.status == "nodes" else record.status)
        below = lead + {"": "", "├── ": "│   ", "└── ": "    "}[branch]
        groups = _equal_runs(children[path], hierarchy.modules, children)
        for place, group in enumerate(groups):
            add(group[0], _label(group, hierarchy.modules), below, "└── " if place == len(groups) - 1 else "├── ")

    add("", _label([""], hierarchy.modules), "", "")
    return table


def _shown_children(modules: dict[str, ModuleRecord]) -> dict[str, list[str]]:
    """The shown modules directly below each shown one, in the order of execution."""
    by_tag = {record.tag: path for path, record in modules.items() if record.tag is not None}
    children: dict[str, list[str]] = {path: [] for path in by_tag.values()}
    last = len(modules)
    for path in sorted(by_tag.values(), key=lambda p: (_order(modules[p], last), p)):
        tag = modules[path].tag or ""
        parent = by_tag.get(tag.rpartition("/")[0])
        if parent is not None:
            children[parent].append(path)
    return children


def _order(record: ModuleRecord, last: int) -> int:
    return last if record.execution_order is None else record.execution_order


def _equal_runs(paths: list[str], modules: dict[str, ModuleRecord], children: dict[str, list[str]]) -> list[list[str]]:
    """Numbered siblings in a row that have the same class, node count and subtree, as groups."""
    runs: list[list[str]] = []
    previous: tuple[object, ...] | None = None
    for path in paths:
        numbered = path.rpartition(".")[2].isdecimal()
        signature = _signature(path, modules, children) if numbered else None
        if signature is not None and signature == previous:
            runs[-1].append(path)
        else:
            runs.append([path])
        previous = signature
    return runs


def _signature(path: str, modules: dict[str, ModuleRecord], children: dict[str, list[str]]) -> tuple[object, ...]:
    record = modules[path]
    return (record.class_, record.status, record.nodes, *(_signature(p, modules, children) for p in children[path]))


def _label(group: list[str], modules: dict[str, ModuleRecord]) -> str:
    names = [(modules[path].tag or "").rpartition("/")[2] for path in (group[0], group[-1])]
    if len(group) == 1:
        return names[0]
    return f"{names[0]} … {names[1]}  x{len(group)}"
