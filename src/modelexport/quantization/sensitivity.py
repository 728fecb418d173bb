"""measure_sensitivity(): the error that each module causes if it alone is quantized."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, describe_type
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.option_values import spell_option
from modelexport.quantization.candidates import Candidate, matching_modules, split_modules
from modelexport.quantization.convert import Target
from modelexport.quantization.results import ModuleSensitivity, Results, Sensitivity, open_results
from modelexport.quantization.samples import SampleSource
from modelexport.quantization.select import as_patterns, find_nodes
from modelexport.quantization.variants import Workbench, nodes_in_float, parse_target
from modelexport.tagged.model import load


def measure_sensitivity(
    path: StrPath,
    *,
    to: str = Target.INT8_DYNAMIC,
    depth: int | None = None,
    only: str | Sequence[str] = (),
    inputs: SampleSource | None = None,
    calibration: SampleSource | None = None,
    preprocess: bool | None = None,
    resume: StrPath | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Sensitivity:
    """Quantize each module alone, and measure the error at the outputs.

    Args:
        path: The tagged file, or one with a sidecar.
        to: `int8-dynamic`, `int8-static` or `float16`.
        depth: How deep the modules are; None for the shallowest depth that has several.
        only: The modules to measure: tags, module paths, aliases or globs. With `depth`, the
            modules below them at that depth.
        inputs: Samples to measure on; None for the calibration or recorded ones.
        calibration: Samples for a static quantization, as in `quantize`.
        preprocess: Whether ONNX Runtime preprocesses the model, as in `quantize`.
        resume: A JSON file that results are added to as they come, and read from if they are of
            this model and these options.
        on_step: Called with a line of progress.

    Returns:
        The modules that quantizing has an effect on, the largest error first.

    Raises:
        ArgumentError: A pattern matches nothing, or no node can be converted.
        FileError: A file cannot be read or written.
        FormatError: A file is not a model, has no tags, or does not run.
        SourceError: ONNX Runtime is not installed.
    """
    source, kind, step = as_path(path), parse_target(to), on_step or (lambda _: None)
    only = as_patterns(only)
    check_depth(depth)
    nodes_in_float(load(source), (), only)  # refuses files and patterns before anything runs
    with tempfile.TemporaryDirectory(prefix="modelexport-") as folder:
        bench = Workbench(
            source, Path(folder), kind,
            preprocess=preprocess, calibration=calibration, inputs=inputs, step=step,
        )  # fmt: skip
        results = open_results(resume, bench)
        converted = bench.converted_nodes()
        depth, candidates = _choose(bench, only, depth, converted)
        union = frozenset().union(*(each.nodes for each in candidates))
        whole = measure_one(bench, Candidate("", False, union), converted, results)
        measured = measure_all(bench, candidates, converted, results, step)
    return _summarize(bench, depth, whole, measured)


def _summarize(
    bench: Workbench,
    depth: int | None,
    whole: ModuleSensitivity,
    measured: Sequence[ModuleSensitivity],
) -> Sensitivity:
    """Rank the modules that quantizing has an effect on."""
    rows = (row for row in measured if row.has_effect)
    return Sensitivity(
        file=bench.original.name,
        to=bench.to,
        depth=depth,
        inputs=bench.samples.source,
        calibration=bench.calibration.source if bench.to is Target.INT8_STATIC else None,
        whole=whole,
        modules=tuple(sorted(rows, key=lambda row: (-row.size, row.module))),
        notes=bench.notes,
    )


def _choose(
    bench: Workbench, only: Sequence[str], depth: int | None, converted: Set[int]
) -> tuple[int | None, list[Candidate]]:
    """Return the modules to measure that have nodes to convert, and their depth."""
    model = bench.prepared.model
    if only and depth is None:
        candidates = matching_modules(model, only)
    else:
        within = find_nodes(model, only) if only else range(len(model.graph.nodes))
        depth, candidates = split_modules(model, within, converted, depth)
    candidates = [each for each in candidates if not converted.isdisjoint(each.nodes)]
    if not candidates:
        raise nothing_to_convert(bench.original.name, bench.to)
    return depth, candidates


def check_depth(depth: object) -> None:
    """Check the depth that a caller gave.

    Raises:
        ArgumentTypeError: It is not a number.
        ArgumentError: It is not positive.
    """
    if depth is None:
        return
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ArgumentTypeError(
            f"{spell_option('depth')} is {describe_type(depth)}", hint="pass a number, from 1"
        )
    if depth < 1:
        raise ArgumentError(f"{spell_option('depth')} must be 1 or more, got {depth}")


def nothing_to_convert(name: str, to: Target) -> ArgumentError:
    """Return the error for a model without nodes that onnxruntime converts."""
    return ArgumentError(
        f"onnxruntime converts none of the chosen nodes of {name} to {to}",
        hint="choose other modules, or another target",
    )


def measure_all(
    bench: Workbench,
    candidates: Sequence[Candidate],
    converted: Set[int],
    results: Results,
    step: Callable[[str], None],
) -> list[ModuleSensitivity]:
    """Measure modules one after the other, and estimate the time that is left."""
    known = [each for each in candidates if results.get(each) is not None]
    fresh = [each for each in candidates if results.get(each) is None]
    if known:
        step(f"{len(known)} of {len(candidates)} modules are already measured")
    begin = time.monotonic()
    for number, candidate in enumerate(fresh):
        left = ""
        if number:
            seconds = (time.monotonic() - begin) / number * (len(fresh) - number)
            left = f", about {_duration(seconds)} left"
        step(f"module {number + 1} of {len(fresh)}: {candidate.title}{left}")
        measure_one(bench, candidate, converted, results)
    return [measure_one(bench, each, converted, results) for each in candidates]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def measure_one(
    bench: Workbench, candidate: Candidate, converted: Set[int], results: Results
) -> ModuleSensitivity:
    """Quantize one module alone and measure it, unless its result is recorded."""
    known = results.get(candidate)
    if known is not None:
        return known
    model = bench.prepared.model
    everything = frozenset(range(len(model.graph.nodes)))
    error, failure, saved = None, None, 0
    try:
        variant = bench.try_variant(everything - candidate.nodes)
        error, saved = variant.error, variant.saved
    except FormatError as problem:
        failure = problem.message
    record = model.modules.get(candidate.path)
    row = ModuleSensitivity(
        module=candidate.path,
        tag=None if record is None else record.tag,
        own=candidate.own,
        nodes=len(candidate.nodes & converted),
        saved=saved,
        error=error,
        failure=failure,
    )
    results.add(candidate, row)
    return row
