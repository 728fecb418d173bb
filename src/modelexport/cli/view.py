"""`modelexport view`: write a model as a page, or as a graph for Model Explorer."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.console import format_size, line, note, progress, show
from modelexport.errors import plural
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
@click.option("--open", "open_browser", is_flag=True, help="Open the page in the browser.")
def view_command(
    onnx: Path,
    files: tuple[Path, ...],
    overlays: tuple[Path, ...],
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
    """
    other, out = _sort(files)
    check_page(onnx, out, other, overlays)
    with progress() as step:
        result = view(
            onnx, out, other=other, overlays=overlays, open_browser=open_browser, on_step=step
        )
    if result.sidecar_refused:
        note(f"note: the sidecar is not used: {result.sidecar_refused}")
    counts = f"{plural(result.nodes, 'node')} in {plural(result.modules, 'module')}"
    show([line(f"{result.path}: {counts}, {format_size(result.size)}")])


def _sort(files: tuple[Path, ...]) -> tuple[Path | None, Path | None]:
    """Tell the second model from the page by their suffixes."""
    models = [path for path in files if path.suffix == ".onnx"]
    pages = [path for path in files if path.suffix != ".onnx"]
    if len(models) > 1 or len(pages) > 1:
        raise click.UsageError("pass one or two .onnx files, and one output")
    return (models[0] if models else None), (pages[0] if pages else None)
