"""The examples run, and print what they are meant to show."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from pages import links

EXAMPLES = Path(__file__).parents[1] / "examples"
TOUR = EXAMPLES / "tour.ipynb"
MODELS = {"small_vision.py"}
"""Models for the command line, not scripts; the pages and other tests export them."""
PRINTED = {
    "cut_out_a_module.py": [
        r"encoder\.onnx: \d+ nodes",
        r"  takes input_ids",
        r"  against PyTorch's encoder: off by \d\.\de-0[5-9]",
        r"t5\.onnx in parts:",
        r"  encoder: \d+ nodes",
        r"  decoder: \d+ nodes",
        r"  all together: \(1, 4, 32\)",
    ],
    "find_the_slow_layer.py": [
        r"bert\.onnx: \d+\.\d+ ms a run, on the recorded inputs",
        r"  cls\.predictions\.decoder: \d+\.\d+ ms, \d+%",
        r"  (bert|cls)\..*: \d+\.\d+ ms, \d+%",
        r"  (bert|cls)\..*: \d+\.\d+ ms, \d+%",
        r"  all 2 layers together \d+%",
    ],
    "find_the_wrong_layer.py": [
        r"int8\.onnx: differs first in embeddings\.LayerNorm",
        r"  encoder\.layer\.1\.output\.dense: off by 0\.\d+ on PyTorch's own inputs",
        r"(  .*: off by .*\n)*optimized-int8\.onnx: differs first in embeddings\.LayerNorm",
        r"  encoder\.layer\.1\.output\.dense: off by 0\.\d+ on PyTorch's own inputs",
        r"(  .*: off by .*\n)*float16\.onnx: agrees",
    ],
    "generate_text.py": [
        r"prefill: \d+ nodes, 100% with a module",
        r"decode: \d+ nodes, 100% with a module",
        r"8 tokens in ONNX Runtime: .+",
        r"PyTorch generates the same",
    ],
    "look_at_the_model.py": [
        r"\d+ nodes in \d+ modules, \d+ KiB",
        r"open .*resnet\.html in a browser",
        r"open .*both\.html to see what the optimiser changes",
    ],
    "quantize_safely.py": [
        r"all in int8: relative error 0\.1\d*",
        r"  h\.2\.mlp\.c_proj: 0\.1\d* alone",
        r"(  .* alone\n)*int8\.onnx: relative error 0\.0[0-2]\d*, in float:",
        r"  h\.2\.mlp\.c_proj",
        r"(  h\..*\n)*  [1-6]\d% of the bytes",
        r"against PyTorch: agrees",
    ],
}
"""What each script prints, line by line."""
SHOWN = [
    "100% with a module",
    "the export agrees: True",
    "int8 agrees: False",
    "in float: ['",
    "bert.encoder.layer.0 36 nodes",
    "identical topology, tags added",
]
"""What the cells of the tour print, among other things."""

pytestmark = pytest.mark.integration


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*PRINTED, *MODELS}
    assert {*scripts, TOUR.name} <= {*links((EXAMPLES / "README.md").read_text())}


@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_it_shows(example: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / example), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("\n".join(PRINTED[example]) + "\n", done.stdout), done.stdout
    assert "Traceback" not in done.stderr


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook runs, its text outputs are right, and a cell shows the page."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    for text in SHOWN:
        assert text in printed
    (shown,) = [
        output["data"]["text/html"]
        for cell in cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    page = html.unescape(re.search(r'<iframe srcdoc="([^"]*)"', shown)[1])  # type: ignore[index]
    assert page.startswith("<!doctype html>")
    assert '<script id="data"' in page


def test_the_tour_has_no_outputs() -> None:
    """Outputs would change with every run, and the page is long."""
    cells = json.loads(TOUR.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
