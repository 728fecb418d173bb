"""`modelexport view`: write a model as a page, or as a graph for Model Explorer."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.console import format_size, line, note, progress, show
from modelexport.errors import plural
from modelexport.onnx_file.model_file import name_beside
from modelexport.viewing.explorer import write_model_explorer
from modelexport.viewing.overlays import read_overlays
from modelexport.viewing.page import check_page, view


@click.command("view")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("files", metavar="[OTHER] [OUT]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--overlay",
    "overlays",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Colour the modules by a JSON result of profile, verify, quantize --sensitivity or "
    "analyze. May be repeated.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["html", "model-explorer"]),
    default="html",
    show_default=True,
    help="A page, or JSON for Model Explorer; its node data goes to a file for each overlay.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the browser.")
def view_command(
    onnx: Path,
    files: tuple[Path, ...],
    overlays: tuple[Path, ...],
    output_format: str,
    open_browser: bool,
) -> None:
    """Write ONNX as one HTML file: its modules as nested boxes that open and close.

    The page needs no server and no network. OUT is <stem>.html beside ONNX by default. With OTHER,
    a second .onnx file, the two are shown side by side and what `compare` finds is marked.

    \b
    Examples:
      modelexport view bert.onnx --open
      modelexport profile bert.onnx --output-format json --output-file times.json
      modelexport view bert.onnx bert.html --overlay times.json
      modelexport view before.onnx after.onnx changes.html
      modelexport view bert.onnx bert.json --format model-explorer
    """
    other, out = _sort(files)
    if output_format == "model-explorer":
        if other is not None or open_browser:
            raise click.UsageError("--format model-explorer takes one model, and opens nothing")
        _write_model_explorer(onnx, out, overlays)
        return
    check_page(onnx, out, other, overlays)
    with progress() as step:
        result = view(
            onnx, out, other=other, overlays=overlays, open_browser=open_browser, on_step=step
        )
    if result.sidecar_refused:
        note(f"note: the sidecar is not used: {result.sidecar_refused}")
    counts = f"{plural(result.nodes, 'node')} in {plural(result.modules, 'module')}"
    show([line(f"{result.path}: {counts}, {format_size(result.size)}")])


def _write_model_explorer(onnx: Path, out: Path | None, overlays: tuple[Path, ...]) -> None:
    with progress(f"read {onnx.name}"):
        read = [each for path in overlays for each in read_overlays(path)]
        files = write_model_explorer(onnx, out or name_beside(onnx, ".json"), read, overlays)
    if files.sidecar_refused:
        note(f"note: the sidecar is not used: {files.sidecar_refused}")
    counts = f"{plural(files.nodes, 'node')} in {plural(files.modules, 'module')}"
    show([line(f"{files.graphs}: {counts}"), *(line(f"with {p.name}", 2) for p in files.node_data)])


def _sort(files: tuple[Path, ...]) -> tuple[Path | None, Path | None]:
    """Separate the second model from the page, by their suffixes."""
    models = [path for path in files if path.suffix == ".onnx"]
    pages = [path for path in files if path.suffix != ".onnx"]
    if len(models) > 1 or len(pages) > 1:
        raise click.UsageError("pass one or two .onnx files, and one output")
    return (models[0] if models else None), (pages[0] if pages else None)
