"""`modelexport compare`: are two files the same graph, and if not, which modules differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from rich.console import RenderableType

from modelexport.analysis.compare import Comparison, FileSide, ModuleChange, compare
from modelexport.cli.console import (
    check_output,
    counted,
    emit_json,
    line,
    listed,
    show,
    tensor,
    waiting,
)
from modelexport.errors import plural

_MOST = 8
_MOST_MODULES = 20


@click.command("compare", short_help="Whether two files are the same graph, and where not.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--output-file", type=click.Path(path_type=Path), help="Write to this file instead of stdout."
)
@click.option(
    "--output-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json is complete.",
)
@click.pass_context
def compare_command(
    ctx: click.Context, a: Path, b: Path, output_file: Path | None, output_format: str
) -> None:
    """Compare the graphs of A and B, and say what differs, module by module.

    Names of tensors and the order of nodes do not matter; an attribute or a weight does. Exit code 0 if the
    topology is the same, 1 if it differs, 2 if a file cannot be read.

    \b
    Examples:
      modelexport compare baseline.onnx bert.onnx
      modelexport compare v1.onnx v2.onnx --output-format json
    """
    check_output(output_file, a, b)
    with waiting(f"compare {a.name} with {b.name}"):
        result = compare(a, b)
    if output_format == "json":
        told = {"verdict": result.verdict, **msgspec.to_builtins(result)}
        emit_json(told, output_file)
    else:
        show(_view(result), output_file)
    ctx.exit(0 if result.same_topology else 1)


def _view(result: Comparison) -> Iterator[RenderableType]:
    for letter, side in (("A", result.a), ("B", result.b)):
        yield line(f"{letter}  {side.file}: {_told(side)}")
    yield ""
    yield line(result.verdict)
    for same, word, a, b in (
        (result.same_opset, "opset", counted(result.a.opset), counted(result.b.opset)),
        (
            result.same_inputs,
            "inputs",
            *(", ".join(map(tensor, side.inputs)) for side in (result.a, result.b)),
        ),
        (
            result.same_outputs,
            "outputs",
            *(", ".join(map(tensor, side.outputs)) for side in (result.a, result.b)),
        ),
    ):
        if not same:
            yield line(f"{word}: {a or 'none'}  →  {b or 'none'}", 2)
    for sentence in result.elsewhere:
        yield line(sentence, 2)
    yield from _weights(result)
    yield from _tags(result)
    for change in result.modules[:_MOST_MODULES]:
        yield from _module(change)
    if len(result.modules) > _MOST_MODULES:
        yield ""
        yield line(
            f"… and {plural(len(result.modules) - _MOST_MODULES, 'module')} more; --output-format json has them"
        )


def _told(side: FileSide) -> str:
    tags = (
        f"{side.tagged_nodes:,} tagged with {plural(side.tags, 'tag')}"
        if side.tagged_nodes
        else "no tags"
    )
    return f"{plural(side.nodes, 'node')}, {tags}, {plural(side.initializers, 'initializer')}, opset {counted(side.opset)}"


def _weights(result: Comparison) -> Iterator[RenderableType]:
    weights = result.weights
    parts = [("changed", weights.changed), ("added", weights.added), ("removed", weights.removed)]
    told = [f"{len(names)} {word} ({listed(names, _MOST)})" for word, names in parts if names]
    if weights.renamed:
        told.append(f"{len(weights.renamed)} renamed")
    if told:
        yield line(f"initializers: {weights.same} the same, {', '.join(told)}", 2)


def _tags(result: Comparison) -> Iterator[RenderableType]:
    tags = result.tags
    counts = (("added", tags.added), ("removed", tags.removed), ("changed", tags.changed))
    told = [f"{word} on {plural(count, 'node')}" for word, count in counts if count]
    if told:
        yield line(f"tags: {', '.join(told)}", 2)
    if tags.distribution and result.a.tagged_nodes and result.b.tagged_nodes:
        for tag, (a, b) in list(tags.distribution.items())[:_MOST]:
            yield line(f"{tag}: {plural(a, 'node')} → {b}", 4)
        if len(tags.distribution) > _MOST:
            yield line(f"… and {plural(len(tags.distribution) - _MOST, 'tag')} more", 4)


def _module(change: ModuleChange) -> Iterator[RenderableType]:
    yield ""
    name = "(no module)" if change.module is None else change.module or "(root)"
    yield line(name if change.tag is None else f"{name}  {change.tag}")
    if change.removed:
        yield line(f"removed {listed(change.removed, _MOST)}", 2)
    if change.added:
        yield line(f"added   {listed(change.added, _MOST)}", 2)
    for one in change.changed[:_MOST]:
        other = "" if one.node == one.other else f" (in A: {one.node})"
        yield line(f"changed {one.other}{other}, {one.op_type}: {', '.join(one.what)}", 2)
    if len(change.changed) > _MOST:
        yield line(f"… and {len(change.changed) - _MOST} changed nodes more", 2)
