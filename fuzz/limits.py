"""Runs readers in a process of their own, so that a crash, a hang or a flood of memory is an answer like any other."""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from modelexport.errors import ModelExportError

_ROOT = Path(__file__).parents[1]
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Reader(Protocol):
    """Reads what lies in a folder, and writes only into the other one."""

    def __call__(self, folder: Path, out: Path) -> object: ...


class Limits(NamedTuple):
    """What one case may take. `address_space` is where the system refuses more, so that the machine lives on."""

    seconds: float = 10
    memory: int = 256 << 20
    address_space: int = 4 << 30


class Flaw(NamedTuple):
    """What must not happen. `name` is the same for all cases that fail alike, `detail` is a traceback."""

    name: str
    detail: str


class Verdict(NamedTuple):
    """What became of one case; `accepted` counts the readers that refused nothing."""

    flaw: Flaw | None
    accepted: int
    seconds: float
    grown: int


class _Told(msgspec.Struct, omit_defaults=True):
    """One line of what the process tells while it runs."""

    reader: str
    accepted: bool = False
    flaw: str = ""
    detail: str = ""


def judged(readers: Mapping[str, Reader], folder: Path, limits: Limits) -> Verdict:
    """All readers, one after the other, on the files of a folder."""
    with tempfile.TemporaryFile() as fault, tempfile.TemporaryDirectory() as out:
        reading, writing = os.pipe()
        sys.stdout.flush()
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run(readers, folder, Path(out), limits, writing, fault)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            before = int.from_bytes(pipe.read(8), "little")
            told = [msgspec.json.decode(line, type=_Told) for line in pipe]
        _, status, usage = os.wait4(child, 0)
        seconds = time.monotonic() - start
        fault.seek(0)
        grown = max(usage.ru_maxrss * 1024 - before, 0)
        flaw = _flaw(told, os.waitstatus_to_exitcode(status), fault.read().decode(), grown, limits)
    return Verdict(flaw, sum(line.accepted for line in told), seconds, grown)


def _flaw(told: list[_Told], status: int, fault: str, grown: int, limits: Limits) -> Flaw | None:
    last = told[-1] if told else _Told("start")
    if last.flaw:
        return Flaw(f"{last.reader}: {last.flaw}", last.detail)
    if fault.startswith("Timeout"):
        return Flaw(f"{last.reader}: took more than {limits.seconds:g} s", fault)
    if status:
        place = next(
            (_place(*found.groups()) for found in _FRAME.finditer(fault)), "no place known"
        )
        return Flaw(f"{last.reader}: died with status {status}, {place}", fault)
    if grown > limits.memory:
        return Flaw(f"took more than {limits.memory >> 20} MiB", f"{grown >> 20} MiB")
    return None


def _run(
    readers: Mapping[str, Reader],
    folder: Path,
    out: Path,
    limits: Limits,
    pipe: int,
    fault: BinaryIO,
) -> None:  # never returns
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.address_space
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(fault)
        faulthandler.dump_traceback_later(limits.seconds, exit=True, file=fault)
        os.write(
            pipe, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024).to_bytes(8, "little")
        )
        for name, reader in readers.items():
            _tell(pipe, _Told(name))
            told = _tried(name, reader, folder, out)
            _tell(pipe, told)
            if told.flaw:
                break
        status = 0
    finally:
        os._exit(status)


def _tried(name: str, reader: Reader, folder: Path, out: Path) -> _Told:
    try:
        reader(folder, out)
    except ModelExportError:
        return _Told(name)
    except BaseException as error:
        with suppress(MemoryError):
            return _Told(
                name,
                False,
                f"{type(error).__name__} in {_innermost(error.__traceback__)}",
                _lines(error),
            )
        return _Told(name, False, "MemoryError", "")
    return _Told(name, accepted=True)


def _lines(error: BaseException) -> str:
    return (
        "".join(traceback.format_exception(error, limit=-30))
        .encode("utf-8", "backslashreplace")
        .decode()[-20_000:]
    )


def _innermost(found: TracebackType | None) -> str:
    """The last place in our own code that an error came from."""
    frames = [
        (f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(found)
    ]
    ours = [frame for frame in frames if "modelexport" in frame[0]] or frames
    return _place(*ours[-1])


def _place(file: str, line: int | str, function: str) -> str:
    path = Path(file)
    return (
        f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name}:{line} {function}"
    )


def _tell(pipe: int, told: _Told) -> None:
    line = memoryview(msgspec.json.encode(told) + b"\n")
    while line:
        line = line[os.write(pipe, line) :]
