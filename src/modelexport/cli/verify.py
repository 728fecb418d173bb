"""`modelexport verify`: compare an ONNX file with the PyTorch model, module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from rich.console import RenderableType

from modelexport.cli.console import (
    COMPLETE,
    check_output,
    emit_csv,
    emit_json,
    join_names,
    line,
    note,
    output_file_option,
    output_format_option,
    progress,
    show,
)
from modelexport.cli.source_options import input_options, merge_source_options
from modelexport.cli.tree import module_tree
from modelexport.errors import ArgumentError, plural
from modelexport.modules.lookup import ModuleNames
from modelexport.options import SourceOptions
from modelexport.packages import import_package
from modelexport.source_export import source_files
from modelexport.tagged.model import load
from modelexport.verification.records import (
    FAILED,
    Blame,
    ModuleParity,
    Outcome,
    Tolerance,
    Verification,
    make_tolerance,
)

_MAX_LISTED = 8
_OUTCOME_TEXT = {
    "agrees": "agree",
    "differs": "differ",
    "shape": "of another shape",
    "dtype": "of another type",
}
_COLUMNS = (
    "module", "tag", "class", "call", "outcome", "blame", "max_abs", "max_rel", "cosine",
    "own_abs", "note", "tensors", "results", "run",
)  # fmt: skip


@click.command("verify")
@click.argument("model")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.option(
    "--atol", type=float, default=Tolerance().atol, show_default=True, help="Absolute tolerance."
)
@click.option(
    "--rtol", type=float, default=Tolerance().rtol, show_default=True, help="Relative tolerance."
)
@click.option(
    "--module",
    metavar="TEXT",
    help="Only modules that match a tag, a module path, an alias or a glob, and those below.",
)
@output_format_option(
    "text", "json", "csv", help_text="text is for people, json and csv are complete."
)
@output_file_option
@click.option(
    "--random-inputs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also run on N sets of random inputs, with the names, dtypes, shapes and ranges of the "
    "example inputs.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of --random-inputs.",
)
@input_options
@click.pass_context
def verify_command(
    ctx: click.Context,
    /,
    model: str,
    onnx: Path,
    atol: float,
    rtol: float,
    module: str | None,
    output_format: str,
    output_file: Path | None,
    random_inputs: int,
    seed: int,
    **source_options: Any,
) -> None:
    """Run MODEL in PyTorch and ONNX in ONNX Runtime, and compare what each module returns.

    MODEL is what `export` takes. The model and its inputs are made as they were for the export,
    which the file records; options override the record. The file may have been changed since its
    export, to float16 or int8 for example.

    A wrong module makes those after it differ, too. The first module that differs is named, and
    each that differs is run again by itself on PyTorch's own inputs, to separate the cause from
    modules that inherit the difference.

    One set of inputs may miss a difference. --random-inputs N adds N runs on random inputs, with
    values in the range of the example's, so that token ids stay in the vocabulary. --input-text may
    be given several times. Of each module the worst run is shown.

    \b
    Examples:
      modelexport verify ./bert bert.onnx
      modelexport verify ./bert bert_int8.onnx --atol 1e-2 --rtol 1e-2
      modelexport verify models.py:make_model model.onnx --module encoder.layer.0
      modelexport verify ./bert bert.onnx --random-inputs 5 --seed 1

    Modules that were not compared are listed with the reason. Exit code 0 if all that is compared
    agrees, 1 if a module differs beyond tolerance or nothing could be compared, 2 for bad input or
    usage, 3 if the model does not run.
    """
    if model.endswith(".onnx"):
        raise click.UsageError("the PyTorch model comes first: modelexport verify MODEL ONNX")
    specs = source_options["input_specs"]
    check_output(output_file, onnx, *source_files(model), Path(specs) if specs else None)
    make_tolerance(atol, rtol)  # fail before torch is loaded
    with progress(verbose=False) as on_step:
        answer = _verify(
            model,
            onnx,
            source_options,
            on_step,
            atol=atol,
            rtol=rtol,
            module=module,
            random_inputs=random_inputs,
            seed=seed,
        )
    drawn = f", and {plural(random_inputs, 'random set')} with seed {seed}" if random_inputs else ""
    _write(answer, drawn, output_format, output_file)
    ctx.exit(0 if answer.result.agrees else 1)


class _Answer(NamedTuple):
    """The result, with what the text says about the model and its inputs."""

    result: Verification
    source: str
    origin: str
    notes: tuple[str, ...]


def _verify(
    model: str,
    onnx: Path,
    source_options: dict[str, Any],
    on_step: Callable[[str], None],
    **options: Any,
) -> _Answer:
    """Load the model and make its inputs as they were for the export, and verify the file."""
    on_step(f"read {onnx.name}")
    tagged = load(onnx)
    if options["module"] is not None and tagged.modules:  # fail before torch is loaded
        ModuleNames(tagged.modules).require_match(options["module"])
    records = tagged.records
    export = None if records is None else records.export
    piece = None if export is None else export.piece
    if piece is not None and piece.module:
        message = f"{onnx.name} is only {piece.module} of {piece.source}"
        raise ArgumentError(message, hint="verify that file")
    recorded = None if export is None else export.source_options
    seed = (None if export is None else export.seed) or 0
    trust_remote_code = source_options.pop("trust_remote_code")
    texts = source_options.pop("input_texts")
    given = SourceOptions(input_text=texts[0] if texts else None, **source_options)
    merged = merge_source_options(given, recorded)
    on_step("load torch and the model")
    import_package("torch")
    from modelexport.source.dynamic_axes import as_input_error
    from modelexport.source.example_inputs import (
        ExampleInputs,
        InputRequest,
        make_example_inputs,
    )
    from modelexport.source.load import open_source
    from modelexport.verification.verify import verify

    with as_input_error(user_chose_inputs=True):
        source = open_source(model, merged, trust_remote_code, seed, on_step)
        on_step("make example inputs")
        specs = None if merged.input_specs is None else Path(merged.input_specs)
        requests = [  # each further text is a run of its own
            InputRequest(specs, text, merged.input_shapes)
            for text in (merged.input_text, *texts[1:])
        ]
        if export is not None and export.part is not msgspec.UNSET:
            from modelexport.generation.part_inputs import make_part_inputs

            parts = [make_part_inputs(source, one, export, onnx, seed) for one in requests]
            source = source._replace(model=parts[0].model)
            runs = [ExampleInputs(part.inputs, part.origin) for part in parts]
        else:
            runs = [make_example_inputs(source, one, seed) for one in requests]
        result = verify(
            source.model,
            runs[0].inputs,
            onnx,
            further_inputs=[run.inputs for run in runs[1:]],
            on_step=on_step,
            **options,
        )
    return _Answer(result, source.name, runs[0].origin, source.notes)


def _write(answer: _Answer, drawn: str, output_format: str, output_file: Path | None) -> None:
    """Write the answer in the format that the user chose."""
    for text in answer.notes:
        note(f"note: {text}")
    if output_format == "json":
        emit_json(answer.result, output_file)
    elif output_format == "csv":
        emit_csv(_COLUMNS, _csv_rows(answer.result), output_file)
    else:
        show(_format(answer.result, answer.source, f"{answer.origin}{drawn}"), output_file)


class _Row(msgspec.Struct, frozen=True):
    """A module of the drawn tree with its worst call.

    The tree draws siblings with the same `status` once, so it holds what the columns show.
    """

    tag: str | None
    class_: str
    status: str
    nodes: int
    execution_order: int | None
    worst: ModuleParity


def _format(result: Verification, source: str, origin: str) -> Iterator[RenderableType]:
    """Format the whole answer: summary, module tree, modules that were not compared."""
    yield from format_verification(result, source)
    yield line(f"inputs from {origin}", 2)
    yield ""
    rows = _make_rows(result.modules)
    if any(row.tag for row in rows.values()):
        yield from module_tree(
            rows,
            **{
                "max abs": lambda path: _number(rows[path].worst.max_abs),
                "max rel": lambda path: _number(rows[path].worst.max_rel),
                "cosine": lambda path: _number(rows[path].worst.cosine, ".4f"),
                "outcome": lambda path: _outcome_text(rows[path].worst),
            },
        )
    by_reason: dict[str, list[str]] = {}
    for path, reason in result.not_compared.items():
        by_reason.setdefault(reason, []).append(path)
    if by_reason:
        yield ""
        yield line(f"not compared: {plural(len(result.not_compared), 'module')}")
    most_first = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    for reason, paths in most_first[:_MAX_LISTED]:
        yield line(f"{reason}: {join_names(paths, _MAX_LISTED)}", 2)
    left = sum(len(paths) for _, paths in most_first[_MAX_LISTED:])
    if left:
        yield line(f"… and {plural(left, 'module')} more, each with its reason in {COMPLETE}", 2)


def format_verification(result: Verification, source: str) -> Iterator[RenderableType]:
    """Format the summary of a verification."""
    verdict = "nothing could be compared"
    if result.modules_compared:
        verdict = "agrees within" if result.agrees else "differs beyond"
        verdict = f"{verdict} atol {result.atol:g}, rtol {result.rtol:g}"
    yield line(f"{result.file} against {source}: {verdict}")
    partly = f", {len(result.partly_compared):,} of them in part" if result.partly_compared else ""
    total = plural(result.modules_total, "module")
    runs = "" if result.runs == 1 else f", the worst of {result.runs:,} runs"
    yield line(f"{result.modules_compared:,} of {total} compared{partly}{runs}", 2)
    outcomes = ", ".join(
        f"{count:,} {_OUTCOME_TEXT.get(name, name)}" for name, count in result.outcomes.items()
    )
    yield line(f"{plural(len(result.modules), 'call')}: {outcomes}", 2)
    failed = [parity for parity in result.modules if parity.outcome in FAILED]
    if failed:
        yield line(f"first to differ: {_describe(failed[0])}", 2)
        yield from _format_causes(result, failed)


def _format_causes(result: Verification, failed: list[ModuleParity]) -> Iterator[RenderableType]:
    """Format the modules that cause a difference."""
    if not result.causes:
        yield line(
            "none of these causes it: given PyTorch's inputs, each agrees or could not be run", 2
        )
        return
    causes = {parity.module: parity for parity in failed if parity.blame == Blame.HERE}
    yield line(f"caused by {plural(len(result.causes), 'module')}, the worst first:", 2)
    for path in result.causes[:_MAX_LISTED]:
        own, text = causes[path].own_abs, causes[path].note
        size = "" if own is None else f", {own:.1e} by itself"
        yield line(f"{_name(causes[path])}{size}{'' if text is None else f', {text}'}", 4)
    left = len(result.causes) - _MAX_LISTED
    if left > 0:
        yield line(f"… and {left} more; {COMPLETE} has them all", 4)


def _describe(parity: ModuleParity) -> str:
    """Describe a call that differs."""
    call = "" if parity.call is None else f", call {parity.call}"
    size = parity.note or ""
    if parity.max_abs is not None:
        size = f"{parity.max_abs:.1e}, relative {parity.max_rel:.1e}"
    return f"{_name(parity, call)}: {size}{f', {parity.blame}' if parity.blame else ''}"


def _name(parity: ModuleParity, call: str = "") -> str:
    """Format the path and the class of a module."""
    return f"{parity.module or '(root)'}{call} ({parity.class_.rpartition('.')[2]})"


def _make_rows(modules: Iterable[ModuleParity]) -> dict[str, _Row]:
    """Take the worst call of each module."""
    worst: dict[str, ModuleParity] = {}
    for parity in modules:
        if parity.module not in worst or _severity(parity) > _severity(worst[parity.module]):
            worst[parity.module] = parity
    return {
        path: _Row(
            tag=parity.tag,
            class_=parity.class_,
            status=f"{_outcome_text(parity)} {_number(parity.max_abs)} {_number(parity.max_rel)}",
            nodes=0,
            execution_order=parity.execution_order,
            worst=parity,
        )
        for path, parity in worst.items()
    }


def _severity(parity: ModuleParity) -> tuple[bool, bool, float]:
    """Rank a call: failed above all others, and causes above those that inherit."""
    return parity.outcome in FAILED, parity.blame == Blame.HERE, parity.max_abs or 0.0


def _number(value: float | None, form: str = ".0e") -> str:
    """Format a number for a column."""
    return "" if value is None else format(value, form)


def _outcome_text(parity: ModuleParity) -> str:
    """Format the outcome of a call for a column; empty if all of it agrees."""
    if parity.outcome == Outcome.AGREES:
        compared = len(parity.tensors)
        return "" if compared == parity.results else f"{compared} of {parity.results} results"
    if parity.outcome == Outcome.DIFFERS and parity.blame is not None:
        return str(parity.blame)
    return ", ".join(filter(None, (parity.outcome, parity.blame)))


def _csv_rows(result: Verification) -> Iterator[dict[str, object]]:
    """Make a row of each call."""
    for parity in result.modules:
        tensors = " ".join(tensor.tensor for tensor in parity.tensors)
        yield {**msgspec.to_builtins(parity), "tensors": tensors}
