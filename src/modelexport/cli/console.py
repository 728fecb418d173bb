"""Text for people and data for programs: tables, trees, JSON, CSV, progress."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from modelexport.errors import ArgumentError, ModelExportError
from modelexport.onnx_file.atomic_write import check_output_path, write_file
from modelexport.onnx_file.model_file import external_files
from modelexport.tagged.model import load
from modelexport.tagged.records import TensorInfo, sidecar_path

WIDTH_WHEN_PIPED = 80
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

_BEYOND_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Of those, the characters that JSON does not escape by itself."""
_FORMULA = ("=", "+", "-", "@")


def note(text: str) -> None:
    click.echo("\n".join(map(visible, text.split("\n"))), err=True)


def visible(text: str) -> str:
    """A name as it can be shown: control characters as their codes, so that no file can steer a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


@contextmanager
def progress(verbose: bool) -> Iterator[Callable[[str], None]]:
    """A spinner that names the running step; plain lines where stderr is no terminal."""
    screen = Console(
        file=sys.stderr, highlight=False
    )  # this one, also while torch's own words go elsewhere
    if verbose or not screen.is_terminal:
        yield lambda step: note(f"{step} ...")
        return
    with screen.status("start") as status:
        yield lambda step: status.update(f"{step} ...")


@contextmanager
def waiting(what: str) -> Iterator[Callable[[float], None]]:
    """A line while something may take seconds, gone afterwards; nothing where stderr is no terminal.

    It gives a function to tell how much is done, from 0 to 1.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    click.echo(f"{visible(what)} ...", err=True, nl=False)
    shown = 0

    def tell(done: float) -> None:
        nonlocal shown
        if int(done * 100) > shown:
            shown = int(done * 100)
            click.echo(f"\r{visible(what)} ... {shown} %", err=True, nl=False)

    try:
        yield tell
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)


def show(parts: Iterable[RenderableType], output_file: Path | None = None) -> None:
    """Print parts one below the other; what is piped or written is plain text of 80 columns."""
    if output_file is None and sys.stdout.isatty():
        screen = Console(highlight=False)
        for part in parts:
            screen.print(part)
        return
    text = io.StringIO()
    page = Console(file=text, highlight=False, width=WIDTH_WHEN_PIPED, color_system=None)
    for part in parts:
        page.print(part)
    emit(
        re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE).encode("utf-8", "backslashreplace"),
        output_file,
    )


def emit(data: bytes, output_file: Path | None = None) -> None:
    """Data for programs: to stdout, or to a file."""
    if output_file is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    else:
        write(data, output_file)


def mute_stdout() -> None:
    """Whoever read it is gone: what is left to write must not fail again, not even at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(record: object, output_file: Path | None = None) -> None:
    """A record as JSON; what could steer a terminal is escaped in it, which is the same to whoever reads JSON."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    emit(_json_safe(text).encode() + b"\n", output_file)


def emit_json_line(record: object) -> None:
    """The same in one line."""
    emit(_json_safe(msgspec.json.encode(record).decode()).encode() + b"\n")


def _json_safe(text: str) -> str:
    return _BEYOND_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def emit_csv(
    columns: Sequence[str], rows: Iterable[Mapping[str, object]], output_file: Path | None = None
) -> None:
    """Rows as CSV; no cell can steer a terminal, or be a formula to a spreadsheet."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: _cell(value) if isinstance(value, str) else value for name, value in row.items()}
        )
    emit(text.getvalue().encode(), output_file)


def _cell(text: str) -> str:
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def write(data: bytes, path: Path) -> None:
    """Write a file and say so, if it is one."""
    target = check_output_path(path, suffix="").resolve()
    write_file(target, data)
    if target.is_file():
        note(f"wrote {path}")


def check_output(output_file: Path | None, *inputs: Path) -> None:
    """Refuse to write over what is read: a model, its sidecar, or any other part of it."""
    if output_file is None:
        return
    check_output_path(output_file, suffix="")
    for path in inputs:
        own = {path.resolve(), sidecar_path(path).resolve()}
        if output_file.exists() and path.suffix == ".onnx":
            with suppress(ModelExportError):
                own |= {(path.parent / name).resolve() for name in external_files(load(path).proto)}
        if output_file.resolve() in own or output_file.suffix == ".onnx":
            raise ArgumentError(
                f"{output_file} is a model or a part of one", hint="choose another output file"
            )


def plain_table(titles: dict[str, bool], rows: Iterable[Sequence[str]]) -> Table:
    """Columns without lines, two spaces apart; `titles` tells which hold numbers.

    Where the screen is too narrow, the first column that holds text is cut. A column without content is left out.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    kept = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    shrinks = next((place for place in kept if not list(titles.values())[place]), None)
    for place, (title, is_number) in enumerate(titles.items()):
        if place in kept:
            widest = max(len(title), *(len(row[place]) for row in rows))
            table.add_column(
                title,
                justify="right" if is_number else "left",
                no_wrap=place
                != shrinks,  # what may be wrapped is made narrower first; its text is cut instead
                overflow="ellipsis",
                min_width=None if place == shrinks else widest,
            )
    for row in rows:
        table.add_row(*(Text(row[place], no_wrap=True, overflow="ellipsis") for place in kept))
    return table


def line(text: str, indent: int = 0) -> RenderableType:
    """A paragraph that is wrapped at words, its further lines indented a little more than its first."""
    return _Paragraph(visible(text), " " * indent)


class _Paragraph:
    def __init__(self, text: str, indent: str) -> None:
        self._text = text
        self._indent = indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = textwrap.wrap(
            self._text,
            options.max_width,
            initial_indent=self._indent,
            subsequent_indent=f"{self._indent}    ",
            break_on_hyphens=False,
        )
        yield Text("\n".join(lines), no_wrap=True, overflow="ignore")


def size(count: int) -> str:
    """Bytes for people."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def listed(names: Iterable[str], most: int | None = None) -> str:
    """Names in one line, the first ones if there are many."""
    names = list(names)
    more = "" if most is None or len(names) <= most else f", and {len(names) - most} more"
    told = [
        str(name) or "(root)" for name in names[:most]
    ]  # protobuf gives bytes for a name that is not UTF-8
    return ", ".join(told) + more


def counted(counts: dict[str, int], most: int | None = None) -> str:
    """Names with their counts, in one line."""
    return listed((f"{name} {count:,}" for name, count in counts.items()), most)


def tensor(info: TensorInfo) -> str:
    """A tensor's name, type and shape."""
    return f"{info.name} {info.dtype}[{','.join('?' if dim is None else str(dim) for dim in info.shape)}]"
