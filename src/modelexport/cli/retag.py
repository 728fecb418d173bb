"""`modelexport retag`: carry the map over to a file that another tool made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.cli.console import (
    inputs_option,
    line,
    plain_table,
    progress,
    show,
)
from modelexport.cli.tree import ABSORBED_TEXT
from modelexport.errors import plural
from modelexport.modules.record import AUXILIARY, Method
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.retagging.retag import RetagReport, retag

if TYPE_CHECKING:
    from rich.console import RenderableType

_MEANINGS: dict[str, str] = {
    Method.SCOPE: "the original node, as the exporter recorded it",
    Method.PARAMETER: "the original node, by the parameter it reads",
    Method.VALUE: "computes the value of an original node",
    Method.FUSION: "implements several original nodes, or one in another way",
    Method.DATAFLOW: "the module of its neighbours",
    Method.ROOT: "no evidence: the model itself",
}


@click.command("retag")
@click.argument("original", type=click.Path(path_type=Path))
@click.argument("changed", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@inputs_option
@click.option(
    "--run/--no-run",
    default=True,
    show_default=True,
    help="Compare the values of both files in ONNX Runtime, or only names and structure.",
)
def retag_command(original: Path, changed: Path, out: Path, inputs: Path | None, run: bool) -> None:
    """Write CHANGED to OUT with a tag on every node, from the tags of ORIGINAL.

    CHANGED is what an optimiser, a quantizer or a converter made of ORIGINAL. All commands work on
    OUT as on an export, and `modelexport strip` restores the bytes of CHANGED. Exit code 1 if
    CHANGED was not made from ORIGINAL.

    \b
    Examples:
      modelexport retag bert.onnx bert_optimized.onnx tagged.onnx
      modelexport retag bert.onnx bert_int8.onnx tagged.onnx --inputs batch.npz
    """
    if inputs is not None and not run:
        raise click.UsageError("--no-run runs nothing: leave --inputs out")
    check_output_path(out)
    with progress() as step:
        report = retag(original, changed, out, inputs=inputs, run=run, on_step=step)
    show(_summary(report, original, changed))


def _summary(report: RetagReport, original: Path, changed: Path) -> Iterator[RenderableType]:
    statistics = report.hierarchy.statistics
    compared = (
        f"values compared on {report.compared}"
        if report.compared
        else "by names and structure; values were not compared"
    )
    yield line(f"{report.onnx_path}: {plural(report.nodes, 'node')}, all with a module")
    yield line(f"nodes of {changed.name}, tags of {original.name}, {compared}", 2)
    rows = [
        (name, f"{count:,}", _MEANINGS.get(name, ""))
        for name, count in sorted(report.methods.items(), key=lambda item: -item[1])
    ]
    yield plain_table({"evidence": False, "nodes": True, "meaning": False}, rows)
    unsure = sum(count for name, count in report.methods.items() if name in AUXILIARY)
    if unsure and not report.compared:
        yield line(f"{plural(unsure, 'node')} could not be decided without values", 2)
    absorbed = statistics.module_status.get("absorbed", 0)
    if absorbed:
        yield line(f"absorbed, {ABSORBED_TEXT}: {plural(absorbed, 'module')}", 2)
    yield line(f"with {report.sidecar_path.name}", 2)
