"""Draw the picture of architecture.md: the path of one export, and what reads the file.

python docs/make_drawing.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

from generated import DOCS, write

WIDTH, HEIGHT = 960, 660
WRITE = (
    ("source", "load the model, make example inputs"),
    ("request", "check the arguments and the outputs"),
    ("capture", "torch writes the baseline, hooks record the calls"),
    ("attribution", "find the module of each node by evidence"),
    ("tagged", "the map: tags, module records, tables"),
    ("staged_export", "add the map to the bytes, write all or nothing"),
)
"""The rooms of an export, in the order of its steps."""
READ = (
    ("analysis", "analyze, validate, compare"),
    ("extraction", "extract, partition"),
    ("verification", "verify"),
    ("profiling", "profile"),
    ("retagging", "retag"),
    ("quantization", "select, quantize"),
    ("viewing", "view, functions"),
    ("model_explorer", "an extension"),
    ("graphml", "export-graphml, import-onnx"),
    ("generation", "generate"),
)
"""The rooms that read a tagged file, and their commands."""
CALLERS = ("cli", "batch", "source_export", "pipeline", "report")
SHARED = (
    *("errors", "options", "option_values", "keywords", "exporters"),
    *("modules", "graph", "onnx_file", "packages"),
)
TORCH = {"source", "capture", "staged_export", "pipeline", "generation", "verification"}
"""The rooms with files that import torch."""
STYLE = """\
text { font: 14px system-ui, sans-serif; fill: #1b2430; }
.name { font-weight: 600; }
.small { font-size: 12px; fill: #536070; }
.head { font-size: 15px; font-weight: 600; fill: #2459a8; }
.room { fill: #f2f6fc; stroke: #8fa9cc; }
.torch { fill: #fdf1e7; stroke: #d98b4a; }
.file { fill: #eef6ea; stroke: #83a873; }
.strip { fill: #f7f7f8; stroke: #c9ced6; }
path { fill: none; stroke: #536070; stroke-width: 1.5; }"""


class Box(NamedTuple):
    """A rectangle of the drawing."""

    x: int
    y: int
    width: int
    height: int

    def draw(self, kind: str) -> str:
        """Return the element of the box."""
        sizes = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        return f'<rect class="{kind}" {sizes} rx="6"/>'


def pages() -> dict[Path, str]:
    """Return the drawing."""
    return {DOCS / "images" / "architecture.svg": _drawing()}


def _drawing() -> str:
    parts = [
        *_strip(14, "Run the steps, and report:", CALLERS),
        *_write_rail(),
        *_read_rail(),
        *_strip(HEIGHT - 94, "Shared by all:", SHARED),
        *_legend(HEIGHT - 18),
    ]
    label = "The path of one export, and the rooms that read its file"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
            f' aria-label="{label}">',
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _write_rail() -> list[str]:
    """Draw the steps of an export from top to bottom, and the files that it writes."""
    parts = [_text(30, 104, "Write: the path of one export", "head")]
    top, step = 118, 62
    for number, (room, purpose) in enumerate(WRITE):
        box = Box(30, top + number * step, 420, 46)
        parts += [box.draw(_kind(room)), _text(44, box.y + 19, f"{number + 1}. {room}", "name")]
        parts += [_text(44, box.y + 37, purpose, "small"), _arrow(240, box.y + 46, 240, box.y + 61)]
    files = Box(30, top + len(WRITE) * step, 420, 40)
    names = "m.onnx, m.onnx.data, m_hierarchy.json"
    return [*parts, files.draw("file"), _text(44, files.y + 25, names, "name")]


def _read_rail() -> list[str]:
    """Draw the rooms that read the files, from bottom to top."""
    bottom = 118 + len(WRITE) * 62
    load = Box(510, bottom - 10, 420, 50)
    parts = [
        _text(510, 104, "Read: what works by module", "head"),
        load.draw(_kind("tagged")),
        _text(524, load.y + 20, "tagged", "name"),
        _text(524, load.y + 39, "load the file and its map, without initializer data", "small"),
        _arrow(450, bottom + 20, 508, bottom + 20),
    ]
    frame = Box(500, 112, 440, bottom - 160)
    parts += [frame.draw("strip"), _arrow(720, load.y, 720, frame.y + frame.height + 1)]
    step = (frame.height - 2) // ((len(READ) + 1) // 2)
    for number, (room, commands) in enumerate(READ):
        column, row = number % 2, number // 2
        width = 420 if number == len(READ) - 1 and not column else 202
        box = Box(510 + column * 218, 122 + row * step, width, 46)
        parts += [box.draw(_kind(room)), _text(box.x + 14, box.y + 19, room, "name")]
        parts.append(_text(box.x + 14, box.y + 37, commands, "small"))
    return parts


def _strip(top: int, title: str, rooms: tuple[str, ...]) -> list[str]:
    """Draw rooms that belong to no step, side by side."""
    strip = Box(30, top, 900, 60)
    parts = [strip.draw("strip"), _text(44, top + 20, title, "small")]
    width = (strip.width - 14) // len(rooms)
    for number, room in enumerate(rooms):
        box = Box(strip.x + 10 + number * width, top + 28, width - 6, 24)
        parts += [box.draw(_kind(room)), _text(box.x + 8, box.y + 17, room, "small")]
    return parts


def _legend(y: int) -> list[str]:
    box = Box(30, y - 11, 14, 14)
    return [
        box.draw("torch"),
        _text(52, y, "has files that import torch; all others do not", "small"),
    ]


def _kind(room: str) -> str:
    return "torch" if room in TORCH else "room"


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<path d="M{x} {y}L{to_x} {to_y}" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    write(pages())
