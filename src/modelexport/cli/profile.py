"""`modelexport profile`: show the latency of each module in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.cli.console import (
    check_output,
    emit,
    emit_csv,
    emit_json,
    escape_control,
    format_count,
    inputs_option,
    join_names,
    line,
    output_file_option,
    output_format_option,
    plain_table,
    progress,
    show,
)
from modelexport.cli.tree import bar, module_tree
from modelexport.errors import plural
from modelexport.generation.part_inputs import cache_shapes, find_generation
from modelexport.profiling.profile import (
    OPTIMIZATIONS,
    ModuleDifference,
    ModuleTime,
    Profile,
    ProfileComparison,
    compare_profiles,
    profile,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN_SLOWEST = 8
_SHOWN_FUSED = 3
_BUSY = 0.25
"""The share of a run that kernels wait from which the machine counts as busy."""


def _parse_shapes(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Parse `NAME=2,128`, given once for each input."""
    shapes = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            shape = ()
        if not equals or not shape or min(shape) < 1:
            raise click.BadParameter(f"{text!r} is not of the form NAME=2,128")
        shapes[name] = shape
    return shapes


@click.command("profile")
@click.argument("onnx", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option(
    "--optimization",
    type=click.Choice(OPTIMIZATIONS),
    default=OPTIMIZATIONS[0],
    show_default=True,
    help="What ONNX Runtime does to the graph before it runs.",
)
@click.option(
    "--runs", type=click.IntRange(1), metavar="N", default=20, show_default=True,
    help="How many runs to measure.",
)  # fmt: skip
@click.option(
    "--warmup", type=click.IntRange(0), metavar="N", default=3, show_default=True,
    help="How many runs to make first, without measuring them.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1), metavar="N",
    help="How many threads a node may use; ONNX Runtime decides without it.",
)  # fmt: skip
@click.option(
    "--provider", metavar="NAME", default="CPUExecutionProvider", show_default=True,
    help="The execution provider.",
)  # fmt: skip
@inputs_option
@click.option(
    "--input-shape",
    "input_shapes",
    multiple=True,
    metavar="NAME=SIZES",
    callback=_parse_shapes,
    help="Another shape for an input of a file with symbolic axes, such as ids=1,128.",
)
@click.option(
    "--cache-length",
    type=click.IntRange(1),
    metavar="N",
    help="For the decode part of a language model: one token after N others.",
)
@click.option(
    "--module",
    metavar="PATTERN",
    help="Only modules that match a tag, a module path, an alias or a glob, and those below.",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    metavar="N",
    help="Only list the N modules with the most time of their own.",
)
@output_format_option("text", "json", "csv", "md", help_text="json and csv are complete.")
@output_file_option
def profile_command(
    onnx: Path,
    other: Path | None,
    output_format: str,
    output_file: Path | None,
    top: int | None,
    cache_length: int | None,
    inputs: Path | None,
    **options: object,
) -> None:
    """Show the latency of each module of ONNX in ONNX Runtime, on the optimized graph.

    A time includes the modules below; `own` does not. A node that implements operations of several
    modules counts for one of them; `fused` is the share of the time in such nodes. With OTHER, both
    files are measured and compared by module.

    \b
    Examples:
      modelexport profile bert.onnx
      modelexport profile bert.onnx --top 10 --threads 1
      modelexport profile bert.onnx --input-shape input_ids=8,128
      modelexport profile bert.onnx bert_int8.onnx
      modelexport profile llama_decode.onnx --cache-length 512
    """
    files = [path for path in (onnx, other) if path is not None]
    found = () if cache_length is None else filter(None, map(find_generation, files))
    check_output(output_file, *files, inputs, *(each.path for each in found))
    results = []
    with progress() as step:
        for path in files:
            step(f"read {path.name}")
            chosen: dict[str, object] = {**options, "inputs": inputs}
            if cache_length is not None:
                given: Mapping[str, tuple[int, ...]] = options["input_shapes"]  # type: ignore[assignment]
                chosen["input_shapes"] = {**cache_shapes(path, cache_length), **given}
            results.append(profile(path, on_step=step, **chosen))  # type: ignore[arg-type]
    record: Profile | ProfileComparison = results[0]
    if len(results) > 1:
        record = compare_profiles(*results)
    modules: Sequence[ModuleTime | ModuleDifference] = record.modules
    if top is not None:
        modules = _slowest(record, top)
    if output_format == "json":
        emit_json(record, output_file)
    elif output_format == "csv":
        emit_csv(_columns(record), _rows(modules), output_file)
    elif output_format == "md":
        emit(_markdown(record, modules).encode(), output_file)
    elif isinstance(record, Profile):
        show(_view(record, top), output_file)
    else:
        show(_view_comparison(record, top), output_file)


def _slowest(
    record: Profile | ProfileComparison, most: int
) -> Sequence[ModuleTime | ModuleDifference]:
    """Return the modules with the most time of their own, or the greatest difference."""
    if isinstance(record, Profile):
        ranked = sorted(record.modules, key=lambda module: -module.own_ms)
        return [module for module in ranked if module.own_ms][:most]
    return sorted(record.modules, key=lambda module: -abs(_change(module)))[:most]


def _change(module: ModuleDifference) -> float:
    return (module.after_ms or 0.0) - (module.before_ms or 0.0)


def _view(result: Profile, top: int | None) -> Iterator[RenderableType]:
    yield from _headline(result)
    times = {module.path: module for module in result.modules if module.nodes}
    if top is None and any(module.tag for module in times.values()):
        yield ""
        yield from module_tree(
            times,
            False,
            ms=lambda path: _ms(times[path].inclusive_ms),
            share=lambda path: bar(times[path].share),
            own=lambda path: _ms(times[path].own_ms) if times[path].own_ms else "",
            fused=lambda path: _percent(times[path].shared_ms, times[path].inclusive_ms),
            nodes=lambda path: f"{times[path].nodes:,}",
            calls=lambda path: f"{times[path].calls:,}" if times[path].calls > 1 else "",
            params=lambda path: format_count(times[path].parameters),
            gflops=lambda path: _speed(times[path]),
        )
        yield line(f"runtime overhead  {_ms(result.overhead_ms)} ms")
    slowest = _slowest(result, top or _SHOWN_SLOWEST)
    rows = [
        (
            module.path or "(root)",
            _ms(module.own_ms),
            bar(module.own_ms / result.kernel_ms if result.kernel_ms else 0.0),
            _spread(module),
        )
        for module in slowest
        if isinstance(module, ModuleTime)
    ]
    if rows:
        yield ""
        titles = {"slowest by own time": False, "ms": True, "share": False}
        yield plain_table({**titles, "with those below": False}, rows)
    fused = [_fused_with(m) for m in slowest if isinstance(m, ModuleTime) and m.fused_with]
    if fused:
        yield ""
        yield line("with fused operations of other modules:")
    for text in fused[:_SHOWN_FUSED]:
        yield line(text, 2)


def _headline(result: Profile) -> Iterator[RenderableType]:
    spread = f"{_ms(result.low_ms)} to {_ms(result.high_ms)}"
    yield line(f"{result.file}: {_ms(result.total_ms)} ms a run ({spread})")
    threads = "" if result.threads is None else f", {plural(result.threads, 'thread')}"
    yield line(
        f"{plural(result.runs, 'run')} on {result.inputs}, optimization {result.optimization}, "
        f"{result.provider}{threads}",
        2,
    )
    if result.plain_ms is not None:
        yield line(f"{_ms(result.plain_ms)} ms a run without the profiler", 2)
    overhead = _percent(result.overhead_ms, result.total_ms) or "0%"
    yield line(
        f"kernels {_ms(result.kernel_ms)} ms, runtime overhead {_ms(result.overhead_ms)} ms "
        f"({overhead})",
        2,
    )
    if result.waiting_ms > _BUSY * result.total_ms:
        yield line(
            f"busy machine: the kernels of a run waited {_ms(result.waiting_ms)} ms, which is in "
            "the overhead; times of modules are without it",
            2,
        )
    how = "of the kernel time belongs to a module"
    if not result.saved:
        how += "; the provider cannot save its graph, so kernels are joined by name"
    yield line(f"{result.joined:.0%} {how}", 2)
    if result.shared_ms:
        share = _percent(result.shared_ms, result.kernel_ms) or "0%"
        yield line(f"{share} of it is in nodes that implement operations of several modules", 2)
    if result.speed_ratio is not None:
        yield line(
            f"the measured graph takes {result.speed_ratio:.2f} times as long as the session "
            "that optimizes the file",
            2,
        )


def _view_comparison(result: ProfileComparison, top: int | None) -> Iterator[RenderableType]:
    for each in (result.before, result.after):
        yield from _headline(each)
    before, after = result.before.total_ms, result.after.total_ms
    yield ""
    yield line(f"{_ms(before)} ms before, {_ms(after)} ms after: {after / before:.2f} times")
    rows = {module.path: module for module in result.modules}
    if top is None:
        times = {module.path: module for module in (*result.after.modules, *result.before.modules)}
        shown = {path: module for path, module in times.items() if module.nodes}
        yield ""
        yield from module_tree(
            shown,
            False,
            **{
                "before ms": lambda path: _optional(rows[path].before_ms),
                "after ms": lambda path: _optional(rows[path].after_ms),
                "ratio": lambda path: _ratio(rows[path]),
            },
        )
        return
    yield ""
    table = [
        (
            module.path or "(root)",
            _optional(module.before_ms),
            _optional(module.after_ms),
            _ratio(module),
        )
        for module in _slowest(result, top)
        if isinstance(module, ModuleDifference)
    ]
    titles = {"changed most": False, "before ms": True, "after ms": True, "ratio": True}
    yield plain_table(titles, table)


def _ms(value: float) -> str:
    """Format milliseconds with three significant digits or more."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:,.{decimals}f}"


def _optional(value: float | None) -> str:
    return "" if value is None else _ms(value)


def _ratio(module: ModuleDifference) -> str:
    return "" if module.ratio is None else f"{module.ratio:.2f}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if part and whole else ""


def _speed(module: ModuleTime) -> str:
    return "" if module.gflops_per_second is None else f"{module.gflops_per_second:.3g}"


def _spread(module: ModuleTime) -> str:
    return f"{_ms(module.inclusive_ms)} ({_ms(module.low_ms)} to {_ms(module.high_ms)})"


def _fused_with(module: ModuleTime) -> str:
    """Name the modules whose operations are in nodes of a module."""
    return f"{module.path or '(root)'}: {join_names(module.fused_with, _SHOWN_FUSED)}"


def _columns(record: Profile | ProfileComparison) -> tuple[str, ...]:
    kind = ModuleTime if isinstance(record, Profile) else ModuleDifference
    return kind.__struct_encode_fields__


def _rows(modules: Iterable[ModuleTime | ModuleDifference]) -> Iterator[Mapping[str, object]]:
    import msgspec

    for module in modules:
        yield msgspec.to_builtins(module)


def _markdown(
    record: Profile | ProfileComparison, modules: Sequence[ModuleTime | ModuleDifference]
) -> str:
    """Write the modules that took time as a Markdown table."""
    columns: tuple[str, ...]
    if isinstance(record, Profile):
        title = (
            f"{record.file}: {_ms(record.total_ms)} ms a run, kernels {_ms(record.kernel_ms)} ms"
        )
        columns = ("path", "class", "inclusive_ms", "own_ms", "share", "nodes", "calls")
    else:
        title = f"{record.before.file} and {record.after.file}"
        columns = ("path", "class", "before_ms", "after_ms", "ratio")
    lines = [escape_control(title), "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in _rows(modules):
        if row.get("nodes", 1):
            cells = {**row, "path": row["path"] or "(root)"}
            lines.append(f"| {' | '.join(_markdown_cell(cells[each]) for each in columns)} |")
    return "\n".join(lines) + "\n"


def _markdown_cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else escape_control(str(value))
    return text.replace("|", "\\|")
