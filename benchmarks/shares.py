"""Say where the time goes, by a profile of one more run."""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.table import Row

_MOST = 5
_SOURCE = "modelexport"


def profile_row(what: str, work: Callable[[], object]) -> Row:
    """Profile one call, and return a row with the share of each file in its time.

    What a file calls in C, such as the parser of protobuf, counts for the file.
    """
    profile = cProfile.Profile()
    profile.runcall(work)
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file != "~":
            seconds[_place(file)] += own
        else:
            for (caller, _, _), (_, _, part, _) in callers.items():
                seconds[_place(caller)] += part
    return _row(what, seconds, "share of each file in a profile of one run")


def import_row(what: str, arguments: tuple[str, ...]) -> Row:
    """Return a row with the share of each package in the imports of a command."""
    command = [sys.executable, "-X", "importtime", *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    microseconds: Counter[str] = Counter()
    for line in printed.splitlines():
        _, _, columns = line.partition("import time:")
        own, *_, name = columns.split("|") if "|" in columns else ("", "")
        if own.strip().isdecimal():
            package = name.strip().partition(".")[0].lstrip("_")
            standard = {package, f"_{package}"} & sys.stdlib_module_names
            microseconds["standard library" if standard else package] += int(own)
    return _row(what, microseconds, "share of each package in the imports")


def _row(what: str, parts: Mapping[str, float], meaning: str) -> Row:
    total = sum(parts.values())
    largest = Counter(parts).most_common(_MOST)
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in largest)
    return Row(f"{what}: where the time goes", "", shares, meaning)


def _place(file: str) -> str:
    """Return a file of the source by its room and name, another by its package."""
    parts = Path(file).parts
    if _SOURCE in parts and "site-packages" not in parts:
        return "/".join(parts[len(parts) - parts[::-1].index(_SOURCE) :]).removesuffix(".py")
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return "standard library"
