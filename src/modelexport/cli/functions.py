"""`modelexport functions`: modules as ONNX local functions, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.cli.console import join_names, line, note, progress, show
from modelexport.errors import plural
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.viewing.functions import FunctionsReport, from_functions, to_functions

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = 8


@click.command("functions")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--depth",
    type=int,
    metavar="N",
    help="Make functions of N levels of modules below the root, not of all.",
)
@click.option(
    "--all-modules",
    is_flag=True,
    help="Make functions also of modules without a tag of their own, as most of torch.nn are.",
)
@click.option("--inline", is_flag=True, help="Restore the flat file, byte for byte.")
def functions_command(
    onnx: Path, out: Path, depth: int | None, all_modules: bool, inline: bool
) -> None:
    """Write ONNX to OUT with each call of a module as an ONNX local function, nested as they are.

    Netron shows a function as a box that opens. OUT runs as before, and --inline restores ONNX from
    it. A module of a single operator stays an operator. A module that uses results of modules which
    use its own is split into several functions.

    \b
    Examples:
      modelexport functions bert.onnx bert_functions.onnx
      modelexport functions bert.onnx layers.onnx --depth 2
      modelexport functions bert_functions.onnx bert.onnx --inline
    """
    if inline and (depth is not None or all_modules):
        raise click.UsageError("--inline restores the whole file: leave --depth and others out")
    check_output_path(out)
    with progress() as step:
        if not inline:
            report = to_functions(onnx, out, depth=depth, all_modules=all_modules, on_step=step)
        else:
            from_functions(onnx, out, on_step=step)
    if inline:
        note(f"wrote {out}, the file that {onnx.name} was made from")
    else:
        show(_summary(report))


def _summary(report: FunctionsReport) -> Iterator[RenderableType]:
    """Describe the file that was written."""
    functions, modules = len(report.functions), len(set(report.functions.values()))
    made = f"{plural(functions, 'function')} of {plural(modules, 'module')}"
    levels = f", nested {plural(report.levels, 'level')} deep" if functions else ""
    yield line(f"{report.onnx_path}: {made}{levels}")
    top = plural(report.top_nodes, "node")
    yield line(f"the main graph has {top}, calls included, instead of {report.nodes:,}", 2)
    if report.split:
        names = join_names(report.split, _MOST)
        yield line(f"in several functions, because other modules run in between: {names}", 2)
    if not functions:
        yield line("no module below the root has more than one node", 2)
    for name in report.data_files:
        yield line(f"with {name}", 2)
