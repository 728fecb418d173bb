"""`modelexport quantize`: int8 or float16 by module, and what each module costs in accuracy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from modelexport.cli.console import (
    check_output,
    emit_csv,
    emit_json,
    format_size,
    line,
    note,
    output_file_option,
    output_format_option,
    plain_table,
    progress,
    show,
)
from modelexport.errors import plural
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.quantization.convert import Target
from modelexport.quantization.quantize import QuantizeReport, quantize
from modelexport.quantization.results import ModuleSensitivity, Sensitivity
from modelexport.quantization.samples import OutputError
from modelexport.quantization.sensitivity import measure_sensitivity

if TYPE_CHECKING:
    from rich.console import RenderableType

_CSV = ("module", "tag", "own", "nodes", "saved",
        "relative", "max_abs", "cosine", "sqnr_db", "output", "failure")  # fmt: skip


@click.command("quantize")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option(
    "--to",
    type=click.Choice([str(target) for target in Target]),
    default=str(Target.INT8_DYNAMIC),
    show_default=True,
    help="Which of onnxruntime's quantizers and converters to call.",
)
@click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Modules that stay in float; repeatable."
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Modules to quantize, if not all; repeatable."
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE|FOLDER",
    help="Samples for int8-static: an .npz with an array for each input, or a folder of them.",
)
@click.option(
    "--preprocess/--no-preprocess",
    default=None,
    help="Infer shapes and optimize the graph first; by default for int8-static only.",
)
@click.option(
    "--max-error",
    type=float,
    metavar="X",
    help="Keep modules in float until the relative error at the outputs is at most X.",
)
@click.option(
    "--sensitivity", is_flag=True, help="Quantize each module alone and measure the error."
)
@click.option(
    "--depth",
    type=int,
    metavar="N",
    help="Measure modules at this depth, `a.b` is at 2; by default the least with several.",
)
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE|FOLDER",
    help="Samples to measure the error on; the calibration samples or recorded inputs without it.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep results of --sensitivity in this JSON file, and go on from them.",
)
@output_format_option("text", "json", "csv", help_text="csv is for --sensitivity.")
@output_file_option
def quantize_command(onnx: Path, out: Path | None, sensitivity: bool, **options: Any) -> None:
    """Quantize ONNX with onnxruntime and write OUT, with modules kept in float by PATTERN.

    PATTERN is a tag, a module path, an alias or a glob on either. All commands work on OUT as on
    an export. With --sensitivity nothing is written: it ranks modules by the error at the outputs
    if each alone is quantized.

    \b
    Examples:
      modelexport quantize bert.onnx int8.onnx --keep pooler
      modelexport quantize bert.onnx --sensitivity --depth 2
      modelexport quantize bert.onnx int8.onnx --max-error 0.01
      modelexport quantize bert.onnx q.onnx --to int8-static --calibration data/
    """
    output_format, output_file = options.pop("output_format"), options.pop("output_file")
    samples = (options["inputs"], options["calibration"], options["resume"])
    check_output(output_file, onnx, out, *samples)
    if sensitivity:
        _measure(onnx, out, output_format, output_file, options)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT'; only --sensitivity writes no model.")
    if options.pop("resume") is not None:
        raise click.UsageError("--resume goes with --sensitivity")
    if output_format == "csv":
        raise click.UsageError("--output-format csv goes with --sensitivity")
    if options["depth"] is not None and options["max_error"] is None:
        raise click.UsageError("--depth goes with --sensitivity or --max-error")
    check_output_path(out)
    with progress() as step:
        report = quantize(onnx, out, on_step=step, **options)
    for text in report.notes:
        note(text)
    if output_format == "json":
        fields = msgspec.structs.asdict(report)
        del fields["hierarchy"]  # the sidecar has it
        emit_json(msgspec.to_builtins(fields, enc_hook=str), output_file)
    else:
        show(_summary(report, onnx, options["max_error"]), output_file)
    files = shlex.join(map(str, (onnx, out)))
    note(f"next: modelexport profile {files} compares their speed; int8 can be slower")


def _measure(
    onnx: Path, out: Path | None, output_format: str, output_file: Path | None, options: Any
) -> None:
    if out is not None:
        raise click.UsageError("--sensitivity writes no model: leave OUT out")
    for name in ("keep", "max_error"):
        if options.pop(name) not in (None, ()):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--sensitivity measures modules alone: leave --{flag} out")
    with progress() as step:
        result = measure_sensitivity(onnx, on_step=step, **options)
    for text in result.notes:
        note(text)
    if output_format == "json":
        emit_json(result, output_file)
    elif output_format == "csv":
        emit_csv(_CSV, map(_csv_row, result.modules), output_file)
    else:
        show(_ranking(result), output_file)


def _csv_row(row: ModuleSensitivity) -> dict[str, object]:
    fields = msgspec.structs.asdict(row)
    error = fields.pop("error")
    return {**fields, **({} if error is None else msgspec.structs.asdict(error))}


def _number(value: float | None, digits: str = ".3g") -> str:
    return "-" if value is None else format(value, digits)


def _error_text(error: OutputError) -> str:
    if error.relative is None:
        return f"values of {error.output} that are not finite"
    noise = "" if error.sqnr_db is None else f", SQNR {error.sqnr_db:.1f} dB"
    return f"relative error {error.relative:.3g} at {error.output}{noise}"


def _ranking(result: Sensitivity) -> Iterator[RenderableType]:
    whole = result.whole
    yield line(f"{result.file} to {result.to}, one module at a time, on {result.inputs}")
    text = whole.failure if whole.error is None else _error_text(whole.error)
    yield line(f"all: {text}, saves {format_size(max(whole.saved, 0))}", 2)
    titles = {"module": False, "saved": True, "relative": True,
              "max abs": True, "cosine": True, "SQNR dB": True}  # fmt: skip
    yield plain_table(titles, [_cells(row) for row in result.modules])
    failed = [row for row in result.modules if row.failure]
    for row in failed:
        yield line(f"{row.title}: {row.failure}", 2)


def _cells(row: ModuleSensitivity) -> tuple[str, ...]:
    error = row.error or OutputError("", None, None, None, None)
    exact = error.relative == 0
    return (
        row.title,
        format_size(row.saved) if row.saved >= 0 else f"-{format_size(-row.saved)}",
        _number(error.relative),
        _number(error.max_abs),
        _number(error.cosine, ".5f"),
        "exact" if exact else _number(error.sqnr_db, ".1f"),
    )


def _summary(
    report: QuantizeReport, source: Path, max_error: float | None
) -> Iterator[RenderableType]:
    yield line(f"{report.onnx_path}: {plural(report.nodes, 'node')}, all with a module")
    held = f", {report.in_float} in modules kept in float" if report.in_float else ""
    yield line(
        f"{plural(report.converted, 'node')} of {source.name} converted to {report.to}{held}", 2
    )
    share = report.bytes_after / max(report.bytes_before, 1)
    sizes = f"{format_size(report.bytes_before)}, now {format_size(report.bytes_after)}"
    yield line(f"initializers {sizes} ({share:.0%})", 2)
    yield line(f"{_error_text(report.error)}, on {report.inputs}", 2)
    if max_error is not None:
        count = f"{len(report.kept)} of {plural(report.modules, 'module')}"
        yield line(f"in float for a relative error of at most {max_error:g}: {count}", 2)
        if report.kept:
            titles = {"module": False, "convertible": True, "bytes": True, "error alone": True}
            rows = [
                (each.title, f"{each.nodes:,}", format_size(max(each.bytes, 0)),
                 _number(each.relative))
                for each in report.kept
            ]  # fmt: skip
            yield plain_table(titles, rows)
    yield line(f"with {report.sidecar_path.name}", 2)
