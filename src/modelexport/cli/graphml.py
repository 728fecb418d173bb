"""`modelexport export-graphml` and `modelexport import-onnx`: to a graph editor and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from modelexport.cli.console import line, note, progress, show, size, visible
from modelexport.errors import plural
from modelexport.graphml.check import ImportCheck, check_import
from modelexport.graphml.dialect import MODES, graphml_path
from modelexport.graphml.rebuild import import_onnx
from modelexport.graphml.write import GraphmlFiles, export_graphml
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.tagged.records import sidecar_path

_MOST = 12

parameters_option: Callable[[Any], Any] = click.option(
    "--graphml-parameters",
    type=click.Choice(MODES),
    default=MODES[0],
    show_default=True,
    help="Where the GraphML has its weights: beside it in an .onnxdata, inside it, or in the model itself.",
)


@click.command("export-graphml")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", required=False, type=click.Path(path_type=Path))
@parameters_option
def export_graphml_command(onnx: Path, out: Path | None, graphml_parameters: str) -> None:
    """Write ONNX as GraphML to OUT, or to <stem>_hierarchical_graph.graphml beside it.

    Modules become groups, nested as in the model; every node, input, output and weight a box, every use
    of a tensor an edge. yEd opens it. The whole model is in it: import-onnx gives it back.

    \b
    Examples:
      modelexport export-graphml bert.onnx
      modelexport export-graphml bert.onnx bert.graphml --graphml-parameters embedded
    """
    target = graphml_path(onnx) if out is None else out
    check_output_path(target, suffix=".graphml")
    with progress(f"write {target.name}") as tell:
        files = export_graphml(
            onnx, target, parameters=graphml_parameters, on_progress=tell.fraction
        )
    show(written(files))
    if files.sidecar_refused is not None:
        note(f"{sidecar_path(onnx).name} is not used: {files.sidecar_refused}")


def written(files: GraphmlFiles) -> Iterator[RenderableType]:
    """What was written."""
    modules = plural(files.modules, "module")
    told = f"{plural(files.nodes, 'node')} in {modules}, {plural(files.edges, 'edge')}"
    yield line(f"{files.graphml}: {told}, {size(files.graphml.stat().st_size)}")
    if files.data is not None:
        yield line(f"weights in {files.data.name}, {size(files.data.stat().st_size)}", 2)


@click.command("import-onnx")
@click.argument("graphml", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--validate",
    is_flag=True,
    help="Check it: ONNX checker, topology, ONNX Runtime (load, run on zeros).",
)
@click.pass_context
def import_onnx_command(ctx: click.Context, graphml: Path, out: Path, validate: bool) -> None:
    """Write the model that GRAPHML holds to OUT (a .onnx file): equal to the original, field for field.

    Labels, colours and layout may have been changed. Operators and edges that were removed, added or
    moved are changed in the model too, if it stays a valid one; otherwise the place is named and nothing
    is written.

    With --validate the exit code is 1 if ONNX's checker complains, if the graph is not the one that was
    recorded, or if ONNX Runtime refuses it.
    """
    check_output_path(out)
    with progress(f"read {graphml.name}") as tell:
        imported = import_onnx(graphml, out, on_progress=tell.fraction)
    show([line(f"{out}: {plural(imported.nodes, 'node')}")])
    for path in imported.data:
        show([line(f"weights in {path.name}", 2)])
    for change in imported.edits[:_MOST]:
        note(f"edited: {visible(change)}")
    if len(imported.edits) > _MOST:
        note(f"edited: … and {plural(len(imported.edits) - _MOST, 'change')} more")
    if validate:
        with progress(f"check {out.name}"):
            checked = check_import(imported)
        show(_checked(checked))
        ctx.exit(0 if checked.passed else 1)


def _checked(checked: ImportCheck) -> Iterator[RenderableType]:
    yield line(f"checker: {' '.join((checked.checker or 'no complaint').split())}", 2)
    yield line(
        f"topology: {'as recorded' if checked.same_topology else 'not the one that was recorded'}",
        2,
    )
    yield line(f"ONNX Runtime: {checked.runtime or 'not installed'}", 2)
