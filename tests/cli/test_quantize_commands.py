"""`modelexport select` and `modelexport quantize`: what they print, and their exit codes."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import modelexport
from damage import everything
from modelexport.cli.main import main
from quantization.models import SENSITIVE, export_stack

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the export of a stack of blocks, one of which is sensitive."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(export_stack().parent, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_select_prints_a_name_a_line_or_json(folder: Path) -> None:
    names = modelexport.select("stack.onnx", "blocks.1")
    result = run("select", "stack.onnx", "blocks.1")
    assert (result.exit_code, result.stdout.splitlines(), result.stderr) == (0, names, "")
    as_json = run("select", "stack.onnx", "blocks.1", "--output-format", "json")
    assert json.loads(as_json.stdout) == names
    several = run("select", "stack.onnx", "blocks.[12]", "head", "--op", "Tanh", "--op", "Gemm")
    assert several.stdout.splitlines() == modelexport.select(
        "stack.onnx", ["blocks.[12]", "head"], op_types=["Tanh", "Gemm"]
    )
    stored = run("select", "stack.onnx", "head", "--what", "initializers", "--invert")
    assert "head.weight" not in stored.stdout
    assert "blocks.1.linear.weight" in stored.stdout


def test_select_counts_nodes_without_a_name(folder: Path) -> None:
    model = onnx.load("stack.onnx")
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, "stack.onnx")
    result = run("select", "stack.onnx", "head")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "have no name and are left out" in " ".join(result.stderr.split())
    assert "modelexport quantize" in result.stderr


def test_a_summary_of_what_was_quantized(folder: Path) -> None:
    result = run("quantize", "stack.onnx", "q.onnx", "--keep", SENSITIVE)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    nodes = len(modelexport.load("q.onnx").tags)
    assert lines[0] == f"q.onnx: {nodes} nodes, all with a module"
    assert "kept in float" in " ".join(result.stdout.split())
    assert any("relative error" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert sorted(path.name for path in folder.iterdir()) == [
        "q.onnx", "q_hierarchy.json", "stack.onnx", "stack_hierarchy.json"
    ]  # fmt: skip


def test_a_report_as_json(folder: Path) -> None:
    result = run("quantize", "stack.onnx", "q.onnx", "--to", "float16", "--output-format", "json")
    report = json.loads(result.stdout)
    assert report["to"] == "float16"
    assert report["error"]["relative"] < 0.01
    assert "hierarchy" not in report


def test_a_limit_names_what_stays_in_float(folder: Path) -> None:
    result = run("quantize", "stack.onnx", "q.onnx", "--max-error", "0.02", "--to", "int8-static")
    assert result.exit_code == 0, result.output
    assert "in float for a relative error of at most 0.02: " in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith(SENSITIVE))
    assert "KiB" in row
    assert "real data gives better ranges (pass it as --calibration)" in result.stderr
    assert "module 1 of 8" in result.stderr


def test_sensitivity_is_a_table_json_or_csv(folder: Path) -> None:
    before = everything(folder)
    text = run("quantize", "stack.onnx", "--sensitivity")
    assert text.exit_code == 0, text.output
    lines = text.stdout.splitlines()
    titles = next(index for index, line in enumerate(lines) if line.startswith("module "))
    assert lines[titles + 1].startswith(f"{SENSITIVE} ")
    assert max(map(len, lines)) <= 80
    assert everything(folder) == before
    as_json = run("quantize", "stack.onnx", "--sensitivity", "--output-format", "json")
    modules = json.loads(as_json.stdout)["modules"]
    assert modules[0]["module"] == SENSITIVE
    assert set(modules[0]["error"]) == {"output", "max_abs", "relative", "cosine", "sqnr_db"}
    table = run("quantize", "stack.onnx", "--sensitivity", "--output-format", "csv")
    rows = list(csv.DictReader(io.StringIO(table.stdout)))
    assert [row["module"] for row in rows] == [row["module"] for row in modules]
    assert float(rows[0]["relative"]) == pytest.approx(modules[0]["error"]["relative"])


def test_sensitivity_to_a_file_and_resumed(folder: Path) -> None:
    arguments = ("quantize", "stack.onnx", "--sensitivity", "--only", "blocks.?")
    first = run(*arguments, "--resume", "results.json", "--output-file", "table.txt")
    assert first.exit_code == 0, first.output
    assert first.stdout == ""
    assert "module 6 of 6" in first.stderr
    second = run(*arguments, "--resume", "results.json")
    assert second.stdout == Path("table.txt").read_text()
    assert "6 of 6 modules are already measured" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("select stack.onnx blocs.1", "near it: blocks"),
        ("select stack.onnx", "PATTERN"),
        ("select stack.onnx head --op Conv", "its operators are"),
        ("select stack.onnx head --call 5", "there is no call 5"),
        ("select bare.onnx head", "bare.onnx has no tags"),
        ("select absent.onnx head", "cannot read absent.onnx"),
        ("quantize stack.onnx", "Missing argument 'OUT'"),
        ("quantize stack.onnx q.onnx --keep hed", "near it: head"),
        ("quantize stack.onnx q.onnx --keep /", "nothing is left"),
        ("quantize stack.onnx q.onnx --only head --keep head", "nothing is left"),
        ("quantize stack.onnx stack.onnx", "would overwrite the input"),
        ("quantize stack.onnx q.txt", ".onnx"),
        ("quantize stack.onnx none/q.onnx", "none"),
        ("quantize bare.onnx q.onnx", "bare.onnx has no tags"),
        ("quantize stack.onnx q.onnx --to int4", "int4"),
        ("quantize stack.onnx q.onnx --to int8-static --calibration bad.npz", "no value for the"),
        ("quantize stack.onnx q.onnx --calibration absent.npz", "absent.npz"),
        ("quantize stack.onnx q.onnx --calibration stack.onnx", "numpy.savez"),
        ("quantize stack.onnx q.onnx --max-error 1e-9", "the smallest is"),
        ("quantize stack.onnx q.onnx --max-error -1", "0 or more"),
        ("quantize stack.onnx q.onnx --depth 2", "--depth goes with"),
        ("quantize stack.onnx q.onnx --resume r.json", "--resume goes with"),
        ("quantize stack.onnx q.onnx --output-format csv", "csv goes with"),
        ("quantize stack.onnx q.onnx --sensitivity", "leave OUT out"),
        ("quantize stack.onnx --sensitivity --keep head", "leave --keep out"),
        ("quantize stack.onnx --sensitivity --max-error 0", "leave --max-error out"),
        ("quantize stack.onnx q.onnx --max-error 1 --depth 0", "--depth must be 1 or more"),
        ("quantize stack.onnx --sensitivity --only blocs", "near it: blocks"),
        ("quantize stack.onnx --sensitivity --resume bad.npz", "not a file of results"),
        ("quantize broken.onnx q.onnx", "ONNX Runtime rejects the model"),
        ("quantize stack.onnx --sensitivity --calibration . --output-file bad.npz", "overwrite"),
        ("quantize stack.onnx q.onnx --calibration data --output-file data/a.npz", "overwrite"),
        ("quantize stack.onnx q.onnx --output-file q_hierarchy.json", "overwrite"),
        ("quantize stack.onnx q.onnx --output-file q.onnx.data", "overwrite"),
    ],
)
def test_what_people_get_wrong(folder: Path, arguments: str, words: str) -> None:
    modelexport.strip("stack.onnx", "bare.onnx")
    Path("data").mkdir()
    np.savez("data/a.npz", other=np.zeros(3))
    np.savez("bad.npz", other=np.zeros(3))
    broken = onnx.load("stack.onnx")
    broken.graph.node[-1].op_type = "Unheard"
    onnx.save(broken, "broken.onnx")
    before = everything(folder)
    result = run(*arguments.split())
    assert (result.exit_code, words in result.stderr) == (2, True), result.output
    assert "Error: " in result.stderr.splitlines()[-1]
    assert result.stdout == ""
    assert everything(folder) == before


def test_the_missing_runtime_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = run("quantize", "stack.onnx", "q.onnx")
    assert result.exit_code == 2
    assert "needs onnxruntime" in result.stderr
