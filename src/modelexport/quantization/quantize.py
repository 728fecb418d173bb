"""quantize(): int8 or float16 by ONNX Runtime's own tools, with modules left in float."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

import msgspec

from modelexport.errors import ArgumentError
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, as_path, require_data_file
from modelexport.onnx_file.output_files import check_no_overwrite
from modelexport.option_values import spell_option
from modelexport.quantization.budget import Choice, KeptModule, check_limit, choose_kept
from modelexport.quantization.convert import Target
from modelexport.quantization.samples import OutputError, SampleSource
from modelexport.quantization.sensitivity import check_depth
from modelexport.quantization.variants import (
    Workbench,
    changed_nodes,
    nodes_in_float,
    parse_target,
    stored_bytes,
)
from modelexport.retagging.retag import RetagReport, retag_result
from modelexport.tagged.model import load
from modelexport.tagged.records import Sidecar


class QuantizeReport(msgspec.Struct, frozen=True):
    """What `quantize` wrote: the files, their map, the error, and what stayed in float."""

    onnx_path: Path
    sidecar_path: Path
    data_paths: tuple[Path, ...]
    to: str
    nodes: int
    """The number of nodes of the file, all of which have a tag."""
    converted: int
    """How many nodes of the original were converted."""
    in_float: int
    """How many nodes stayed in float because of `keep`, `only` or `max_error`."""
    kept: tuple[KeptModule, ...]
    """The modules that stayed in float for `max_error`, largest error per byte first."""
    modules: int
    """How many modules `max_error` chose from; 0 without it."""
    error: OutputError
    inputs: str
    """On which inputs the error was measured."""
    calibration: str | None
    """On which inputs a static quantization was calibrated."""
    bytes_before: int
    """The bytes of the original's initializers."""
    bytes_after: int
    """The bytes of the file's initializers."""
    notes: tuple[str, ...]
    hierarchy: Sidecar
    """The whole map, as the sidecar has it."""


def quantize(
    path: StrPath,
    output_path: StrPath,
    *,
    to: str = Target.INT8_DYNAMIC,
    keep: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    calibration: SampleSource | None = None,
    preprocess: bool | None = None,
    max_error: float | None = None,
    depth: int | None = None,
    inputs: SampleSource | None = None,
    on_step: Callable[[str], None] | None = None,
) -> QuantizeReport:
    """Quantize a tagged file with ONNX Runtime, and leave modules in float.

    The result has a tag on every node; `strip` restores what onnxruntime wrote.

    Args:
        path: The tagged file, or one with a sidecar. It is not changed.
        output_path: The file to write, with a sidecar beside it.
        to: `int8-dynamic`, `int8-static` or `float16`.
        keep: The modules that stay in float: tags, module paths, aliases or globs.
        only: The modules that are quantized, if not all of them.
        calibration: Samples for `int8-static`: an `.npz` file with an array for each input, a
            folder of such files, or one or more mappings. None for inputs like the recorded ones.
        preprocess: Whether ONNX Runtime optimizes the graph first; by default for `int8-static`.
        max_error: The largest relative error at the outputs. Modules with the largest error per
            byte stay in float until it is reached.
        depth: How deep the modules are that `max_error` chooses from; `a.b` is at depth 2. None
            for the shallowest depth that has several.
        inputs: Samples to measure the error on; None for the calibration or recorded ones.
        on_step: Called with a line of progress.

    Returns:
        What was written, and its error.

    Raises:
        ArgumentError: A pattern matches nothing, nothing is left to quantize, the error cannot be
            reached, or a sample lacks an input.
        FileError: A file cannot be read or written.
        FormatError: The file is not a model, has no tags, or does not run.
        SourceError: ONNX Runtime is not installed.
    """
    source, target = as_path(path), check_output_path(output_path)
    kind, limit, step = parse_target(to), check_limit(max_error), on_step or (lambda _: None)
    check_depth(depth)
    _check_files(source, target)
    nodes_in_float(load(source), keep, only)  # refuses files and patterns before anything runs
    with transaction(target.parent) as stage:
        bench = Workbench(
            source, stage.subfolder("copy"), kind,
            preprocess=preprocess, calibration=calibration, inputs=inputs, step=step,
        )  # fmt: skip
        in_float = nodes_in_float(bench.prepared.model, keep, only)
        choice = Choice((), 0, in_float)
        if limit is not None:
            choice = choose_kept(bench, in_float, limit, depth, step)
        # A data file is named after the model, and keeps its name beside the output.
        return _write(bench, choice, stage.subfolder("quantized") / target.name, target, step)


def _write(
    bench: Workbench, choice: Choice, quantized: Path, target: Path, step: Callable[[str], None]
) -> QuantizeReport:
    """Quantize the chosen modules, and write the result with its map."""
    converted, error = _quantize(bench, choice.nodes, quantized, step)
    feeds = bench.samples.feeds[0]
    retagged = retag_result(bench.original, quantized, target, feeds, step)
    return _make_report(bench, choice, converted, error, retagged)


def _limit_notes(bench: Workbench, choice: Choice) -> Iterator[str]:
    """Say that a limit holds on one sample, if the user gave none."""
    if choice.modules and not bench.samples.is_given:
        yield (
            f"the limit holds on {bench.samples.source}: measure on real data "
            f"(pass it as {spell_option('inputs')})"
        )


def _make_report(
    bench: Workbench, choice: Choice, converted: int, error: OutputError, retagged: RetagReport
) -> QuantizeReport:
    return QuantizeReport(
        onnx_path=retagged.onnx_path,
        sidecar_path=retagged.sidecar_path,
        data_paths=retagged.data_paths,
        to=bench.to,
        nodes=retagged.nodes,
        converted=converted,
        in_float=len(choice.nodes),
        kept=choice.kept,
        modules=choice.modules,
        error=error,
        inputs=bench.samples.source,
        calibration=bench.calibration.source if bench.to is Target.INT8_STATIC else None,
        bytes_before=stored_bytes(bench.original),
        bytes_after=stored_bytes(retagged.onnx_path),
        notes=(*bench.notes, *_limit_notes(bench, choice)),
        hierarchy=retagged.hierarchy,
    )


def _quantize(
    bench: Workbench, in_float: Set[int], target: Path, step: Callable[[str], None]
) -> tuple[int, OutputError]:
    """Write the quantized file; return how many nodes were converted, and the error."""
    step(f"quantize to {bench.to}")
    bench.write(in_float, target)
    converted = changed_nodes(bench.prepared, target) - in_float
    if not converted:
        raise ArgumentError(
            f"nothing to quantize: onnxruntime converts none of the chosen nodes to {bench.to}",
            hint="keep fewer modules in float, or choose others",
        )
    return len(converted), bench.measure(target).error


def _check_files(source: Path, target: Path) -> None:
    """Check that the model is complete, and that the output overwrites no file of it."""
    names = load(source).data_files
    check_no_overwrite(source, names, target, target.with_name(f"{target.name}.data"))
    for name in names:
        require_data_file(source, name)
