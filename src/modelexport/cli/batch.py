"""`modelexport batch`: run many exports, with progress for people and JSON lines for programs."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modelexport.batch.jobs import check_limits, read_jobs
from modelexport.batch.results import DONE, SKIPPED, JobResult
from modelexport.batch.run import EXECUTORS, run_batch
from modelexport.cli.console import (
    Progress,
    emit_json,
    format_size,
    join_names,
    line,
    mute_stdout,
    note,
    plain_table,
    progress,
    show,
)
from modelexport.errors import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_SHOWN = 3
_INTERRUPTED = 130


@click.command("batch")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Folder for the outputs; by default the output_dir of FILE, or the folder of FILE.",
)
@click.option("--workers", type=int, help="Jobs at a time; by default one per core, up to 8.")
@click.option(
    "--timeout", type=float, help="Seconds that a job may take, unless it sets its own timeout."
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
    help="Where the jobs run.",
)
@click.option("--ray-address", help="A Ray cluster; by default a local one is started.")
@click.option(
    "--output-format",
    type=click.Choice(["text", "json"]),
    help="text on a terminal, otherwise json: one line for each job.",
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
    """Run the exports that FILE lists, each in its own process with limits of time and memory.

    FILE is TOML or JSON. A job has the options of `export` under their names, with _ for -; paths
    start from FILE's folder. A job that fails, crashes, hangs or takes too much memory is reported;
    the others go on. With --executor ray, all machines of the cluster have to see FILE's folder and
    that of the outputs.

    \b
    Example:
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

    Each result is a line of JSON in <FILE's stem>_results.jsonl among the outputs, and on stdout if
    that is not a terminal. Exit code 0 if all jobs are done, 3 if one is not, 2 if the list is
    wrong, 130 after Ctrl-C.
    """
    check_limits(timeout, memory)
    limits = {"timeout": timeout, "memory": memory}
    batch = read_jobs(
        file, output_dir, {name: limit for name, limit in limits.items() if limit is not None}
    )
    as_json = output_format == "json" or (output_format is None and not sys.stdout.isatty())
    run = partial(run_batch, batch, batch.results, executor, workers, ray_address, resume)
    results = _run(run, _Screen(len(batch.jobs), as_json), ctx)
    if not as_json:
        show(_view(results, batch.results))
    failed = not all(result.succeeded for result in results)
    if failed:
        note(f"run again what is not done with\n  {_resume_command(ctx)}")
    ctx.exit(3 if failed else 0)


def _run(
    run: Callable[..., list[JobResult]], screen: _Screen, ctx: click.Context
) -> list[JobResult]:
    """Run a batch with its progress; Ctrl-C ends the command with a hint how to resume it."""
    with progress(f"0 of {screen.jobs} done") as status:
        screen.status = status
        try:
            return run(on_result=screen.show_result, on_wait=screen.show_running)
        except KeyboardInterrupt:
            ended, left = plural(screen.ended, "job"), screen.jobs - screen.ended
            status.print(f"stopped: {ended} ended, {left} to do; go on with")
            status.print(f"  {_resume_command(ctx)}")
            ctx.exit(_INTERRUPTED)


def _resume_command(ctx: click.Context) -> str:
    """Return the command line that resumes this batch."""
    words = ["modelexport", "batch", str(ctx.params["file"]), "--resume"]
    for name in ("output_dir", "workers", "timeout", "memory", "ray_address"):
        if ctx.params[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(ctx.params[name])]
    if ctx.params["executor"] != EXECUTORS[0]:
        words += ["--executor", ctx.params["executor"]]
    return shlex.join(words)


class _Screen:
    """A line for each job as it ends, and on a terminal the jobs that are running."""

    def __init__(self, jobs: int, as_json: bool) -> None:
        self.jobs = jobs
        self.ended = 0
        self.status = Progress()
        self._as_json = as_json

    def show_result(self, result: JobResult) -> None:
        """Print the end of a job, and its result as JSON if stdout gets that."""
        self.ended += 1
        text = _describe_export(result) if result.succeeded else result.message
        self.status.print(
            f"[{self.ended}/{self.jobs}] {result.name}: {result.status}, {text}", result.hint
        )
        if self._as_json:
            try:
                emit_json(result, indent=-1)
            except OSError as error:  # the reader of stdout is closed; the results file has it all
                note(f"no more results on stdout: {error.strerror}")
                self._as_json = False
                mute_stdout()

    def show_running(self, running: dict[str, float]) -> None:
        """Show the jobs that are running, with their seconds."""
        jobs = [f"{name} {seconds:.0f} s" for name, seconds in running.items()]
        running_text = f"; {join_names(jobs, _MOST_SHOWN)}" if jobs else ""
        self.status.update(f"{self.ended} of {self.jobs} done{running_text}")


def _describe_export(result: JobResult) -> str:
    """Describe what a job exported, and how long that took."""
    nodes = "" if result.nodes is None else f"{plural(result.nodes, 'node')}, {result.strategy}"
    return nodes if result.status == SKIPPED else f"{nodes}, {result.seconds:.1f} s"


def _view(results: list[JobResult], path: Path) -> Iterator[RenderableType]:
    """Show the whole batch: a table, its counts, and what failed with all details."""
    yield ""
    titles = ("job", "status", "strategy", "nodes", "seconds", "memory")
    numbers = ("nodes", "seconds", "memory")
    rows = [
        (
            result.name,
            result.status,
            result.strategy or "",
            "" if result.nodes is None else f"{result.nodes:,}",
            f"{result.seconds:.1f}",
            "" if result.peak_memory is None else format_size(result.peak_memory),
        )
        for result in results
    ]
    yield plain_table({title: title in numbers for title in titles}, rows)
    yield ""
    yield line(_count(results))
    for result in results:
        if not result.succeeded:
            yield line(f"{result.name}: {result.status}: {result.message}", 2)
            for detail in (*result.details, *((f"hint: {result.hint}",) if result.hint else ())):
                yield line(detail.strip(), 6)
        for text in result.notes:
            yield line(f"{result.name}: note: {text}", 2)
    yield line(f"results: {path}")


def _count(results: list[JobResult]) -> str:
    """Count the jobs by status, as in `3 of 5 jobs done (1 before), 2 failed`."""
    counts = Counter(result.status for result in results)
    skipped = counts.pop(SKIPPED, 0)
    done = counts.pop(DONE, 0) + skipped
    before = f" ({skipped} before)" if skipped else ""
    failed = [f"{count} {status}" for status, count in counts.items()]
    return ", ".join([f"{done} of {plural(len(results), 'job')} done{before}", *failed])
