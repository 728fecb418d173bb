"""Looks for flaws of one target: hypothesis makes the cases, and makes one that fails as small as it can."""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from fuzz.limits import Flaw, judged
from fuzz.seeds import Files, written
from fuzz.targets import TARGETS, Target
from modelexport.errors import ModelExportError

_EVERY = 1000
_SMALLER = 200
"""How often a case that fails is tried in a smaller form."""


class FoundError(Exception):
    """A case that has a flaw; each kind of flaw is a class of its own, so that hypothesis tells them apart."""

    def __init__(self, flaw: Flaw, files: Files) -> None:
        super().__init__(flaw.name)
        self.flaw = flaw
        self.files = files
        self.size = sum(map(len, files.values()))


@functools.cache
def _kind(name: str) -> type[FoundError]:
    return type("FoundError", (FoundError,), {"__doc__": name})


class Found(msgspec.Struct, frozen=True):
    """A flaw, and the smallest files that show it."""

    name: str
    detail: str
    files: Files


class Outcome(msgspec.Struct):
    """What came of a target: cases, how many of them a reader took, flaws, time and memory."""

    target: str
    cases: int = 0
    accepted: int = 0
    seconds: float = 0
    slowest: float = 0
    grown: int = 0
    flaws: list[Found] = msgspec.field(default_factory=list)


def hunt(
    target: Target, cases: int, start: int, on_progress: Callable[[Outcome], object] = lambda outcome: None
) -> Outcome:
    """So many cases, no two alike, the same for the same start. After a flaw it goes on, and looks for others."""
    outcome = Outcome(target.name)
    began = time.monotonic()
    strategy = target.cases()
    seen: set[bytes] = set()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        _warm_up(target, folder)
        while outcome.cases < cases:
            found = _first(target, strategy, folder, cases - outcome.cases, start, seen, outcome, on_progress)
            outcome.seconds = time.monotonic() - began
            if found is None:
                break
            outcome.flaws.append(Found(found.flaw.name, found.flaw.detail, found.files))
            start += 1
    return outcome


def _digest(files: Files) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(files)).digest()


def _warm_up(target: Target, work: Path) -> None:
    """Read every seed once in this process, so that what is imported is there for the cases that fork from it."""
    for number, whole in enumerate(target.seeds()):
        folder, out = work / f"seed-{number}", work / f"out-{number}"
        folder.mkdir()
        out.mkdir()
        written(whole.files, folder)
        for reader in target.readers.values():
            with suppress(ModelExportError):
                reader(folder, out)
    gc.collect()
    gc.freeze()


def hunted(name: str, cases: int, start: int) -> Outcome:
    """The same for a target by its name, with a line on stderr now and then."""

    def tell(outcome: Outcome) -> None:
        if not outcome.cases % _EVERY:
            told = "; ".join(flaw.name for flaw in outcome.flaws) or "no flaw"
            print(f"{name}: {outcome.cases} of {cases}, {told}", file=sys.stderr, flush=True)

    return hunt(TARGETS[name], cases, start, tell)


def _first(
    target: Target,
    strategy: SearchStrategy[Files],
    work: Path,
    cases: int,
    start: int,
    seen: set[bytes],
    outcome: Outcome,
    on_progress: Callable[[Outcome], object],
) -> FoundError | None:
    """The first flaw that is not known yet, made small."""
    known = {found.name for found in outcome.flaws}
    found: FoundError | None = None
    tries = 0

    @seed(start)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(strategy)
    def look(files: Files) -> None:
        nonlocal found, tries
        tries += found is not None
        if tries > _SMALLER:
            return
        if found is None:
            if (digest := _digest(files)) in seen:
                reject()
            seen.add(digest)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            verdict = judged(target.readers, written(files, Path(folder)), target.limits)
        if found is None:  # later ones only make it small
            outcome.cases += 1
            outcome.accepted += bool(verdict.accepted)
            outcome.slowest = max(outcome.slowest, verdict.seconds)
            outcome.grown = max(outcome.grown, verdict.grown)
            on_progress(outcome)
        if verdict.flaw is not None and verdict.flaw.name not in known:
            error = _kind(verdict.flaw.name)(verdict.flaw, files)
            if found is None or error.size <= found.size:
                found = error
            raise error

    try:
        look()
    except (FoundError, Flaky):
        return found
    return None
