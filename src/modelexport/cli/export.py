"""`modelexport export`: from a named model to a tagged file."""

from __future__ import annotations

from typing import Any

import click

from modelexport.cli.console import note, progress
from modelexport.cli.source_options import export_options
from modelexport.cli.summary import show_summary
from modelexport.options import ExportOptions
from modelexport.source_export import run_export


@click.command("export")
@click.argument("model")
@click.argument("output", type=click.Path())
@export_options
@click.option(
    "-v", "--verbose", is_flag=True, help="Show what torch prints, and the time of each step."
)
def export_command(model: str, output: str, verbose: bool, **options: Any) -> None:
    """Export MODEL to OUTPUT (a .onnx file) with its sidecar.

    MODEL is a local Hugging Face folder, a hub name, a program saved by torch.export (.pt2), or a
    factory, package.module:name or path/to/file.py:name: a callable that returns a torch.nn.Module,
    or a module and its example inputs.

    Without --input-specs the inputs come from the model's own processor, the factory, the model's
    dummy_inputs, or a guess; the summary says which.

    \b
    Examples:
      modelexport export ./bert bert.onnx --input-text "hello" --dynamic
      modelexport export ./llama l.onnx --random-weights --input-shape 1,128
      modelexport export models.py:make_model model.onnx --strategy htp
    """
    with progress(verbose=verbose) as on_step:
        report, notes = run_export(model, output, ExportOptions(**options), on_step, verbose)
    for line in notes:
        note(f"note: {line}")
    show_summary(report, verbose)
