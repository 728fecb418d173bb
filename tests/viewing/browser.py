"""A real browser for tests of the page: Chromium, driven by playwright-core through Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

VIEWER = Path(__file__).parents[2] / "viewer"
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
PICTURE = "modelexportPage.inspect().panes[{pane}].picture"
PANE = "modelexportPage.inspect().panes[0]"
ALL = "header button:text-is('all')"
"""The button that opens all modules."""


def missing() -> str | None:
    """Say what a browser test needs and this machine does not have; None if all is there."""
    if shutil.which("node") is None:
        return "no Node.js: the page is not tested in a browser"
    if not (VIEWER / "node_modules" / "playwright-core").exists():
        return "no playwright-core (npm ci in viewer): the page is not tested in a browser"
    if chromium() is None:
        return "no Chromium: the page is not tested in a browser"
    return None


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One browser; `open` shows a page in a new context."""

    def __init__(self) -> None:
        command = ["node", str(VIEWER / "test" / "driver.mjs"), str(chromium())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def _send(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def open(self, page: Path, fragment: str = "", **options: Any) -> int:
        """Open a page and wait until it is drawn; return the milliseconds that this took."""
        return self._send("open", url=page.resolve().as_uri() + fragment, **options)

    def problems(self) -> list[str]:
        """Return messages on the console, errors, dialogs and requests other than for the page."""
        return self._send("problems")

    def evaluate(self, code: str) -> Any:
        return self._send("evaluate", code=code)

    def evaluate_in_frame(self, code: str) -> Any:
        """Evaluate code in the page of the first frame, once it is drawn."""
        return self._send("evaluate_in_frame", code=code)

    def press(self, *keys: str) -> None:
        for key in keys:
            self._send("press", key=key)

    def type(self, text: str) -> None:
        self._send("type", text=text)

    def button(self, selector: str) -> None:
        self._send("press_button", selector=selector)

    def choose(self, selector: str, value: str) -> None:
        self._send("choose", selector=selector, value=value)

    def back(self) -> None:
        self._send("back")

    def download(self, selector: str, path: Path) -> str:
        return self._send("download", selector=selector, path=str(path))

    def pdf(self, path: Path) -> None:
        self._send("pdf", path=str(path))

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def boxes(self, pane: int = 0) -> dict[str, dict[str, Any]]:
        """Return the drawn boxes by key: where they are on the screen and what they say."""
        return self.evaluate(
            f"""(() => {{
              const p = {PICTURE.format(pane=pane)};
              const at = p.canvas.getBoundingClientRect();
              const rows = p.drawing.drawn.filter(d => d.around >= 0).map(d => [d.item.key, {{
                title: d.item.title, subtitle: d.item.subtitle, kind: d.item.kind, open: d.open,
                boxes: d.item.boxes, chips: d.item.chips,
                x: at.x + (d.x - p.view.x) * p.view.zoom, y: at.y + (d.y - p.view.y) * p.view.zoom,
                width: d.width * p.view.zoom, height: d.height * p.view.zoom }}]);
              return Object.fromEntries(rows); }})()"""
        )

    def titles(self, pane: int = 0) -> list[str]:
        return [box["title"] for box in self.boxes(pane).values()]

    def find(self, title: str, pane: int = 0) -> dict[str, Any]:
        """Return the box with a title, in view."""
        found = {box["title"]: (key, box) for key, box in self.boxes(pane).items()}
        assert title in found, sorted(found)
        key = found[title][0]
        self.evaluate(f"{PICTURE.format(pane=pane)}.showItem({json.dumps(key)})")
        return self.boxes(pane)[key]

    def click(self, title: str, pane: int = 0) -> dict[str, Any]:
        """Click on the title of a box; return where it was."""
        box = self.find(title, pane)
        y = box["y"] + (14 if box["open"] else box["height"] / 2)
        x = box["x"] + (24 if box["open"] else box["width"] / 2)
        self.click_at(x, y)
        return box

    def click_at(self, x: float, y: float) -> None:
        self._send("click", x=x, y=y)

    def color_at(self, title: str) -> tuple[int, int, int]:
        """Return the colour of a closed box near its upper left corner."""
        box = self.find(title)
        self.evaluate(f"{PICTURE.format(pane=0)}.drawNow()")
        pixel = self.evaluate(
            f"""(() => {{ const c = {PICTURE.format(pane=0)}.canvas;
              const at = c.getBoundingClientRect();
              const d = c.getContext("2d").getImageData(
                {box["x"]} - at.x + 8, {box["y"]} - at.y + 5, 1, 1).data;
              return [d[0], d[1], d[2]]; }})()"""
        )
        return tuple(pixel)

    def screenshot(self, name: str, folder: Path = SCREENSHOTS) -> None:
        """Keep a picture of the page, by default as a build artefact."""
        folder.mkdir(parents=True, exist_ok=True)
        self._send("screenshot", path=str(folder / f"{name}.png"))
