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

from fuzz.limits import Flaw, Verdict, judged
from fuzz.seeds import Files, written
from fuzz.targets import TARGETS, Target
from modelexport.errors import ModelExportError

_EVERY = 1000
_ROUND = 1000
"""Cases that hypothesis makes in one go; it remembers them all, and a process that grows is slow to fork."""
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
    target: Target,
    cases: int,
    start: int,
    on_progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """So many cases, no two alike, the same for the same start. After a flaw it goes on, and looks for others."""
    began = time.monotonic()
    warm_up(target)
    with tempfile.TemporaryDirectory() as work:
        hunter = _Hunter(target, Path(work), on_progress)
        outcome = hunter.outcome
        before = -1
        while before < outcome.cases < cases:
            before = outcome.cases
            found = hunter.first(min(cases - before, _ROUND), start)
            if found is not None:
                outcome.flaws.append(Found(found.flaw.name, found.flaw.detail, found.files))
            start += 1
    outcome.seconds = time.monotonic() - began
    return outcome


def warm_up(target: Target) -> None:
    """Read every seed once in this process, so that what is imported is there for the cases that fork from it."""
    for whole in target.seeds():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
            written(whole.files, Path(folder))
            for reader in target.readers.values():
                with suppress(ModelExportError):
                    reader(Path(folder), Path(out))
    gc.collect()
    gc.freeze()


def hunted(name: str, cases: int, start: int) -> Outcome:
    """The same for a target by its name, with a line on stderr now and then."""

    def tell(outcome: Outcome) -> None:
        if not outcome.cases % _EVERY:
            told = "; ".join(flaw.name for flaw in outcome.flaws) or "no flaw"
            print(f"{name}: {outcome.cases} of {cases}, {told}", file=sys.stderr, flush=True)

    return hunt(TARGETS[name], cases, start, tell)


class _Hunter:
    """Tries cases that were not tried yet, until one has a flaw that is not known yet."""

    def __init__(
        self, target: Target, work: Path, on_progress: Callable[[Outcome], object]
    ) -> None:
        self.outcome = Outcome(target.name)
        self._target = target
        self._cases = target.cases()
        self._work = work
        self._on_progress = on_progress
        self._seen: set[bytes] = set()
        self._found: FoundError | None = None
        self._tries = 0

    def first(self, cases: int, start: int) -> FoundError | None:
        """The first flaw, made small; None if so many cases have none."""
        self._found, self._tries = None, 0
        quiet = settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )

        @seed(start)
        @quiet
        @given(self._cases)
        def look(files: Files) -> None:
            self._look(files) if self._found is None else self._look_again(files)

        with suppress(FoundError, Flaky):
            look()
        return self._found

    def _look(self, files: Files) -> None:
        digest = hashlib.sha256(msgspec.msgpack.encode(files)).digest()
        if digest in self._seen:
            reject()
        self._seen.add(digest)
        verdict, outcome = self._judged(files), self.outcome
        outcome.cases += 1
        outcome.accepted += bool(verdict.accepted)
        outcome.slowest = max(outcome.slowest, verdict.seconds)
        outcome.grown = max(outcome.grown, verdict.grown)
        self._on_progress(outcome)
        self._raise_new(verdict, files)

    def _look_again(self, files: Files) -> None:
        """Whether a smaller case has a flaw as well; in the end it is taken to have none."""
        self._tries += 1
        if self._tries <= _SMALLER:
            self._raise_new(self._judged(files), files)

    def _judged(self, files: Files) -> Verdict:
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            return judged(self._target.readers, written(files, Path(folder)), self._target.limits)

    def _raise_new(self, verdict: Verdict, files: Files) -> None:
        flaw = verdict.flaw
        if flaw is None or any(flaw.name == known.name for known in self.outcome.flaws):
            return
        error = _kind(flaw.name)(flaw, files)
        if self._found is None or error.size <= self._found.size:
            self._found = error
        raise error
