"""`modelexport select`: print the names of nodes, values or initializers of modules."""

from __future__ import annotations

from pathlib import Path

import click

from modelexport.cli.console import (
    check_output,
    emit,
    emit_json,
    escape_control,
    join_counts,
    line,
    note,
    output_file_option,
    output_format_option,
    show,
)
from modelexport.errors import plural
from modelexport.quantization.annotations import annotate_layers
from modelexport.quantization.select import WHAT, select_names
from modelexport.verification.runtime import ASSIGNMENT


@click.command("select")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("patterns", nargs=-1, required=True, metavar="PATTERN...")
@click.option(
    "--what",
    type=click.Choice(WHAT),
    default=WHAT[0],
    show_default=True,
    help="The nodes, the values that they produce, or the initializers that they read.",
)
@click.option("--invert", is_flag=True, help="Print the names outside of the modules instead.")
@click.option("--op", "op_types", multiple=True, metavar="TYPE", help="Only nodes of an operator.")
@click.option("--call", type=int, metavar="K", help="Only one call of the module, from 0.")
@click.option(
    "--covering",
    is_flag=True,
    help="Also fused nodes that implement a part of the modules and belong to another one.",
)
@output_format_option("text", "json", help_text="One name a line, or a JSON array.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["layer-annotations"]),
    help="Write a copy of the model to --output-file, whose selected nodes have ONNX Runtime's "
    "layer annotations, for device placement.",
)
@output_file_option
def select_command(
    onnx: Path,
    patterns: tuple[str, ...],
    what: str,
    invert: bool,
    op_types: tuple[str, ...],
    call: int | None,
    covering: bool,
    output_format: str,
    file_format: str | None,
    output_file: Path | None,
) -> None:
    """Print the names of the nodes of modules in ONNX, for tools that take node names.

    PATTERN is a tag, a module path, an alias or a glob on either; a module stands for itself and
    all modules below it.

    \b
    Examples:
      modelexport select bert.onnx encoder.layer.0
      modelexport select bert.onnx '*.attention.*' --op MatMul
      modelexport select bert.onnx encoder --invert --what initializers
      modelexport select bert.onnx embeddings --format layer-annotations \\
        --output-file placed.onnx
    """
    if file_format is not None:
        if output_file is None or invert or op_types or what != WHAT[0]:
            raise click.UsageError(
                "--format layer-annotations takes patterns, --call and --covering, and needs "
                "--output-file"
            )
        _annotate(onnx, output_file, patterns, call, covering)
        return
    check_output(output_file, onnx)
    selected = select_names(
        onnx, patterns, what=what, invert=invert, op_types=op_types, call=call, covering=covering
    )
    if selected.lost is not None:
        note(f"note: {selected.lost}")
    if selected.unnamed and what == "nodes":
        note(
            f"{selected.unnamed} of {plural(selected.nodes, 'node')} have no name and are left "
            "out (modelexport quantize names them before it quantizes by module)"
        )
    if output_format == "json":
        emit_json(selected.names, output_file)
    else:
        emit("".join(f"{escape_control(name)}\n" for name in selected.names).encode(), output_file)


def _annotate(
    onnx: Path, output_file: Path, patterns: tuple[str, ...], call: int | None, covering: bool
) -> None:
    result = annotate_layers(onnx, output_file, patterns, call=call, covering=covering)
    show(
        [
            line(f"{result.onnx_path}: {join_counts(result.layers)}"),
            line(f"session option {ASSIGNMENT}, for example: cpu({result.setting})", 2),
        ]
    )
