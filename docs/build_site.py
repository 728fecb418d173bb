"""Build the documentation site: all pages, with a menu, a search and the page of the demo's model.

python docs/build_site.py build/site

Open `index.html` in it. The site needs neither a server nor the network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "docs" / "site"


def make_demo_page(folder: Path) -> Path:
    """Run the demo in a folder, and write the page of its model, coloured by latency and size."""
    model, page = folder / "bert-tiny.onnx", folder / "bert-tiny.html"
    _modelexport("demo", folder)
    overlays: list[str | Path] = []
    for command in ("profile", "analyze"):
        result = folder / f"{command}.json"
        _modelexport(command, model, "--output-format", "json", "--output-file", result)
        overlays += ["--overlay", result]
    _modelexport("view", model, page, *overlays)
    return page


def _modelexport(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "modelexport", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def build(target: Path, demo_page: Path) -> None:
    """Build the site into an empty folder; a broken link is an error."""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as cache:
        options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", cache, "-c", SETTINGS]
        command = [sys.executable, "-m", "sphinx", *options, "-D", f"demo_page={demo_page}"]
        subprocess.run([*command, ROOT, target], check=True)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build(target, make_demo_page(Path(folder)))
    print(f"wrote {target / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
