"""`modelexport verify`: an ONNX file against the PyTorch model, module by module."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec
from rich.console import RenderableType

from modelexport.cli.console import (
    check_output,
    emit_csv,
    emit_json,
    line,
    listed,
    note,
    progress,
    show,
)
from modelexport.cli.source_options import input_options, merge_source_options
from modelexport.cli.summary import module_tree
from modelexport.errors import plural
from modelexport.options import SourceOptions
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

_MOST = 8
_SEED = 0
_WORDS = {
    "agrees": "agree",
    "differs": "differ",
    "shape": "of another shape",
    "dtype": "of another type",
}


@click.command("verify", short_help="Every module against PyTorch.")
@click.argument("model")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.option(
    "--atol", type=float, default=Tolerance().atol, show_default=True, help="Absolute tolerance."
)
@click.option(
    "--rtol", type=float, default=Tolerance().rtol, show_default=True, help="Relative tolerance."
)
@click.option(
    "--module", metavar="TEXT", help="Only a tag and those below it, a glob, or a module path."
)
@click.option(
    "--output-format",
    type=click.Choice(["text", "json", "csv"]),
    default="text",
    show_default=True,
    help="text is for people, json and csv are complete.",
)
@click.option(
    "--output-file", type=click.Path(path_type=Path), help="Write to this file instead of stdout."
)
@click.option(
    "--random-inputs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Run on N sets of random inputs besides: names, dtypes, shapes and ranges are those of the example inputs.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of --random-inputs.",
)
@functools.partial(input_options, several_texts=True)
@click.pass_context
def verify_command(
    ctx: click.Context,
    model: str,
    onnx: Path,
    atol: float,
    rtol: float,
    module: str | None,
    output_format: str,
    output_file: Path | None,
    random_inputs: int,
    seed: int,
    input_texts: tuple[str, ...],
    input_shapes: dict[str, tuple[int, ...]],
    input_specs: str | None,
    task: str | None,
    model_class: str | None,
    revision: str | None,
    trust_remote_code: bool,
    random_weights: bool,
) -> None:
    """Run MODEL in PyTorch and ONNX in ONNX Runtime, and compare what each module returns.

    MODEL is what `export` takes. Unless you say otherwise, the model and its inputs are made as they were for the
    export, which the file records. A difference travels downstream: the first module that differs is named, and
    each that differs is run again by itself on PyTorch's own inputs, which tells a cause from an heir.

    The file may have been changed since its export, to float16 or int8 for example.

    One set of inputs may miss a difference. --random-inputs N adds N runs on random inputs: values are drawn from the
    range of the example's, so that token ids stay in the vocabulary. --input-text may be given several times. Of each
    module the worst run is shown.

    \b
    Examples:
      modelexport verify ./bert bert.onnx
      modelexport verify ./bert bert_int8.onnx --atol 1e-2 --rtol 1e-2
      modelexport verify models.py:make_model model.onnx --module encoder.layer.0
      modelexport verify ./bert bert.onnx --random-inputs 5 --seed 1

    The answer says how many modules were compared and lists the others with the reason: an exporter may leave no
    tensor that is a module's result.

    Exit code 0 if all that is compared agrees, 1 if a module differs beyond tolerance or nothing could be compared.
    """
    check_output(output_file, onnx, *source_files(model))
    make_tolerance(atol, rtol)
    with progress(verbose=False) as on_step:
        on_step(f"read {onnx.name}")
        given = SourceOptions(
            task,
            model_class,
            revision,
            random_weights,
            input_texts[0] if input_texts else None,
            input_shapes,
            input_specs,
        )
        recorded = load(onnx).records
        export = None if recorded is None else recorded.export
        options = merge_source_options(given, None if export is None else export.source_options)
        on_step("load torch and the model")
        from modelexport.source.dynamic_axes import as_input_error, open_source
        from modelexport.source.example_inputs import InputRequest, make_example_inputs
        from modelexport.verification.verify import verify

        made_with = _SEED if export is None or export.seed is None else export.seed
        with as_input_error(user_chose_inputs=True):
            source = open_source(model, options, trust_remote_code, made_with)
            on_step("make example inputs")
            specs = None if options.input_specs is None else Path(options.input_specs)
            texts = (options.input_text, *input_texts[1:])
            examples = [
                make_example_inputs(
                    source, InputRequest(specs, one, options.input_shapes), made_with
                )
                for one in texts
            ]
            result = verify(
                source.model,
                examples[0].inputs,
                onnx,
                atol=atol,
                rtol=rtol,
                module=module,
                further_inputs=[other.inputs for other in examples[1:]],
                random_inputs=random_inputs,
                seed=seed,
                on_step=on_step,
            )
    for told in source.notes:
        note(f"note: {told}")
    if output_format == "json":
        emit_json(result, output_file)
    elif output_format == "csv":
        emit_csv(_COLUMNS, _lines(result), output_file)
    else:
        drawn = (
            f", and {plural(random_inputs, 'random set')} with seed {seed}" if random_inputs else ""
        )
        show(_view(result, source.name, f"{examples[0].rung}{drawn}"), output_file)
    ctx.exit(0 if result.agrees else 1)


class _Row(msgspec.Struct, frozen=True):
    """A module as the tree draws it: its worst call. `status` tells apart what is not to be drawn as one."""

    tag: str | None
    class_: str
    status: str
    nodes: int
    execution_order: int | None
    worst: ModuleParity


def _view(result: Verification, source: str, inputs_from: str) -> Iterator[RenderableType]:
    yield from verified(result, source)
    yield line(f"inputs from {inputs_from}", 2)
    yield ""
    rows = _rows(result.modules)
    if any(row.tag for row in rows.values()):
        yield from module_tree(
            rows,
            **{
                "max abs": lambda path: _number(rows[path].worst.max_abs),
                "max rel": lambda path: _number(rows[path].worst.max_rel),
                "cosine": lambda path: (
                    "" if rows[path].worst.cosine is None else f"{rows[path].worst.cosine:.4f}"
                ),
                "outcome": lambda path: _outcome(rows[path].worst),
            },
        )
    yield from _not_compared(result)


def _not_compared(result: Verification) -> Iterator[RenderableType]:
    """The modules that the answer is not about, by reason."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in result.not_compared.items():
        by_reason.setdefault(reason, []).append(path or "(root)")
    if by_reason:
        yield ""
        yield line(f"not compared: {plural(len(result.not_compared), 'module')}")
    for reason, paths in by_reason.items():
        yield line(f"{reason}: {listed(paths, _MOST)}", 2)


def verified(result: Verification, source: str) -> Iterator[RenderableType]:
    """The answer in a few lines."""
    failed = [found for found in result.modules if found.outcome in FAILED]
    if result.modules_compared:
        told = "agrees within" if result.agrees else "differs beyond"
        yield line(
            f"{result.file} against {source}: {told} atol {result.atol:g}, rtol {result.rtol:g}"
        )
    else:
        yield line(f"{result.file} against {source}: nothing could be compared")
    partly = f", {len(result.partly_compared):,} of them in part" if result.partly_compared else ""
    total = plural(result.modules_total, "module")
    runs = "" if result.runs == 1 else f", the worst of {result.runs:,} runs"
    yield line(f"{result.modules_compared:,} of {total} compared{partly}{runs}", 2)
    yield line(f"{plural(len(result.modules), 'call')}: {_counts(result)}", 2)
    if failed:
        yield line(f"first to differ: {_told(failed[0])}", 2)
        yield from _causes(result, failed)


def _counts(result: Verification) -> str:
    return ", ".join(
        f"{count:,} {_WORDS.get(name, name)}" for name, count in result.outcomes.items()
    )


def _causes(result: Verification, failed: list[ModuleParity]) -> Iterator[RenderableType]:
    if not result.causes:
        yield line(
            "none of these causes it: given PyTorch's inputs, each agrees or could not be run", 2
        )
        return
    worst = {found.module: found for found in failed if found.blame == Blame.HERE}
    yield line(f"caused by {plural(len(result.causes), 'module')}, the worst first:", 2)
    for path in result.causes[:_MOST]:
        own = worst[path].own_abs
        size = "" if own is None else f", {own:.1e} by itself"
        told = "" if worst[path].note is None else f", {worst[path].note}"
        yield line(f"{path or '(root)'} ({worst[path].class_.rpartition('.')[2]}){size}{told}", 4)
    if len(result.causes) > _MOST:
        yield line(f"… and {len(result.causes) - _MOST} more; --output-format json has them all", 4)


def _told(found: ModuleParity) -> str:
    call = "" if found.call is None else f", call {found.call}"
    size = (
        found.note or ""
        if found.max_abs is None
        else f"{found.max_abs:.1e}, relative {found.max_rel:.1e}"
    )
    kind = found.class_.rpartition(".")[2]
    return f"{found.module or '(root)'}{call} ({kind}): {size}{f', {found.blame}' if found.blame else ''}"


def _rows(modules: Iterable[ModuleParity]) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for found in modules:
        before = rows.get(found.module)
        if before is None or _badness(found) > _badness(before.worst):
            status = f"{_outcome(found)} {_number(found.max_abs)} {_number(found.max_rel)}"
            rows[found.module] = _Row(
                found.tag, found.class_, status, 0, found.execution_order, found
            )
    return rows


def _badness(found: ModuleParity) -> tuple[bool, bool, float]:
    return found.outcome in FAILED, found.blame == Blame.HERE, found.max_abs or 0.0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _outcome(found: ModuleParity) -> str:
    if found.blame is not None:
        return (
            str(found.blame)
            if found.outcome == Outcome.DIFFERS
            else f"{found.outcome}, {found.blame}"
        )
    if found.outcome == Outcome.AGREES:
        return (
            ""
            if len(found.tensors) == found.results
            else f"{len(found.tensors)} of {found.results} results"
        )
    return str(found.outcome)


_COLUMNS = (
    "module", "tag", "class", "call", "outcome", "blame", "max_abs", "max_rel", "cosine", "own_abs", "note", "tensors",
    "results", "run",
)  # fmt: skip


def _lines(result: Verification) -> Iterator[dict[str, object]]:
    for found in result.modules:
        row = msgspec.to_builtins(found)
        yield {**row, "tensors": " ".join(told["tensor"] for told in row["tensors"])}
