"""view(): write a model as one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import webbrowser
from collections.abc import Callable, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

import modelexport
from modelexport.errors import ArgumentError
from modelexport.graph.flat import pause_collector
from modelexport.graphml.text import load_with_types
from modelexport.onnx_file.atomic_write import check_output_path, write_file
from modelexport.onnx_file.model_file import StrPath, as_path, name_beside
from modelexport.viewing.overlays import read_overlays
from modelexport.viewing.page_data import page_data

FORMAT = "modelexport-view/1"
_NOTEBOOK_HEIGHT = 640


class View(msgspec.Struct, frozen=True):
    """The page that `view` wrote. A notebook shows it.

    Attributes:
        path: The HTML file.
        nodes: The number of nodes of the model.
        modules: The number of its modules.
        size: The size of the page in bytes.
        sidecar_refused: Why the sidecar beside a model without tags was not used; None if it was.
    """

    path: Path
    nodes: int
    modules: int
    size: int
    sidecar_refused: str | None = None

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads allow-modals" '
            f'allow="clipboard-write" title="{html.escape(self.path.name)}" '
            f'style="width: 100%; height: {_NOTEBOOK_HEIGHT}px; border: 1px solid #8884"></iframe>'
        )


def view(
    path: StrPath,
    output_path: StrPath | None = None,
    *,
    other: StrPath | None = None,
    overlays: Sequence[StrPath | msgspec.Struct] = (),
    open_browser: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> View:
    """Write a model as an HTML page: its modules as nested boxes that open and close.

    Args:
        path: The model file, with tags or without.
        output_path: The page; by default `<stem>.html` beside the model.
        other: A second model file, shown beside the first with what `compare` finds marked.
        overlays: Results of `profile`, `verify`, `measure_sensitivity` or `analyze`, or files with
            their JSON. Their numbers colour the boxes.
        open_browser: Whether to open the page in the browser.
        on_step: Called with the name of each step as it begins.

    Returns:
        The page and what is in it.

    Raises:
        ArgumentError: The page would overwrite a file that is read.
        FileError: A file cannot be read or written.
        FormatError: A file is not an ONNX model, or not the result of a command.
    """
    source = as_path(path)
    target = check_page(source, output_path, other, overlays)
    step = on_step or (lambda _: None)
    read = [each for overlay in overlays for each in read_overlays(overlay)]
    marks: tuple[dict[str, str], dict[str, str]] = ({}, {})
    paths = [source]
    if other is not None:
        paths.append(as_path(other))
        step("compare the files")
        marks = _marks(*paths)
    models = []
    with pause_collector():
        for file, marked in zip(paths, marks, strict=False):
            step(f"read {file.name}")
            model, types = load_with_types(file)
            models.append((model, page_data(model, types, marked)))
        step("write the page")
        data = {
            "format": FORMAT,
            "version": modelexport.__version__,
            "models": [columns for _, columns in models],
            "overlays": [msgspec.to_builtins(each) for each in read],
        }
        page = make_page(data, " and ".join(file.name for file in paths)).encode()
    write_file(target, page)
    if open_browser:
        webbrowser.open(target.resolve().as_uri())
    first = models[0][0]
    return View(
        target, len(first.graph.nodes), len(first.modules), len(page), first.in_effect.refused
    )


def page_path(path: Path) -> Path:
    """Return the default path of a model's page: `<stem>.html` beside it."""
    return name_beside(path, ".html")


def check_page(
    source: Path,
    output_path: StrPath | None,
    other: StrPath | None = None,
    overlays: Sequence[StrPath | msgspec.Struct] = (),
) -> Path:
    """Return the path of the page, which must not be one of the files that are read.

    Raises:
        ArgumentError: It is one of them, or cannot be written.
    """
    target = check_output_path(output_path or page_path(source), ".html")
    results = [each for each in (*overlays, other) if isinstance(each, str | PathLike)]
    for read in (source, *results):
        if as_path(read).resolve() == target.resolve():
            raise ArgumentError(f"{target} would be overwritten", hint="name another output")
    return target


def _marks(first: Path, second: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return what `compare` found, by the node keys of each file."""
    from modelexport.analysis.compare import compare

    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for module in compare(first, second).modules:
        before.update(dict.fromkeys(module.removed, "removed"))
        after.update(dict.fromkeys(module.added, "added"))
        before.update((change.node, "changed") for change in module.changed)
        after.update((change.other, "changed") for change in module.changed)
    return before, after


def make_page(data: dict[str, Any], title: str) -> str:
    """Build the HTML: data, script and style inline, and nothing else allowed."""
    bundle = files("modelexport.viewing") / "bundle"
    script = (bundle / "page.js").read_text(encoding="utf-8")
    style = (bundle / "style.css").read_text(encoding="utf-8")
    packed = gzip.compress(msgspec.json.encode(data), 9, mtime=0)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"><p>Reading the model. This page needs JavaScript.</p></div>\n'
        f'<script id="data" type="text/plain">{base64.b64encode(packed).decode()}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
