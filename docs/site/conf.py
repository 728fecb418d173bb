"""Settings of the documentation site: the pages of the repository with a menu and a search.

`docs/build_site.py` builds it. The pages stay as GitHub shows them. Only the menu and the page of
`view`, which GitHub cannot show, and the source of the examples are added here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

project = "modelexport"
html_title = "modelexport"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/**.md"]
exclude_patterns = [".*", "build", "demo-output", "dist", "src", "tests", "viewer/node_modules"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors of GitHub
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_use_index = False
smartquotes = False
highlight_language = "text"

DEMO = "bert-tiny.html"
"""The page of the demo's model, beside the start page."""
FRAME = f"""
<p>This is the page of the demo's model. Try it here, or
<a href="../../{DEMO}">in a page of its own</a>.</p>
<iframe class="model" src="../../{DEMO}" title="The model of the demo"></iframe>
"""
MENU = {
    "Guides": [
        "docs/guides/export",
        "docs/guides/batch",
        "docs/guides/look-at-your-model",
        "docs/guides/read-a-report",
        "docs/guides/extract",
        "docs/guides/find-a-wrong-layer",
        "docs/guides/find-the-slow-layer",
        "docs/guides/after-the-optimiser",
        "docs/guides/quantize",
        "docs/guides/netron",
        "docs/guides/graphml",
        "docs/guides/model-explorer",
    ],
    "The map": [
        "docs/tags",
        "docs/bert-tiny",
        "docs/strategies",
        "docs/plugins",
        "docs/glossary",
    ],
    "Reference": [
        "docs/api",
        "docs/formats",
        "docs/graphml",
        "docs/troubleshooting",
        "docs/limits",
        "docs/compatibility",
        "docs/benchmarks",
        "docs/fuzzing",
    ],
    "The project": [
        "examples/README",
        "docs/architecture",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ],
}


for caption, folder in {"Guides": "docs/guides", "Reference": "docs"}.items():
    listed = {page for pages in MENU.values() for page in pages}
    found = [f"{folder}/{path.stem}" for path in sorted((ROOT / folder).glob("*.md"))]
    MENU[caption] += [page for page in found if page not in listed]


def add_to_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to the text of a page what only the site can show."""
    if page == root_doc:
        source[0] += "".join(map(_menu, MENU, MENU.values()))
    elif page == "docs/guides/look-at-your-model":
        source[0] = source[0].replace("<!-- demo -->", FRAME)
    elif page == "examples/README":
        source[0] += "".join(map(_listing, sorted((ROOT / "examples").glob("*.py"))))


def _menu(caption: str, pages: list[str]) -> str:
    lines = [":hidden:", f":caption: {caption}", "", *pages]
    return "\n\n".join(["", "```{toctree}\n" + "\n".join(lines) + "\n```\n"])


def _listing(path: Path) -> str:
    return f"\n\n## {path.name}\n\n```python\n{path.read_text()}```\n"


def finish(app: Sphinx, error: Exception | None) -> None:
    """Add the page of the demo, and the start page under the name that browsers look for."""
    if error is None:
        shutil.copyfile(app.config.demo_page, app.outdir / DEMO)
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions above with Sphinx."""
    app.add_config_value("demo_page", None, "", [str])
    app.connect("source-read", add_to_page)
    app.connect("build-finished", finish)
