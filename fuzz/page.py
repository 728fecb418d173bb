"""Write docs/fuzzing.md from the outcomes of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fuzz.limits import Limits
from fuzz.search import LARGEST, Outcome
from fuzz.targets import TARGETS

TITLES = ("target", "cases", "accepted", "seconds", "slowest case", "most memory", "flaws")
_LIMITS = Limits()
_INTRODUCTION = f"""\
# Fuzzing

Damaged files of every format, given to every function and command that reads them. Written by
`make fuzz`; not edited by hand.

A case is a file that was changed, or made from a grammar. Each reader of its format runs on it, in
a process of its own. A flaw is a reader that fails without an error of modelexport, writes a wrong
file, or takes more than {_LIMITS.seconds:g} seconds or more memory than the limit, which is
{_LIMITS.memory >> 20} MiB for most formats. A case has at most {LARGEST >> 20} MiB.
`accepted` counts the cases that a reader accepted.
"""


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Format the row of a target."""
    return (
        outcome.target,
        f"{outcome.cases:,}",
        f"{outcome.accepted / max(outcome.cases, 1):.0%}",
        f"{outcome.seconds:,.0f}",
        f"{outcome.slowest:.2f} s",
        f"{outcome.grown >> 20} MiB",
        str(len(outcome.flaws)),
    )


def write_page(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write the page; targets that did not run keep their rows."""
    rows = dict(_read_rows(path)) | {outcome.target: _row(outcome) for outcome in outcomes}
    titles = (f"| {' | '.join(TITLES)} | readers |", "|---" * (len(TITLES) + 1) + "|")
    table = (*titles, *(rows[name] for name in TARGETS if name in rows))
    path.write_text("\n".join((_INTRODUCTION, *table)) + "\n", encoding="utf-8")


def _row(outcome: Outcome) -> str:
    """Format the row of a target in Markdown."""
    readers = ", ".join(f"`{name}`" for name in TARGETS[outcome.target].readers)
    return f"| {' | '.join(cells(outcome))} | {readers} |"


def _read_rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the target and the row of each row of an earlier page."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("| "):
            yield line.split("|")[1].strip(), line
