"""`modelexport batch`: many exports, progress for people, a JSON line a result for programs."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from modelexport.batch.executors import EXECUTORS
from modelexport.batch.jobs import check_limits, read_jobs
from modelexport.batch.results import DONE, SKIPPED, JobResult
from modelexport.batch.run import run_batch
from modelexport.cli.console import (
    emit_json_line,
    line,
    listed,
    mute_stdout,
    note,
    plain_table,
    show,
    size,
    visible,
)
from modelexport.errors import plural

_MOST_SHOWN = 3
_INTERRUPTED = 130


@click.command("batch", short_help="Many exports, each in a process of its own.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Where the outputs go; the file's own otherwise.",
)
@click.option("--workers", type=int, help="Jobs at a time; by default one a core, up to 8.")
@click.option(
    "--timeout", type=float, help="Seconds that a job may take, where it does not say itself."
)
@click.option(
    "--memory",
    help="Memory that a job may take, such as '4 GiB'; by default its share of the machine's.",
)
@click.option("--resume", is_flag=True, help="Skip the jobs that are done and unchanged since.")
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default=EXECUTORS[0],
    show_default=True,
    help="Where they run.",
)
@click.option("--ray-address", help="A Ray cluster; by default a local one is started.")
@click.option(
    "--output-format",
    type=click.Choice(["text", "json"]),
    help="text on a terminal, else json, a line a job.",
)
@click.pass_context
def batch_command(
    ctx: click.Context,
    file: Path,
    output_dir: Path | None,
    workers: int | None,
    timeout: float | None,
    memory: str | None,
    resume: bool,
    executor: str,
    ray_address: str | None,
    output_format: str | None,
) -> None:
    """Carry out the exports that FILE lists, each in a process of its own with limits of time and memory.

    FILE is TOML or JSON. A job has the options of `export` under their names, with _ for -; paths start
    from FILE's folder. A job that fails, crashes, hangs or takes too much memory is reported; the others
    go on. With --executor ray, all machines of the cluster have to see FILE's folder and the outputs'.

    \b
    output_dir = "exports"
    [defaults]
    strategy = "auto"
    timeout = 600
    memory = "4 GiB"
    [[jobs]]
    model = "./bert-tiny"
    output = "bert.onnx"
    [[jobs]]
    model = "models.py:make_model"
    output = "model.onnx"
    input_shape = [2, 64]

    Each result is a line of JSON in <FILE's stem>_results.jsonl among the outputs, and on stdout where
    that is no terminal. Exit code 0 if all jobs are done, 3 if one is not, 2 if the list is wrong, 130
    after Ctrl-C.
    """
    check_limits(timeout, memory)
    limits = {
        name: value
        for name, value in (("timeout", timeout), ("memory", memory))
        if value is not None
    }
    batch = read_jobs(file, output_dir, limits)
    as_json = output_format == "json" or (output_format is None and not sys.stdout.isatty())
    screen = _Screen(len(batch.jobs), as_json)
    try:
        with screen.live():
            found = run_batch(batch, batch.results, executor, workers, ray_address, resume, screen)
    except KeyboardInterrupt:
        left = len(batch.jobs) - screen.ended_jobs
        note(f"stopped: {plural(screen.ended_jobs, 'job')} ended, {left} to do; go on with")
        note(f"  {_again(ctx)}")
        ctx.exit(_INTERRUPTED)
    if not as_json:
        show(_view(found, batch.results))
    failed = [result for result in found if not result.succeeded]
    if failed:
        note(f"run again what is not done with\n  {_again(ctx)}")
    ctx.exit(3 if failed else 0)


def _again(ctx: click.Context) -> str:
    """The command line that goes on where this one ended."""
    words = ["modelexport", "batch", str(ctx.params["file"]), "--resume"]
    for name in ("output_dir", "workers", "timeout", "memory", "ray_address"):
        if ctx.params[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(ctx.params[name])]
    if ctx.params["executor"] != EXECUTORS[0]:
        words += ["--executor", ctx.params["executor"]]
    return shlex.join(words)


class _Screen:
    """A line for each job as it ends, and below them, on a terminal, what is under way."""

    def __init__(self, jobs: int, as_json: bool) -> None:
        self._jobs = jobs
        self._as_json = as_json
        self._status: Status | None = None
        self.ended_jobs = 0

    def live(self) -> AbstractContextManager[object]:
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            return nullcontext()
        self._status = console.status(f"0 of {self._jobs} done")
        return self._status

    def ended(self, result: JobResult) -> None:
        self.ended_jobs += 1
        told = _told(result) if result.succeeded else result.message
        text = f"[{self.ended_jobs}/{self._jobs}] {visible(result.name)}: {result.status}, {visible(told)}"
        if self._status is not None:  # above the line that is under way; the summary has the hints
            self._status.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            note(text if result.hint is None else f"{text} ({result.hint})")
        if self._as_json:
            try:
                emit_json_line(result)
            except (
                OSError
            ) as error:  # whoever read it is gone; the results are in their file all the same
                note(f"no more results on stdout: {error.strerror}")
                self._as_json = False
                mute_stdout()

    def waiting(self, running: dict[str, float]) -> None:
        if self._status is None:
            return
        names = [f"{visible(name)} {seconds:.0f} s" for name, seconds in running.items()]
        under_way = f"; {listed(names, _MOST_SHOWN)}" if names else ""
        self._status.update(Text(f"{self.ended_jobs} of {self._jobs} done{under_way}"))


def _told(result: JobResult) -> str:
    nodes = "" if result.nodes is None else f"{plural(result.nodes, 'node')}, {result.strategy}"
    return nodes if result.status == SKIPPED else f"{nodes}, {result.seconds:.1f} s"


def _view(results: list[JobResult], path: Path) -> Iterator[RenderableType]:
    """The whole batch: a table, and what went wrong in full."""
    yield ""
    rows = [
        (
            result.name,
            result.status,
            result.strategy or "",
            "" if result.nodes is None else f"{result.nodes:,}",
            f"{result.seconds:.1f}",
            "" if result.peak_memory is None else size(result.peak_memory),
        )
        for result in results
    ]
    titles = {
        "job": False,
        "status": False,
        "strategy": False,
        "nodes": True,
        "seconds": True,
        "memory": True,
    }
    yield plain_table(titles, rows)
    yield ""
    counts = Counter(result.status for result in results)
    done = counts.pop(DONE, 0) + counts.get(SKIPPED, 0)
    skipped = counts.pop(SKIPPED, 0)
    told = [
        f"{done} of {plural(len(results), 'job')} done"
        + (f" ({skipped} before)" if skipped else "")
    ]
    yield line(", ".join([*told, *(f"{count} {status}" for status, count in counts.items())]))
    for result in results:
        if not result.succeeded:
            yield line(f"{result.name}: {result.status}: {result.message}", 2)
            for detail in (*result.details, *((f"hint: {result.hint}",) if result.hint else ())):
                yield line(detail.strip(), 6)
        for told_beside in result.notes:
            yield line(f"{result.name}: note: {told_beside}", 2)
    yield line(f"results: {path}")
