"""The closing summary of an export, and the module tree with its counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rich.console import RenderableType

from modelexport.analysis.outline import TreeModule, outline, shortened
from modelexport.cli.console import line, listed, note, plain_table, show, tensor, visible
from modelexport.errors import plural
from modelexport.report import ExportReport

STATUS_TEXT = {"nodes": "with nodes", "absorbed": "absorbed", "unused": "unused"}
MOST_LINES = 60
"""A tree on a screen has no more lines than this."""
_MOST_INPUTS = 8
_MOST_NOTES = 5
_NUMBERS = {"nodes", "parameters", "stored"}


def show_summary(report: ExportReport, verbose: bool = False) -> None:
    if report.fallback_message is not None:
        note(f"note: {report.fallback_message}")
    for told in report.notes[:_MOST_NOTES]:
        note(f"note: {told}")
    if len(report.notes) > _MOST_NOTES:
        note(f"note: … and {len(report.notes) - _MOST_NOTES} more places that the tracer warns of")
    for dropped in report.dropped_outputs:
        note(f"note: output dropped, not a tensor: {dropped}")
    if report.graphml_error is not None:
        note(
            f"warning: the model is exported, but its GraphML could not be written: {visible(report.graphml_error)}"
        )
    show(_summary(report, verbose))


def _summary(report: ExportReport, verbose: bool) -> Iterator[RenderableType]:
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    methods = ", ".join(f"{count:,} by {method}" for method, count in statistics.methods.items())
    yield line(f"{report.onnx_path}: {hierarchy.model.class_}")
    yield line(
        f"strategy {report.strategy}, exporter {report.exporter}, opset {hierarchy.model.opset}", 2
    )
    yield line(
        f"{statistics.tagged_nodes:,} of {plural(statistics.nodes, 'node')} tagged ({methods}), "
        f"{plural(statistics.tags, 'tag')}",
        2,
    )
    if hierarchy.export.inputs_from is not None:
        yield line(f"inputs from {hierarchy.export.inputs_from}:", 2)
        yield line(listed(map(tensor, hierarchy.export.inputs), _MOST_INPUTS), 4)
    yield line(
        f"{plural(statistics.modules, 'module')}: {status_text(statistics.module_status)}", 2
    )
    yield line(f"sidecar {report.sidecar_path.name}", 2)
    if report.report_path is not None:
        yield line(f"report {report.report_path.name}", 2)
    if report.graphml_path is not None:
        apart = (
            ""
            if report.graphml_data_path is None
            else f", weights in {report.graphml_data_path.name}"
        )
        yield line(f"graphml {report.graphml_path.name}{apart}", 2)
    if verbose:
        for step, seconds in report.timings.items():
            yield line(f"{seconds:8.3f} s  {step}", 2)
    yield ""
    yield from module_tree(
        hierarchy.modules,
        nodes=lambda path: f"{hierarchy.modules[path].nodes:,}",
        status=lambda path: (
            "" if hierarchy.modules[path].status == "nodes" else hierarchy.modules[path].status
        ),
    )


def status_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts.get(key, 0):,} {text}" for key, text in STATUS_TEXT.items())


def module_tree(
    modules: Mapping[str, TreeModule], **columns: Callable[[str], str]
) -> Iterator[RenderableType]:
    """The shown modules as a tree, with columns that tell something of each; equal siblings are drawn once."""
    whole = outline(modules)
    lines = shortened(whole, MOST_LINES)
    titles = {"module": False, **{title: title in _NUMBERS for title in columns}}
    yield plain_table(
        titles,
        [(drawn.text, *(told(drawn.paths[0]) for told in columns.values())) for drawn in lines],
    )
    left_out = len(whole) - len(lines)
    if left_out:
        yield line(f"… and {plural(left_out, 'line')} more, on deeper levels")
