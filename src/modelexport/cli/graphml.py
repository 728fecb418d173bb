"""`modelexport export-graphml` and `modelexport import-onnx`: to a graph editor and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import RenderableType

from modelexport.cli.console import format_size, line, note, progress, show
from modelexport.cli.source_options import one_option
from modelexport.errors import plural
from modelexport.graphml.format import graphml_path
from modelexport.graphml.import_onnx import check_import, import_onnx
from modelexport.graphml.write import GraphmlFiles, export_graphml
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.tagged.records import sidecar_path


@click.command("export-graphml")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", required=False, type=click.Path(path_type=Path))
@one_option("graphml_parameters")
def export_graphml_command(onnx: Path, out: Path | None, graphml_parameters: str) -> None:
    """Write ONNX as GraphML to OUT, or to <stem>_hierarchical_graph.graphml beside it.

    Modules become groups, nested as in the model. Every node, input, output and initializer becomes
    a box, and every use of a value an edge. yEd opens the file. It holds the whole model:
    import-onnx restores it.

    \b
    Examples:
      modelexport export-graphml bert.onnx
      modelexport export-graphml bert.onnx bert.graphml
      modelexport export-graphml bert.onnx --graphml-parameters embedded
    """
    target = graphml_path(onnx) if out is None else out
    check_output_path(target, suffix=".graphml")
    with progress(f"write {target.name}") as step:
        files = export_graphml(
            onnx, target, parameters=graphml_parameters, on_progress=step.fraction
        )
    show(_describe_files(files))
    if files.sidecar_refused is not None:
        note(f"{sidecar_path(onnx).name} is not used: {files.sidecar_refused}")


def _describe_files(files: GraphmlFiles) -> Iterator[RenderableType]:
    counts = ", ".join(
        (
            f"{plural(files.nodes, 'node')} in {plural(files.modules, 'module')}",
            plural(files.edges, "edge"),
        )
    )
    yield line(f"{files.graphml}: {counts}, {format_size(files.graphml.stat().st_size)}")
    if files.data is not None:
        size = format_size(files.data.stat().st_size)
        yield line(f"initializers in {files.data.name}, {size}", 2)


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
    """Write the model that GRAPHML holds to OUT (a .onnx file), equal to the original.

    Labels, colours and layout may have been changed, and an editor may have saved the file. If
    nodes or edges were added, removed or changed, the exit code is 2, the message names the
    element, and nothing is written.

    With --validate the exit code is 1 if ONNX's checker complains, if the graph is not the one that
    was recorded, or if ONNX Runtime rejects it.

    \b
    Examples:
      modelexport import-onnx bert_hierarchical_graph.graphml new.onnx
      modelexport import-onnx bert_hierarchical_graph.graphml new.onnx --validate
    """
    check_output_path(out)
    with progress(f"read {graphml.name}") as step:
        imported = import_onnx(graphml, out, on_progress=step.fraction)
    show([line(f"{out}: {plural(imported.nodes, 'node')}")])
    for path in imported.data:
        show([line(f"initializers in {path.name}", 2)])
    if not validate:
        return
    from modelexport.verification.runtime import run_on_zeros  # with ONNX Runtime, not needed else

    with progress(f"check {out.name}"):
        checked, run = check_import(imported), run_on_zeros(imported.onnx)
    topology = "as recorded" if checked.same_topology else "not the one that was recorded"
    show(
        [
            line(f"checker: {' '.join((checked.checker or 'no complaint').split())}", 2),
            line(f"topology: {topology}", 2),
            line(f"ONNX Runtime: {'not installed' if run is None else run.message}", 2),
        ]
    )
    ctx.exit(0 if checked.passed and (run is None or run.loads) else 1)
