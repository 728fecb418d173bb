"""Search a target for flaws: hypothesis generates the cases, and shrinks those that fail."""

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

from fuzz.limits import Flaw, Verdict, judge
from fuzz.seeds import Files, write_files
from fuzz.targets import TARGETS, Target
from modelexport.errors import ModelExportError

_PROGRESS = 1000
"""Cases between two lines of progress."""
_ROUND = 1000
"""Cases per run of hypothesis, which keeps them all: a process that grows is slow to fork."""
LARGEST = 32 << 20
"""The most bytes of a case: mutations that repeat fields add up, and limits are for usual sizes."""
_SHRINKS = 200
"""Attempts to shrink a case that fails."""


class FlawError(Exception):
    """A case has a flaw.

    Each flaw has its own subclass, because hypothesis tells failures apart by the class.
    """

    def __init__(self, flaw: Flaw, files: Files) -> None:
        super().__init__(flaw.name)
        self.flaw = flaw
        self.files = files
        self.size = sum(map(len, files.values()))


@functools.cache
def _error_class(name: str) -> type[FlawError]:
    return type("FlawError", (FlawError,), {"__doc__": name})


class FlawReport(msgspec.Struct, frozen=True):
    """A flaw, and the smallest files that show it."""

    name: str
    detail: str
    files: Files


class Outcome(msgspec.Struct):
    """The result of a target.

    `accepted` counts the cases that a reader accepted; `grown` is the largest growth in memory.
    """

    target: str
    cases: int = 0
    accepted: int = 0
    seconds: float = 0
    slowest: float = 0
    grown: int = 0
    flaws: list[FlawReport] = msgspec.field(default_factory=list)


def search(
    target: Target,
    cases: int,
    start: int,
    on_progress: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Run different cases of a target, the same ones for the same start; continue after a flaw."""
    began = time.monotonic()
    warm_up(target)
    with tempfile.TemporaryDirectory() as work:
        state = _Search(target, Path(work), on_progress)
        outcome = state.outcome
        before = -1
        while before < outcome.cases < cases:
            before = outcome.cases
            error = state.find_flaw(min(cases - before, _ROUND), start)
            if error is not None:
                outcome.flaws.append(FlawReport(error.flaw.name, error.flaw.detail, error.files))
            start += 1
    outcome.seconds = time.monotonic() - began
    return outcome


def warm_up(target: Target) -> None:
    """Read every seed once, so that forked processes share what the readers import."""
    for valid in target.seeds():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
            write_files(valid.files, Path(folder))
            for reader in target.readers.values():
                with suppress(ModelExportError):
                    reader(Path(folder), Path(out))
    gc.collect()
    gc.freeze()


def search_by_name(name: str, cases: int, start: int) -> Outcome:
    """Run `search` on a target by its name, with progress on stderr."""

    def report(outcome: Outcome) -> None:
        if not outcome.cases % _PROGRESS:
            flaws = "; ".join(flaw.name for flaw in outcome.flaws) or "no flaw"
            print(f"{name}: {outcome.cases} of {cases}, {flaws}", file=sys.stderr, flush=True)

    return search(TARGETS[name], cases, start, report)


class _Search:
    """Run cases that were not run before, until one has a new flaw."""

    def __init__(
        self, target: Target, work: Path, on_progress: Callable[[Outcome], object]
    ) -> None:
        self.outcome = Outcome(target.name)
        self._target = target
        self._cases = target.cases()
        self._work = work
        self._on_progress = on_progress
        self._seen: set[bytes] = set()
        self._error: FlawError | None = None
        self._shrinks = 0

    def find_flaw(self, cases: int, start: int) -> FlawError | None:
        """Return the first flaw, with a case that is as small as possible."""
        self._error, self._shrinks = None, 0
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
        def run(files: Files) -> None:
            self._run_case(files) if self._error is None else self._run_smaller(files)

        with suppress(FlawError, Flaky):
            run()
        return self._error

    def _run_case(self, files: Files) -> None:
        digest = hashlib.sha256(msgspec.msgpack.encode(files)).digest()
        if digest in self._seen or sum(map(len, files.values())) > LARGEST:
            reject()
        self._seen.add(digest)
        verdict, outcome = self._judge(files), self.outcome
        outcome.cases += 1
        outcome.accepted += bool(verdict.accepted)
        outcome.slowest = max(outcome.slowest, verdict.seconds)
        outcome.grown = max(outcome.grown, verdict.grown)
        self._on_progress(outcome)
        self._raise_new(verdict, files)

    def _run_smaller(self, files: Files) -> None:
        """Run a smaller case; after too many attempts, treat it as one without a flaw."""
        self._shrinks += 1
        if self._shrinks <= _SHRINKS:
            self._raise_new(self._judge(files), files)

    def _judge(self, files: Files) -> Verdict:
        with tempfile.TemporaryDirectory(dir=self._work) as folder:
            write_files(files, Path(folder))
            return judge(self._target.readers, Path(folder), self._target.limits)

    def _raise_new(self, verdict: Verdict, files: Files) -> None:
        flaw = verdict.flaw
        if flaw is None or any(flaw.name == known.name for known in self.outcome.flaws):
            return
        error = _error_class(flaw.name)(flaw, files)
        if self._error is None or error.size <= self._error.size:
            self._error = error
        raise error
