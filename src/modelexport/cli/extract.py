"""`modelexport extract` and `modelexport strip`: a module by itself, and the file without a map."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.cli.console import describe_tensor, join_names, line, note, progress, show
from modelexport.errors import ExtractionWarning, plural
from modelexport.extraction.extract import ExtractableModule, extract, list_modules
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.tagged.records import ExtractionRecord, TensorInfo, sidecar_path
from modelexport.tagged.strip import strip_file

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = 8


@click.command("extract")
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
    """Write the nodes of MODULE to OUT (a .onnx file): a model that runs, with tags and sidecar.

    MODULE is a tag, a module path ("" is the root), an alias or a glob that matches one. Values
    that enter the module become its inputs, values that leave it its outputs; its initializers are
    included, and so are constants from outside.

    \b
    Examples:
      modelexport extract bert.onnx --list
      modelexport extract bert.onnx encoder.layer.0 layer0.onnx
      modelexport extract bert.onnx '/BertModel/BertPooler' pooler.onnx
    """
    if list_:
        if out is not None or call is not None:
            raise click.UsageError("--list writes nothing: leave OUT and --call out")
        with progress(f"read {onnx.name}"):
            modules = list_modules(onnx, module)
        show(_listing(onnx, modules))
        return
    if module is None or out is None:
        raise click.UsageError("name a MODULE and the file OUT to write; --list shows the modules")
    check_output_path(out)
    with progress(f"extract {module}"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExtractionWarning)
        record = extract(onnx, module, out, call=call).record
    show(describe_extraction(out, record))
    for warning in caught:
        if issubclass(warning.category, ExtractionWarning):
            note(f"note: {warning.message}")


def _listing(onnx: Path, modules: list[ExtractableModule]) -> Iterator[RenderableType]:
    """Show the modules that can be extracted."""
    yield line(f"{onnx}: {plural(len(modules), 'module')} can be extracted")
    for module in modules:
        yield ""
        calls = f", {module.calls} calls" if module.calls > 1 else ""
        kind = f"  {module.class_.rpartition('.')[2]}" if module.class_ else ""
        yield line(f"{module.module or '(root)'}{kind}, {plural(module.nodes, 'node')}{calls}")
        yield from _boundary(module.inputs, module.outputs)


def _boundary(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
) -> Iterator[RenderableType]:
    """Show the values that enter and leave a module."""
    yield line(f"inputs  {join_names(map(describe_tensor, inputs), _MOST) or 'nothing'}", 2)
    yield line(f"outputs {join_names(map(describe_tensor, outputs), _MOST)}", 2)


def describe_extraction(out: Path, record: ExtractionRecord) -> Iterator[RenderableType]:
    """Describe an extracted model and its files."""
    constants = (
        f", and {plural(len(record.pulled_in), 'constant')} from outside"
        if record.pulled_in
        else ""
    )
    call = "" if record.call is None else f", call {record.call}"
    module = f"{record.module or '(root)'}{call}"
    yield line(f"{out}: {module}, {plural(record.nodes, 'node')}{constants}")
    yield from _boundary(record.inputs, record.outputs)
    for path in (out.with_name(f"{out.name}.data"), sidecar_path(out)):
        if path.exists():
            yield line(f"with {path.name}", 2)


@click.command("strip")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def strip_command(onnx: Path, out: Path) -> None:
    """Write ONNX without its map to OUT: byte for byte what torch's own export wrote.

    For a retagged file, OUT is the file that the other tool wrote.

    Where initializers are in a data file and OUT is in another folder, the data file is copied.

    \b
    Example:
      modelexport strip bert.onnx baseline.onnx
    """
    written, data = strip_file(onnx, out)
    note(f"wrote {written}{f', initializers in {join_names(data)}' if data else ''}")
