"""Print text, tables, JSON and CSV, and show progress: what all commands share."""

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
from typing import TYPE_CHECKING, Any

import click

from modelexport.errors import ArgumentError, ModelExportError, with_hint

if TYPE_CHECKING:  # rich and the file readers are imported where they are used: --help needs none
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.status import Status

    from modelexport.tagged.records import TensorInfo

_WIDTH_WHEN_PIPED = 80
_LEAST_NAME = 12
"""The columns that a name has at least, however narrow the terminal is."""
_TREE_LINES = "│├└─ "
COMPLETE = "--output-format json"
"""The option that gives what a screen leaves out."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BEYOND_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Those control characters that JSON does not escape by itself."""
_FORMULA = ("=", "+", "-", "@")


def output_file_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--output-file` to a command."""
    help_text = "Write to this file instead of stdout."
    return click.option("--output-file", type=click.Path(path_type=Path), help=help_text)(command)


def inputs_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--inputs` to a command that runs a file."""
    help_text = "An .npz with an array for each input; inputs like the recorded ones without it."
    kind = click.Path(path_type=Path)
    return click.option("--inputs", type=kind, metavar="FILE", help=help_text)(command)


def output_format_option(
    *formats: str, help_text: str = "json is complete."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--output-format` to a command; the first format is the default."""
    choice = click.Choice(formats)
    return click.option(
        "--output-format", type=choice, default=formats[0], show_default=True, help=help_text
    )


def note(text: str) -> None:
    """Print lines to stderr, with control characters escaped."""
    click.echo("\n".join(map(escape_control, text.split("\n"))), err=True)


def escape_control(text: str) -> str:
    """Escape control characters, so that a name in a file cannot steer a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class Progress:
    """The progress of a command: a spinner with its step on a terminal, plain lines elsewhere.

    Calling it names the next step, so that it can be passed as `on_step`.
    """

    def __init__(self, task: str | None = None, status: Status | None = None) -> None:
        self._status = status
        self._task = task

    def __call__(self, step: str) -> None:
        """Name the step that begins."""
        if self._status is None:
            note(f"{step} ...")
        else:
            self.update(f"{step} ...")

    def fraction(self, done: float) -> None:
        """Show how much of the task is done, from 0 to 1; only a terminal shows it."""
        self.update(f"{self._task} ... {int(done * 100)} %")

    def update(self, text: str) -> None:
        """Replace the text beside the spinner; only a terminal shows it."""
        if self._status is not None:
            self._status.update(_plain(text))

    def print(self, text: str, hint: str | None = None) -> None:
        """Print a line that stays; on a terminal without the hint, since a summary follows."""
        if self._status is None:
            note(escape_control(with_hint(text, hint)))
        else:
            self._status.console.print(_plain(text), soft_wrap=True)


def _plain(text: str) -> RenderableType:
    """Make text that rich prints as it is, without looking for markup."""
    from rich.text import Text

    return Text(escape_control(text))


@contextmanager
def progress(task: str | None = None, verbose: bool = False) -> Iterator[Progress]:
    """Show progress on stderr for the time of the block.

    The task is shown on a terminal only, steps anywhere. With `verbose` a terminal also gets plain
    lines, which go among what torch prints.
    """
    if verbose or not sys.stderr.isatty():
        yield Progress(task)
        return
    from rich.console import Console

    # The console keeps this stderr, also while sys.stderr is redirected to hide what torch prints.
    screen = Console(file=sys.stderr, highlight=False)
    with screen.status(_plain(f"{task or 'start'} ...")) as status:
        yield Progress(task, status)


def show(parts: Iterable[RenderableType], output_file: Path | None = None) -> None:
    """Print parts one below the other.

    What is piped or written is plain text of 80 columns, or as many as the variable COLUMNS says.
    """
    from rich.console import Console

    text = io.StringIO()
    on_screen = output_file is None and sys.stdout.isatty()
    console = Console(
        file=None if on_screen else text,
        width=None if on_screen or "COLUMNS" in os.environ else _WIDTH_WHEN_PIPED,
        color_system="auto" if on_screen else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part, crop=False)  # a word longer than a line is kept
    if not on_screen:
        plain = re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE)
        emit(plain.encode("utf-8", "backslashreplace"), output_file)


def emit(data: bytes, output_file: Path | None = None) -> None:
    """Write data to stdout, or to a file with a note that says so."""
    if output_file is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    from modelexport.onnx_file.atomic_write import check_output_path, write_file

    target = check_output_path(output_file, suffix="").resolve()
    write_file(target, data)
    if target.is_file():
        note(f"wrote {output_file}")


def mute_stdout() -> None:
    """Discard what is still written to stdout, after its reader closed it.

    Otherwise the flush at exit would fail again.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_json(record: object, output_file: Path | None = None, *, indent: int = 2) -> None:
    """Write a record as JSON, with control characters escaped; indent -1 gives one line."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(record), indent=indent).decode()
    safe = _BEYOND_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    emit(safe.encode() + b"\n", output_file)


def emit_csv(
    columns: Sequence[str], rows: Iterable[Mapping[str, object]], output_file: Path | None = None
) -> None:
    """Write rows as CSV, with control characters escaped and no formulas for a spreadsheet."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: _cell(value) if isinstance(value, str) else value for name, value in row.items()}
        )
    emit(text.getvalue().encode(), output_file)


def _cell(text: str) -> str:
    """Escape a cell; a leading quote keeps a spreadsheet from evaluating it."""
    shown = escape_control(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def check_output(output_file: Path | None, *inputs: Path | None) -> None:
    """Check that an output can be written and overwrites no input, sidecar or data file.

    Args:
        output_file: The output.
        inputs: What the command reads, and models that it writes; of a folder, its samples.
    """
    if output_file is None:
        return
    from modelexport.onnx_file.atomic_write import check_output_path
    from modelexport.tagged.model import load
    from modelexport.tagged.records import sidecar_path

    hint = "choose another output file"
    check_output_path(output_file, suffix="")
    if output_file.suffix == ".onnx":
        raise ArgumentError(f"{output_file} has the name of a model", hint=hint)
    for path in filter(None, inputs):
        own = [path, *path.glob("*.npz")]
        if path.suffix == ".onnx":
            own += [sidecar_path(path), path.with_name(f"{path.name}.data")]
            if output_file.exists():
                with suppress(ModelExportError):
                    own += [path.parent / name for name in load(path).data_files]
        if output_file.resolve() in (each.resolve() for each in own):
            raise ArgumentError(
                f"{output_file} would overwrite a file that the command reads or writes", hint=hint
            )


def plain_table(titles: dict[str, bool], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Build a table without rules, its columns two spaces apart.

    The titles say which columns hold numbers. Where the terminal is too narrow, the cells of the
    first text column are cut in the middle. Empty columns are left out.
    """
    return _PlainTable(titles, [[escape_control(cell) for cell in row] for row in rows])


class _PlainTable:
    """A table that takes the width of the console into account when it is printed."""

    def __init__(self, titles: dict[str, bool], rows: list[list[str]]) -> None:
        self._columns = [
            ([title, *(row[index] for row in rows)], is_number)
            for index, (title, is_number) in enumerate(titles.items())
            if any(row[index] for row in rows)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        cells = [column for column, _ in self._columns]
        numbers = [is_number for _, is_number in self._columns]
        widths = [max(map(cell_len, column)) for column in cells]
        if False in numbers:
            shrinking = numbers.index(False)
            others = sum(widths) - widths[shrinking] + 2 * (len(widths) - 1)
            most = max(options.max_width - others, cell_len(cells[shrinking][0]), _LEAST_NAME)
            cells[shrinking] = [cut_in_the_middle(cell, most) for cell in cells[shrinking]]
            widths[shrinking] = max(map(cell_len, cells[shrinking]))
        for number, row in enumerate(zip(*cells, strict=True)):
            padded = [
                cell.rjust(width) if is_number else set_cell_size(cell, width)
                for cell, width, is_number in zip(row, widths, numbers, strict=True)
            ]
            style = "" if number else "bold"
            yield Text("  ".join(padded).rstrip(), style, no_wrap=True, overflow="ellipsis")


def cut_in_the_middle(text: str, width: int) -> str:
    """Cut the middle out of a name that is too wide; its end often differs from its siblings'.

    The lines that a tree draws before the name stay.
    """
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    name = text.lstrip(_TREE_LINES)
    lines = text.removesuffix(name)
    room = max(width - len(lines) - 1, 2)
    head = set_cell_size(name, room // 3)
    tail = set_cell_size(name[::-1], room - room // 3)[::-1]
    return f"{lines}{head}…{tail}"


def line(text: str, indent: int = 0) -> RenderableType:
    """Build a paragraph that wraps at words, its further lines indented by four more columns."""
    return _Paragraph(escape_control(text), " " * indent)


class _Paragraph:
    """Text that rich wraps to the width of the console."""

    def __init__(self, text: str, indent: str) -> None:
        self._text = text
        self._indent = indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = textwrap.wrap(
            self._text,
            options.max_width,
            initial_indent=self._indent,
            subsequent_indent=f"{self._indent}    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        yield Text("\n".join(lines), no_wrap=True, overflow="ignore")


def format_size(count: int) -> str:
    """Format a number of bytes, as in `1.5 MiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def format_count(value: int | None) -> str:
    """Format a count in thousands, millions or billions, as in `4.39M`; nothing for none."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if value and value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value) if value else ""


def join_names(names: Iterable[str], most: int | None = None) -> str:
    """Join names with commas, as in `a, b, and 3 more`; the empty name is the root."""
    names = list(names)
    more = "" if most is None or len(names) <= most else f", and {len(names) - most} more"
    # protobuf returns bytes for a name that is not UTF-8
    return ", ".join(str(name) or "(root)" for name in names[:most]) + more


def join_counts(counts: Mapping[str, int], most: int | None = None) -> str:
    """Join names with their counts, as in `Add 3, MatMul 2`; `most` is as for names."""
    return join_names((f"{name} {count:,}" for name, count in counts.items()), most)


def describe_tensor(tensor: TensorInfo) -> str:
    """Describe a tensor by its name, type and shape, as in `x float[2,?]`."""
    shape = ",".join("?" if dim is None else str(dim) for dim in tensor.shape)
    return f"{tensor.name} {tensor.dtype}[{shape}]"
