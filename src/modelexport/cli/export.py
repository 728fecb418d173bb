"""`modelexport export`: from a named model to a tagged file, and the summary of what was done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from modelexport.cli.console import (
    COMPLETE,
    describe_tensor,
    escape_control,
    join_names,
    line,
    note,
    progress,
    show,
)
from modelexport.cli.source_options import SwitchCommand, export_options
from modelexport.cli.tree import module_counts, module_tree
from modelexport.errors import plural
from modelexport.options import ExportOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from modelexport.report import ExportReport
    from modelexport.tagged.records import TensorInfo

_MOST_INPUTS = 8
_MOST_NOTES = 5
_MOST_DATA_FILES = 3
_MOST_PART_INPUTS = 5


@click.command("export", cls=SwitchCommand)
@click.argument("model")
@click.argument("output", type=click.Path())
@export_options
@click.option(
    "-v", "--verbose", is_flag=True, help="Show what torch prints, and the time of each step."
)
def export_command(model: str, output: str, verbose: bool, **options: Any) -> None:
    """Export MODEL to OUTPUT, a .onnx file, with its sidecar.

    With --generation, OUTPUT is what the names of all files begin with.

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
      modelexport export ./llama llama --generation
    """
    from modelexport.source_export import run_export

    request = ExportOptions(**options)
    with progress(verbose=verbose) as on_step:
        report, notes = run_export(model, output, request, on_step, verbose)
    for text in notes:
        note(f"note: {text}")
    if report.parts:
        show_parts(report, request.max_cache_length, verbose)
    else:
        # The shapes of a program are those that torch.export gave it.
        can_vary = not (request.dynamic or request.dynamic_axes or model.endswith(".pt2"))
        show_summary(report, verbose, can_vary=can_vary)


def show_summary(report: ExportReport, verbose: bool = False, can_vary: bool = True) -> None:
    """Print what an export did: notes to stderr, the summary and the module tree to stdout.

    Args:
        report: The export.
        verbose: Whether to print the time of each step.
        can_vary: Whether `--dynamic` could make fixed shapes symbolic.
    """
    if report.fallback_message is not None:
        note(f"note: {report.fallback_message}")
    for text in report.notes[:_MOST_NOTES]:
        note(f"note: {text}")
    if len(report.notes) > _MOST_NOTES:
        note(f"note: … and {len(report.notes) - _MOST_NOTES} more places that the tracer warns of")
    _show_losses(report)
    show(_summary(report, verbose, can_vary))


def _show_losses(report: ExportReport) -> None:
    """Print what is not in the files: outputs that are no tensors, and drawings that failed."""
    for dropped in report.dropped_outputs:
        note(f"note: output dropped, not a tensor: {dropped}")
    for what, error in (("GraphML", report.graphml_error), ("page", report.view_error)):
        if error is not None:
            note(
                f"warning: the model is exported, but its {what} could not be written: "
                f"{escape_control(error)}"
            )


def _varying_axes(inputs: Sequence[TensorInfo]) -> str | None:
    """Name the axes that usually vary; None if a shape is symbolic, or if there are no axes."""
    sizes = [size for info in inputs for size in info.shape]
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    is_text = inputs[0].dtype == "int64" and len(inputs[0].shape) == 2
    return "batch and sequence" if is_text else "axes such as the batch"


def show_parts(report: ExportReport, max_cache_length: int | None, verbose: bool = False) -> None:
    """Print what an export with `--generation` did, and how to try it."""
    assert report.generation_path is not None
    for text in report.notes:
        note(f"note: {text}")
    for part in report.parts.values():
        _show_losses(part)
    show(_parts_summary(report, max_cache_length, verbose))
    path = shlex.quote(str(report.generation_path))
    note(f'next: modelexport generate {path} "Once upon a time"')


def _describe_lengths(report: ExportReport, max_cache_length: int | None) -> str:
    """Say which lengths are symbolic, and how long a cache of fixed size is."""
    from modelexport.generation.records import PREFILL, TOKENS

    first = report.parts.get(PREFILL, report).hierarchy.export.inputs
    prompt_is_fixed = any(one.name == TOKENS and str(one.shape[-1]).isdecimal() for one in first)
    symbolic = ["batch"] if prompt_is_fixed else ["batch", "sequence"]
    if max_cache_length is None:
        symbolic.append("cache")
    text = f"{', '.join(symbolic[:-1])} and {symbolic[-1]}" if symbolic[1:] else symbolic[0]
    fixed = f"; the cache holds {plural(max_cache_length, 'token')}" if max_cache_length else ""
    return f"{text} lengths are symbolic{fixed}"


def _parts_summary(
    report: ExportReport, max_cache_length: int | None, verbose: bool
) -> Iterator[RenderableType]:
    yield line(f"{report.generation_path}: {report.hierarchy.model.class_} in parts")
    yield line(f"exporter {report.exporter}, opset {report.hierarchy.model.opset}", 2)
    inputs = report.hierarchy.export.inputs_from
    if inputs is not None:
        yield line(f"inputs from {inputs}", 2)
    yield line(_describe_lengths(report, max_cache_length), 2)
    if report.data_paths:
        yield line(f"weights of all parts in {report.data_paths[0].name}", 2)
    for name, part in report.parts.items():
        statistics = part.hierarchy.statistics
        tagged = f"{statistics.tagged_nodes:,} of {plural(statistics.nodes, 'node')} tagged"
        yield line(f"{name}: {part.onnx_path.name}, {tagged}, {plural(statistics.tags, 'tag')}", 2)
        infos = part.hierarchy.export.inputs
        yield line(join_names(map(describe_tensor, infos), _MOST_PART_INPUTS), 4)
        yield from _further_files(part, verbose, 4)


def _summary(report: ExportReport, verbose: bool, can_vary: bool) -> Iterator[RenderableType]:
    """Describe an export and its files."""
    hierarchy = report.hierarchy
    statistics = hierarchy.statistics
    modules = hierarchy.modules
    methods = ", ".join(f"{count:,} by {method}" for method, count in statistics.methods.items())
    tagged = f"{statistics.tagged_nodes:,} of {plural(statistics.nodes, 'node')} tagged"
    yield line(f"{report.onnx_path}: {hierarchy.model.class_}")
    origin = f"strategy {report.strategy}, exporter {report.exporter}"
    yield line(f"{origin}, opset {hierarchy.model.opset}", 2)
    yield line(f"{tagged} ({methods}), {plural(statistics.tags, 'tag')}", 2)
    if hierarchy.export.inputs_from is not None:
        yield line(f"inputs from {hierarchy.export.inputs_from}:", 2)
        yield line(join_names(map(describe_tensor, hierarchy.export.inputs), _MOST_INPUTS), 4)
        axes = _varying_axes(hierarchy.export.inputs) if can_vary else None
        if axes is not None:
            yield line(f"shapes are fixed; --dynamic makes {axes} symbolic", 4)
    yield from module_counts(modules, statistics.module_status)
    if report.data_paths:
        names = join_names((path.name for path in report.data_paths), _MOST_DATA_FILES)
        yield line(f"initializers in {names}", 2)
    yield line(f"sidecar {report.sidecar_path.name}", 2)
    yield from _further_files(report, verbose, 2)
    yield ""
    yield from module_tree(
        modules,
        True,
        f"see `modelexport analyze {report.onnx_path.name} {COMPLETE}`",
        nodes=lambda path: f"{modules[path].nodes:,}",
        status=lambda path: "" if modules[path].status == "nodes" else modules[path].status,
    )


def _further_files(report: ExportReport, verbose: bool, indent: int) -> Iterator[RenderableType]:
    """Name the files that were asked for beside the model, and the time of each step."""
    if report.view_path is not None:
        yield line(f"page {report.view_path.name}", indent)
    if report.report_path is not None:
        yield line(f"report {report.report_path.name}", indent)
    if report.graphml_path is not None:
        path = report.graphml_data_path
        data = "" if path is None else f", data in {path.name}"
        yield line(f"graphml {report.graphml_path.name}{data}", indent)
    if verbose:
        for step, seconds in report.timings.items():
            yield line(f"{seconds:8.3f} s  {step}", indent)
