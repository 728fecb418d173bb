"""`python -m fuzz [TARGET ...]`: run readers on damaged files, each case in its own process."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzz.limits import judge
from fuzz.page import TITLES, cells, write_page
from fuzz.search import FlawReport, Outcome, search_by_name, warm_up
from fuzz.seeds import write_files
from fuzz.targets import TARGETS


@click.command()
@click.argument("targets", nargs=-1, type=click.Choice(list(TARGETS)))
@click.option(
    "--cases",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Cases per target.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same cases."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Targets to run in parallel.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for files that show a flaw.",
)
@click.option(
    "--repeat",
    "again",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Run the readers on these files.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Page to write the results to; other targets keep their rows.",
)
def main(
    targets: tuple[str, ...],
    cases: int,
    seed: int,
    jobs: int,
    keep: Path | None,
    again: Path | None,
    page: Path | None,
) -> None:
    """Search for files that make a reader fail without an error of modelexport.

    Runs all targets unless some are named. The exit code is 1 if there is a flaw.
    """
    names = targets or tuple(TARGETS)
    if again is not None:
        if page is not None:
            raise click.UsageError("--repeat writes no page: leave --page out")
        sys.exit(max(_repeat(name, again) for name in names))
    if jobs == 1:
        outcomes = [search_by_name(name, cases, seed) for name in names]
    else:
        with ProcessPoolExecutor(
            jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            outcomes = list(pool.map(search_by_name, names, repeat(cases), repeat(seed)))
    for outcome in outcomes:
        for number, flaw in enumerate(outcome.flaws):
            _show(outcome.target, number, flaw, keep)
    Console(width=100).print(_table(outcomes))
    if page is not None:
        write_page(page, outcomes)
    sys.exit(any(outcome.flaws for outcome in outcomes))


def _repeat(name: str, folder: Path) -> bool:
    """Run the readers of a target on kept files, and return whether there is a flaw."""
    warm_up(TARGETS[name])
    verdict = judge(TARGETS[name].readers, folder.resolve(), TARGETS[name].limits)
    click.echo(
        f"{name}: no flaw"
        if verdict.flaw is None
        else f"{name}: {verdict.flaw.name}\n{verdict.flaw.detail}"
    )
    return verdict.flaw is not None


def _show(name: str, number: int, flaw: FlawReport, keep: Path | None) -> None:
    click.echo(f"{name}: {flaw.name}\n{flaw.detail}")
    if keep is None:
        click.echo("  --keep DIR keeps the files that show it\n")
        return
    folder = keep / f"{name}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    write_files(flaw.files, folder)
    click.echo(f"  to repeat: python -m fuzz {name} --repeat {folder}\n")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(*TITLES)
    for outcome in outcomes:
        table.add_row(*cells(outcome))
    return table


if __name__ == "__main__":
    main()
