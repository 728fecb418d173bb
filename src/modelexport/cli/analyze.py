"""`modelexport analyze`: show what is in a file, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from modelexport.analysis.analyze import Analysis, FileFacts, ModuleFacts, Totals, analyze
from modelexport.cli.console import (
    check_output,
    describe_tensor,
    emit_csv,
    emit_json,
    format_count,
    format_size,
    join_counts,
    join_names,
    line,
    output_file_option,
    output_format_option,
    plain_table,
    progress,
    show,
)
from modelexport.cli.tree import bar, module_counts, module_tree
from modelexport.errors import plural
from modelexport.tagged.records import sidecar_path

if TYPE_CHECKING:
    from rich.console import RenderableType

_LARGEST = 8
_MOST = 12


@click.command("analyze")
@click.argument("onnx", type=click.Path(path_type=Path))
@output_format_option(
    *("summary", "detailed", "json", "csv"),
    help_text="summary and detailed are for people, json and csv are complete.",
)
@output_file_option
@click.option(
    "--filter-tag",
    metavar="TEXT",
    help="Only modules that match a tag, a module path, an alias or a glob, and those below; "
    "auxiliary selects the auxiliary nodes.",
)
def analyze_command(
    onnx: Path, output_format: str, output_file: Path | None, filter_tag: str | None
) -> None:
    """Show what is in ONNX: nodes, tags and parameters of each module, and the evidence for them.

    The data of initializers is not read; a data file may be missing. A file without tags is shown
    as far as its graph goes.

    \b
    Examples:
      modelexport analyze bert.onnx
      modelexport analyze bert.onnx --output-format detailed
      modelexport analyze bert.onnx --filter-tag encoder.layer.0
      modelexport analyze bert.onnx --filter-tag '*/LayerNorm' --output-format csv
    """
    check_output(output_file, onnx)
    with progress(f"read {onnx.name}"):
        result = analyze(onnx, filter_tag, details=output_format != "summary")
    if output_format == "json":
        emit_json(result, output_file)
    elif output_format == "csv":
        emit_csv(_COLUMNS, _rows(result), output_file)
    else:
        show(_view(result, detailed=output_format == "detailed"), output_file)


def _view(result: Analysis, detailed: bool) -> Iterator[RenderableType]:
    """Show an analysis as text."""
    nothing_matches = result.filter is not None and not (result.modules or result.totals.nodes)
    yield from _file_lines(result)
    if nothing_matches:
        yield from _suggestions(result)
        return
    yield from _count_lines(result)
    if result.modules:
        yield from _tree(result)
        yield from _largest(result)
    yield from _details(result) if detailed else _modules_without_nodes(result)


def _file_lines(result: Analysis) -> Iterator[RenderableType]:
    """Show what the file is: its origin, its inputs and its outputs."""
    file = result.file
    yield line(f"{file.file}: {file.class_ or 'no tags; only the graph itself is shown'}")
    origin = f"strategy {file.strategy}, exporter {file.exporter}, " if file.strategy else ""
    yield line(f"{origin}opset {join_counts(file.opset)}, IR {file.ir_version}", 2)
    if file.map_source == "sidecar":
        yield line("the file carries no tags; the map is the sidecar's", 2)
    if file.sidecar_refused is not None:
        yield line(f"{sidecar_path(Path(file.file)).name} is not used: {file.sidecar_refused}", 2)
    yield line(f"inputs  {', '.join(map(describe_tensor, file.inputs)) or 'none'}", 2)
    yield line(f"outputs {', '.join(map(describe_tensor, file.outputs)) or 'none'}", 2)
    for dropped in file.dropped_outputs:
        yield line(f"dropped {dropped}", 2)


def _count_lines(result: Analysis) -> Iterator[RenderableType]:
    """Show how many nodes, modules and parameters there are."""
    file, totals = result.file, result.totals
    if result.filter is not None:
        yield line(f"only {result.filter}", 2)
    if file.tagged:
        methods = ", ".join(f"{count:,} by {name}" for name, count in result.by_method.items())
        evidence = f" ({methods})" if methods else ""
        tagged = f"{totals.tagged_nodes:,} of {plural(totals.nodes, 'node')} tagged{evidence}"
        tags = f"{plural(totals.tags, 'tag')}, {totals.auxiliary_nodes:,} auxiliary"
        yield line(f"{tagged}, {tags}", 2)
        if totals.tagged_nodes < totals.nodes and result.filter is None:
            yield line("if another tool made the file: modelexport retag tags all nodes", 4)
        yield from module_counts({m.module: m for m in result.modules}, result.by_status)
    else:
        yield line(plural(totals.nodes, "node"), 2)
    data_files = ", ".join(
        f"{data.name}{'' if data.present else ' (missing)'}" for data in file.data_files
    )
    yield line(f"{_parameters(file, totals)}{f' in {data_files}' if data_files else ''}", 2)
    if file.tagged and file.parameters_from == "stored":
        yield line(
            "PyTorch's parameters are not recorded in this file: what is stored is counted", 2
        )
    if result.by_operator:
        yield line(f"operators {join_counts(result.by_operator, _MOST)}", 2)
    if result.by_depth:
        depths = ", ".join(f"{depth}: {count:,}" for depth, count in result.by_depth.items())
        yield line(f"depth     {depths}", 2)


def _parameters(file: FileFacts, counts: Totals | ModuleFacts) -> str:
    """Describe how many parameters there are, and how many bytes are stored for them."""
    if file.parameters_from == "stored":
        return f"{plural(counts.stored_values, 'stored value')}, {format_size(counts.bytes)}"
    return f"{plural(counts.parameters, 'parameter')}, {format_size(counts.bytes)} stored"


def _suggestions(result: Analysis) -> Iterator[RenderableType]:
    """Show what could have been meant by a filter that matches nothing."""
    yield ""
    if not result.file.tagged:
        yield line(
            f"The file has no tags, so nothing can match {result.filter!r}; "
            "export it with modelexport first."
        )
        return
    yield line(f"Nothing matches {result.filter!r}. The nearest names:")
    for name in result.suggestions:
        yield line(name, 2)


def _tree(result: Analysis) -> Iterator[RenderableType]:
    """Draw the module tree with the counts of each module."""
    facts = {module.module: module for module in result.modules}
    if not any(module.tag for module in result.modules):
        return
    yield ""
    recorded = result.file.parameters_from != "stored"
    total = max(result.totals.nodes, 1)
    yield from module_tree(
        facts,
        nodes=lambda path: f"{facts[path].nodes:,}",
        share=lambda path: bar(facts[path].nodes / total),
        parameters=lambda path: (
            f"{facts[path].parameters:,}" if recorded and facts[path].parameters else ""
        ),
        flop=lambda path: format_count(facts[path].flops),
        stored=lambda path: format_size(facts[path].bytes) if facts[path].bytes else "",
        status=lambda path: "" if facts[path].status == "nodes" else facts[path].status,
    )


def _largest(result: Analysis) -> Iterator[RenderableType]:
    """List the modules, shown or hidden, that store most, each without the modules below it."""
    largest = sorted(
        (module for module in result.modules if module.own_bytes),
        key=lambda module: (-module.own_bytes, module.module),
    )[:_LARGEST]
    if not largest:
        return
    yield ""
    rows = [
        (
            module.module or "(root)",
            _class_name(module),
            f"{module.own_stored_values:,}",
            format_size(module.own_bytes),
        )
        for module in largest
    ]
    titles = {"largest modules": False, "class": False, "stored values": True, "stored": True}
    yield plain_table(titles, rows)


def _class_name(module: ModuleFacts) -> str:
    """Return the class of a module without its package."""
    return module.class_.rpartition(".")[2]


def _modules_without_nodes(result: Analysis) -> Iterator[RenderableType]:
    """List the modules that are absorbed or unused."""
    for status, paths in (("absorbed", result.absorbed), ("unused", result.unused)):
        if paths:
            yield ""
            yield line(f"{status}: {join_names(paths, _MOST)}")


def _details(result: Analysis) -> Iterator[RenderableType]:
    """Show every module with its operators and the values that cross its boundary."""
    for module in result.modules:
        yield ""
        status = "" if module.status == "nodes" else f", {module.status}"
        calls = f", {module.calls} calls" if module.calls > 1 else ""
        yield line(f"{module.module or '(root)'}  {_class_name(module)}{status}{calls}")
        if module.tag is not None:
            yield line(f"tag       {module.tag}", 2)
        if module.nodes:
            own = "" if module.own_nodes == module.nodes else f", {module.own_nodes:,} its own"
            yield line(f"nodes     {module.nodes:,}{own}: {join_counts(module.operators)}", 2)
        if module.parameters or module.bytes:
            yield line(f"data      {_parameters(result.file, module)}", 2)
        for title, names in (("inputs   ", module.inputs), ("outputs  ", module.outputs)):
            if names:
                yield line(f"{title} {join_names(names, _MOST)}", 2)
    if not result.modules:
        yield ""
        yield line(f"operators {join_counts(result.by_operator)}")


_COLUMNS = (
    "kind", "tag", "module", "class", "status", "depth", "calls", "call", "method", "node", "name",
    "op_type", "domain", "nodes", "own_nodes", "parameters", "stored_values", "bytes", "flops",
)  # fmt: skip


def _rows(result: Analysis) -> Iterator[dict[str, object]]:
    """Make a row for every module and every node; `kind` says which it is."""
    for kind, facts in (("module", result.modules), ("node", result.nodes)):
        for row in facts:
            yield {"kind": kind, **msgspec.to_builtins(row)}
