"""`modelexport extract`: one module of a tagged file as a model of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import RenderableType

from modelexport.cli.console import line, listed, note, show, tensor, waiting
from modelexport.errors import ExtractionWarning, plural
from modelexport.extraction.extract import ExtractableModule, extract, list_extractable
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.tagged.records import ExtractionRecord, sidecar_path

_MOST = 8


@click.command("extract", short_help="One module as a runnable model.")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("module", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--call",
    type=int,
    metavar="K",
    help="Only one call of a module that ran more than once, from 0.",
)
@click.option(
    "--list", "list_", is_flag=True, help="Show what can be extracted: nodes, inputs and outputs."
)
def extract_command(
    onnx: Path, module: str | None, out: Path | None, call: int | None, list_: bool
) -> None:
    """Write the nodes of MODULE to OUT (a .onnx file): a model that runs by itself, with its tags and sidecar.

    MODULE is a tag, a module path ("" is the root) or a glob that matches one. What enters the module becomes
    its inputs, what leaves it its outputs; weights come along, and so do constants from outside.

    \b
    Examples:
      modelexport extract bert.onnx --list
      modelexport extract bert.onnx encoder.layer.0 layer0.onnx
      modelexport extract bert.onnx '/BertModel/BertPooler' pooler.onnx
    """
    if list_:
        if out is not None or call is not None:
            raise click.UsageError("--list shows, and writes nothing: leave OUT and --call out")
        with waiting(f"read {onnx.name}"):
            found = list_extractable(onnx, module)
        show(_listing(onnx, found))
        return
    if module is None or out is None:
        raise click.UsageError("name a MODULE and the file OUT to write; --list shows the modules")
    check_output_path(out)
    with waiting(f"extract {module}"), warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always", ExtractionWarning)
        record = extract(onnx, module, out, call=call).record
    show(extracted(out, record))
    for warning in lost:
        if issubclass(warning.category, ExtractionWarning):
            note(f"note: {warning.message}")


def _listing(onnx: Path, found: list[ExtractableModule]) -> Iterator[RenderableType]:
    yield line(f"{onnx}: {plural(len(found), 'module')} can be extracted")
    for module in found:
        yield ""
        calls = f", {module.calls} calls" if module.calls > 1 else ""
        kind = f"  {module.class_.rpartition('.')[2]}" if module.class_ else ""
        yield line(f"{module.module or '(root)'}{kind}, {plural(module.nodes, 'node')}{calls}")
        yield line(f"takes {listed(map(tensor, module.inputs), _MOST) or 'nothing'}", 2)
        yield line(f"gives {listed(map(tensor, module.outputs), _MOST)}", 2)


def extracted(out: Path, record: ExtractionRecord) -> Iterator[RenderableType]:
    """What was cut out and written."""
    pulled = (
        f", and {plural(len(record.pulled_in), 'constant')} from outside"
        if record.pulled_in
        else ""
    )
    call = "" if record.call is None else f", call {record.call}"
    yield line(f"{out}: {record.module or '(root)'}{call}, {plural(record.nodes, 'node')}{pulled}")
    yield line(f"takes {listed(map(tensor, record.inputs), _MOST) or 'nothing'}", 2)
    yield line(f"gives {listed(map(tensor, record.outputs), _MOST)}", 2)
    for path in (out.with_name(f"{out.name}.data"), sidecar_path(out)):
        if path.exists():
            yield line(f"with {path.name}", 2)
