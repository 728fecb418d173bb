"""Print the summary of an export, and draw the module tree with its counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from modelexport.analysis.outline import TreeModule, outline, shorten
from modelexport.cli.console import describe_tensor, line, listed, note, plain_table, show, visible
from modelexport.errors import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelexport.report import ExportReport

STATUS_TEXT = {"nodes": "with nodes", "absorbed": "absorbed", "unused": "unused"}
MOST_LINES = 60
"""The most lines of a tree on a screen."""
_MOST_INPUTS = 8
_MOST_NOTES = 5
_NUMBERS = {"nodes", "parameters", "stored"}


def show_summary(report: ExportReport, verbose: bool = False) -> None:
    """Print what an export did: notes to stderr, the summary and the module tree to stdout.

    Args:
        report: The report of the export.
        verbose: Add the time of each step.
    """
    if report.fallback_message is not None:
        note(f"note: {report.fallback_message}")
    for text in report.notes[:_MOST_NOTES]:
        note(f"note: {text}")
    if len(report.notes) > _MOST_NOTES:
        note(f"note: … and {len(report.notes) - _MOST_NOTES} more places that the tracer warns of")
    for dropped in report.dropped_outputs:
        note(f"note: output dropped, not a tensor: {dropped}")
    if report.graphml_error is not None:
        note(
            "warning: the model is exported, but its GraphML could not be written: "
            f"{visible(report.graphml_error)}"
        )
    show(_summary(report, verbose))


def _summary(report: ExportReport, verbose: bool) -> Iterator[RenderableType]:
    """Describe an export and its files."""
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    modules = hierarchy.modules
    methods = ", ".join(f"{count:,} by {method}" for method, count in statistics.methods.items())
    tagged = f"{statistics.tagged_nodes:,} of {plural(statistics.nodes, 'node')} tagged"
    status = status_text(statistics.module_status)
    yield line(f"{report.onnx_path}: {hierarchy.model.class_}")
    origin = f"strategy {report.strategy}, exporter {report.exporter}"
    yield line(f"{origin}, opset {hierarchy.model.opset}", 2)
    yield line(f"{tagged} ({methods}), {plural(statistics.tags, 'tag')}", 2)
    if hierarchy.export.inputs_from is not None:
        yield line(f"inputs from {hierarchy.export.inputs_from}:", 2)
        yield line(listed(map(describe_tensor, hierarchy.export.inputs), _MOST_INPUTS), 4)
    yield line(f"{plural(statistics.modules, 'module')}: {status}", 2)
    yield line(f"sidecar {report.sidecar_path.name}", 2)
    if report.report_path is not None:
        yield line(f"report {report.report_path.name}", 2)
    if report.graphml_path is not None:
        data = report.graphml_data_path
        weights = "" if data is None else f", weights in {data.name}"
        yield line(f"graphml {report.graphml_path.name}{weights}", 2)
    if verbose:
        for step, seconds in report.timings.items():
            yield line(f"{seconds:8.3f} s  {step}", 2)
    yield ""
    yield from module_tree(
        modules,
        nodes=lambda path: f"{modules[path].nodes:,}",
        status=lambda path: "" if modules[path].status == "nodes" else modules[path].status,
    )


def status_text(counts: Mapping[str, int]) -> str:
    """Describe how many modules have each status, as in `3 with nodes, 1 absorbed, 0 unused`."""
    return ", ".join(f"{counts.get(key, 0):,} {text}" for key, text in STATUS_TEXT.items())


def module_tree(
    modules: Mapping[str, TreeModule], **columns: Callable[[str], str]
) -> Iterator[RenderableType]:
    """Draw the shown modules as a tree; equal siblings share a line.

    Args:
        modules: The modules by path.
        columns: For each further column, its title and what it says of the module at a path.

    Yields:
        The table, for `show`, and a line if deeper levels are left out.
    """
    whole = outline(modules)
    lines = shorten(whole, MOST_LINES)
    titles = {"module": False, **{title: title in _NUMBERS for title in columns}}
    rows = [(row.text, *(cell(row.paths[0]) for cell in columns.values())) for row in lines]
    yield plain_table(titles, rows)
    left_out = len(whole) - len(lines)
    if left_out:
        yield line(f"… and {plural(left_out, 'line')} more, on deeper levels")
