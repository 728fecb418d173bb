"""`python -m fuzz [TARGET ...]`: damaged files before every reader, each case in a process of its own."""

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

from fuzz.hunt import Found, Outcome, hunted, warm_up
from fuzz.limits import judged
from fuzz.seeds import written
from fuzz.targets import TARGETS


@click.command()
@click.argument("targets", nargs=-1, type=click.Choice(list(TARGETS)))
@click.option(
    "--cases",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="How many for each target.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same cases."
)
@click.option(
    "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Targets at the same time."
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
    help="Files to try once more.",
)
def main(
    targets: tuple[str, ...],
    cases: int,
    seed: int,
    jobs: int,
    keep: Path | None,
    again: Path | None,
) -> None:
    """Look for input that makes a reader fail in any other way than by an error of ours.

    All targets if none is named. The exit code is 1 if there was a flaw.
    """
    names = targets or tuple(TARGETS)
    if again is not None:
        sys.exit(max(_repeated(name, again) for name in names))
    if jobs == 1:
        outcomes = [hunted(name, cases, seed) for name in names]
    else:
        with ProcessPoolExecutor(
            jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            outcomes = list(pool.map(hunted, names, repeat(cases), repeat(seed)))
    for outcome in outcomes:
        for number, flaw in enumerate(outcome.flaws):
            _show(outcome.target, number, flaw, keep)
    Console(width=100).print(_table(outcomes))
    sys.exit(any(outcome.flaws for outcome in outcomes))


def _repeated(name: str, folder: Path) -> bool:
    warm_up(TARGETS[name])
    verdict = judged(TARGETS[name].readers, folder.resolve(), TARGETS[name].limits)
    click.echo(
        f"{name}: no flaw"
        if verdict.flaw is None
        else f"{name}: {verdict.flaw.name}\n{verdict.flaw.detail}"
    )
    return verdict.flaw is not None


def _show(name: str, number: int, flaw: Found, keep: Path | None) -> None:
    click.echo(f"{name}: {flaw.name}\n{flaw.detail}")
    if keep is None:
        click.echo("  --keep DIR keeps the files that show it\n")
        return
    folder = keep / f"{name}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    written(flaw.files, folder)
    click.echo(f"  once more: python -m fuzz {name} --repeat {folder}\n")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(
        "target", *(("cases", "read by some", "seconds", "slowest case", "most memory", "flaws"))
    )
    for o in outcomes:
        share = f"{o.accepted / max(o.cases, 1):.0%}"
        row = (
            o.cases,
            share,
            f"{o.seconds:.0f}",
            f"{o.slowest:.2f} s",
            f"{o.grown >> 20} MiB",
            len(o.flaws),
        )
        table.add_row(o.target, *map(str, row))
    return table


if __name__ == "__main__":
    main()
