"""Measure the page: writing it, its size, and in a browser the first picture, opening, and panning.

The times in the browser need Chromium; without it, only the rest is measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from benchmarks.generated import write_graph
from benchmarks.reading import measure_seconds
from benchmarks.table import Row, format_size, growth_row, judge, ratio_row
from modelexport.viewing.page import view

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from viewing.browser import PICTURE, Browser, missing

SIZES = (10_000, 100_000)
ROUNDS = 5
VISIBLE = 70
"""The number of chains side by side, and of operators in each, that are all in view."""
AIM_SIZE, AIM_FIRST, AIM_OPEN, AIM_FRAME, AIM_GROWTH = 3_000_000, 2000.0, 300.0, 33.0, 12.0
_PICTURE = PICTURE.format(pane=0)
_OPEN = f"""(async () => {{
  const p = {_PICTURE};
  const box = p.model.boxesOfModule(p.model.moduleIndex.get("encoder.12"))[0];
  const start = performance.now();
  p.reveal(box); p.setOpen(box, true); p.drawNow();
  return performance.now() - start;
}})()"""
_PAN = f"""(() => {{
  const p = {_PICTURE};
  p.fit(true);
  p.drawNow();
  const times = [];
  for (let i = 0; i < 30; i++) {{
    const start = performance.now();
    p.view.x += 2; p.view.y += 1;
    p.drawNow();
    p.canvas.getContext("2d").getImageData(0, 0, 1, 1);
    times.push(performance.now() - start);
  }}
  return [p.drawnCount, times];
}})()"""


def rows() -> Iterator[Row]:
    """Measure, and yield the rows of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times: dict[int, float] = {}
        for nodes in SIZES:
            path = folder / f"m{nodes}.onnx"
            write_graph(path, nodes)
            pairs = [
                (measure_seconds(onnx.load, path), measure_seconds(view, path))
                for _ in range(ROUNDS)
            ]
            loads, ours = zip(*pairs, strict=True)
            times[nodes] = min(ours)
            yield ratio_row(f"view, {nodes:,} nodes", "onnx.load", loads, ours)
        yield growth_row("view", "nodes", times, AIM_GROWTH)
        page = folder / f"m{SIZES[-1]}.html"
        size = page.stat().st_size
        yield Row(
            f"size of the page, {SIZES[-1]:,} nodes",
            "",
            format_size(size),
            judge(size, AIM_SIZE, format_size),
        )
        if missing() is None:
            yield from _in_browser(folder, page)


def _in_browser(folder: Path, page: Path) -> Iterator[Row]:
    many = view(write_chains(folder / "chains.onnx")).path
    with Browser() as browser:
        first, opening = [], []
        for _ in range(ROUNDS):
            first.append(browser.open(page, "#open="))
            opening.append(browser.evaluate(_OPEN))
        what = f"the page of {SIZES[-1]:,} nodes, in Chromium"
        yield _time_row(f"{what}: first picture", min(first), AIM_FIRST)
        yield _time_row(f"{what}: open a module", min(opening), AIM_OPEN)
        browser.open(many)
        count, frames = browser.evaluate(_PAN)
        yield _time_row(
            f"a frame with {count:,} boxes in view", statistics.median(frames), AIM_FRAME
        )


def _time_row(what: str, milliseconds: float, aim: float) -> Row:
    return Row(what, "", f"{milliseconds:.0f} ms", judge(milliseconds, aim, "{:g} ms".format))


def write_chains(path: Path) -> Path:
    """Write a file without tags, with many chains of operators side by side."""
    nodes = [
        helper.make_node("Relu", [f"v{chain}_{step}"], [f"v{chain}_{step + 1}"])
        for chain in range(VISIBLE)
        for step in range(VISIBLE)
    ]
    ends = [
        [
            helper.make_tensor_value_info(f"v{chain}_{step}", TensorProto.FLOAT, [1])
            for chain in range(VISIBLE)
        ]
        for step in (0, VISIBLE)
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", *ends)), path)
    return path
