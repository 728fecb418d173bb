"""`modelexport compare`: compare two files and show which modules differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from modelexport.analysis.compare import Comparison, FileSummary, ModuleChange, compare
from modelexport.cli.console import (
    check_output,
    describe_tensor,
    emit_json,
    join_counts,
    join_names,
    line,
    output_file_option,
    output_format_option,
    progress,
    show,
)
from modelexport.errors import plural
from modelexport.tagged.records import TensorInfo

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = 8
_MOST_MODULES = 20


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@output_file_option
@output_format_option("text", "json")
@click.pass_context
def compare_command(
    ctx: click.Context, a: Path, b: Path, output_file: Path | None, output_format: str
) -> None:
    """Compare the graphs of A and B, and show what differs, module by module.

    Names of values and the order of nodes do not matter; attributes and initializers do. Exit code
    0 if the topology is the same, 1 if it differs, 2 if a file cannot be read.

    \b
    Examples:
      modelexport compare baseline.onnx bert.onnx
      modelexport compare v1.onnx v2.onnx --output-format json
    """
    check_output(output_file, a, b)
    with progress(f"compare {a.name} with {b.name}"):
        result = compare(a, b)
    if output_format == "json":
        emit_json({"verdict": result.verdict, **msgspec.to_builtins(result)}, output_file)
    else:
        show(_view(result), output_file)
    ctx.exit(0 if result.same_topology else 1)


def _view(result: Comparison) -> Iterator[RenderableType]:
    """Show a comparison as text."""
    a, b = result.a, result.b
    yield line(f"A  {a.file}: {_describe_file(a)}")
    yield line(f"B  {b.file}: {_describe_file(b)}")
    yield ""
    yield line(result.verdict)
    for same, what, before, after in (
        (result.same_opset, "opset", join_counts(a.opset), join_counts(b.opset)),
        (result.same_inputs, "inputs", _signature(a.inputs), _signature(b.inputs)),
        (result.same_outputs, "outputs", _signature(a.outputs), _signature(b.outputs)),
    ):
        if not same:
            yield line(f"{what}: {before or 'none'}  →  {after or 'none'}", 2)
    for sentence in result.elsewhere:
        yield line(sentence, 2)
    yield from _initializers(result)
    yield from _tags(result)
    for change in result.modules[:_MOST_MODULES]:
        yield from _module(change)
    if len(result.modules) > _MOST_MODULES:
        yield ""
        more = plural(len(result.modules) - _MOST_MODULES, "module")
        yield line(f"… and {more} more; --output-format json has them")


def _describe_file(side: FileSummary) -> str:
    """Describe one of the two files by its counts."""
    tags = (
        f"{side.tagged_nodes:,} tagged with {plural(side.tags, 'tag')}"
        if side.tagged_nodes
        else "no tags"
    )
    initializers = plural(side.initializers, "initializer")
    return f"{plural(side.nodes, 'node')}, {tags}, {initializers}, opset {join_counts(side.opset)}"


def _signature(tensors: Iterable[TensorInfo]) -> str:
    """Describe inputs or outputs in one line."""
    return join_names(map(describe_tensor, tensors))


def _initializers(result: Comparison) -> Iterator[RenderableType]:
    """Show how many initializers are the same, and which are not."""
    weights = result.weights
    groups = (
        ("changed", weights.changed),
        ("added", weights.added),
        ("removed", weights.removed),
    )
    parts = [f"{len(names)} {word} ({join_names(names, _MOST)})" for word, names in groups if names]
    if weights.renamed:
        parts.append(f"{len(weights.renamed)} renamed")
    if parts:
        yield line(f"initializers: {weights.same} the same, {', '.join(parts)}", 2)


def _tags(result: Comparison) -> Iterator[RenderableType]:
    """Show how many tags differ, and how the nodes of each tag are counted in both files."""
    tags = result.tags
    counts = (("added", tags.added), ("removed", tags.removed), ("changed", tags.changed))
    parts = [f"{word} on {plural(count, 'node')}" for word, count in counts if count]
    if parts:
        yield line(f"tags: {', '.join(parts)}", 2)
    if tags.distribution and result.a.tagged_nodes and result.b.tagged_nodes:
        for tag, (a, b) in list(tags.distribution.items())[:_MOST]:
            yield line(f"{tag}: {plural(a, 'node')} → {b}", 4)
        if len(tags.distribution) > _MOST:
            yield line(f"… and {plural(len(tags.distribution) - _MOST, 'tag')} more", 4)


def _module(change: ModuleChange) -> Iterator[RenderableType]:
    """Show the nodes of one module that differ."""
    yield ""
    name = "(no module)" if change.module is None else change.module or "(root)"
    yield line(name if change.tag is None else f"{name}  {change.tag}")
    if change.removed:
        yield line(f"removed {join_names(change.removed, _MOST)}", 2)
    if change.added:
        yield line(f"added   {join_names(change.added, _MOST)}", 2)
    for node in change.changed[:_MOST]:
        other = "" if node.node == node.other else f" (in A: {node.node})"
        yield line(f"changed {node.other}{other}, {node.op_type}: {', '.join(node.what)}", 2)
    if len(change.changed) > _MOST:
        yield line(f"… and {len(change.changed) - _MOST} changed nodes more", 2)
