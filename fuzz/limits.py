"""Run readers in a child process, so that a crash, a hang or a lack of memory is a result."""

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
from typing import BinaryIO, NamedTuple, NoReturn, Protocol

import msgspec

from modelexport.errors import ModelExportError

_ROOT = Path(__file__).parents[1]
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class Reader(Protocol):
    """Read the files of a folder, and write only to `out`."""

    def __call__(self, folder: Path, out: Path) -> object: ...


class Limits(NamedTuple):
    """What one case may use; the system refuses memory beyond `address_space`."""

    seconds: float = 10
    memory: int = 256 << 20
    address_space: int = 4 << 30


class Flaw(NamedTuple):
    """A failure that is no error of modelexport.

    `name` is the same for all cases that fail in the same way; `detail` is a traceback.
    """

    name: str
    detail: str


class Verdict(NamedTuple):
    """The result of one case; `accepted` counts the readers that raised no error."""

    flaw: Flaw | None
    accepted: int
    seconds: float
    grown: int


class _Message(msgspec.Struct, omit_defaults=True):
    """One line that the child process sends."""

    reader: str
    accepted: bool = False
    flaw: str = ""
    detail: str = ""


def judge(readers: Mapping[str, Reader], folder: Path, limits: Limits) -> Verdict:
    """Run all readers on the files of a folder, one after the other."""
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
            messages = [msgspec.json.decode(line, type=_Message) for line in pipe]
        _, status, usage = os.wait4(child, 0)
        seconds = time.monotonic() - start
        fault.seek(0)
        grown = max(usage.ru_maxrss * 1024 - before, 0)
        flaw = _find_flaw(
            messages, os.waitstatus_to_exitcode(status), fault.read().decode(), grown, limits
        )
    return Verdict(flaw, sum(line.accepted for line in messages), seconds, grown)


def _find_flaw(
    messages: list[_Message], status: int, fault: str, grown: int, limits: Limits
) -> Flaw | None:
    last = messages[-1] if messages else _Message("start")
    if last.flaw:
        return Flaw(f"{last.reader}: {last.flaw}", last.detail)
    if fault.startswith("Timeout"):
        return Flaw(f"{last.reader}: took more than {limits.seconds:g} s", fault)
    if status:
        frame = next(_FRAME.finditer(fault), None)
        location = "unknown location" if frame is None else _location(*frame.groups())
        return Flaw(f"{last.reader}: died with status {status}, {location}", fault)
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
) -> NoReturn:
    """Child process: run the readers within the limits, send a message for each, and exit."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
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
            _send(pipe, _Message(name))
            message = _try_reader(name, reader, folder, out)
            _send(pipe, message)
            if message.flaw:
                break
        status = 0
    finally:
        os._exit(status)


def _try_reader(name: str, reader: Reader, folder: Path, out: Path) -> _Message:
    try:
        reader(folder, out)
    except ModelExportError:
        return _Message(name)
    except BaseException as error:
        with suppress(MemoryError):
            flaw = f"{type(error).__name__} in {_innermost_location(error.__traceback__)}"
            return _Message(name, False, flaw, _format_error(error))
        return _Message(name, False, "MemoryError", "")
    return _Message(name, accepted=True)


def _format_error(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-30))
    return text.encode("utf-8", "backslashreplace").decode()[-20_000:]


def _innermost_location(trace: TracebackType | None) -> str:
    """Return the innermost location in the code of modelexport, if there is one."""
    frames = [
        (f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(trace)
    ]
    ours = [frame for frame in frames if "modelexport" in frame[0]] or frames
    return _location(*ours[-1])


def _location(file: str, line: int | str, function: str) -> str:
    path = Path(file)
    name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{name}:{line} {function}"


def _send(pipe: int, message: _Message) -> None:
    line = memoryview(msgspec.json.encode(message) + b"\n")
    while line:
        line = line[os.write(pipe, line) :]
