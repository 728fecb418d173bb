"""`modelexport retag`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import modelexport
from damage import everything, net
from modelexport.cli.main import main
from retag.tools import apply
from zoo import distinct

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an export, and what ONNX Runtime made of it."""
    model, inputs = net()
    monkeypatch.chdir(tmp_path)
    modelexport.export_model(distinct(model), inputs, "m.onnx", strategy="htp")
    assert apply("ort-extended", Path("m.onnx"), Path("fast.onnx"), {})
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["retag", *arguments], catch_exceptions=False)


def test_a_summary_tells_what_the_tags_rest_on(folder: Path) -> None:
    result = run("m.onnx", "fast.onnx", "out.onnx")
    assert result.exit_code == 0, result.output
    report = modelexport.load("out.onnx")
    lines = result.stdout.splitlines()
    assert lines[0] == f"out.onnx: {len(report.tags)} nodes, all with a module"
    assert "values compared on inputs like the recorded ones" in " ".join(result.stdout.split())
    rows = [line.split() for line in lines if line.startswith(("scope", "value", "fusion", "data"))]
    counted = {name: int(number) for name, number, *_ in rows}
    assert sum(counted.values()) == len(report.tags)
    assert max(map(len, lines)) <= 80
    assert "run m.onnx" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        "fast.onnx", "m.onnx", "m_hierarchy.json", "out.onnx", "out_hierarchy.json"
    ]  # fmt: skip


def test_without_a_run_it_says_what_was_not_decided(folder: Path) -> None:
    model = onnx.load("fast.onnx")
    for node in model.graph.node[:2]:
        node.name = node.doc_string = ""
    onnx.save(model, "fast.onnx")
    result = run("m.onnx", "fast.onnx", "out.onnx", "--no-run")
    assert result.exit_code == 0, result.output
    assert "values were not compared" in " ".join(result.stdout.split())
    assert "run m.onnx" not in result.stderr


def test_inputs_from_a_file(folder: Path) -> None:
    (name,) = modelexport.load("m.onnx").graph.inputs
    np.savez("batch.npz", **{name: np.random.default_rng(0).random((2, 8), np.float32)})
    result = run("m.onnx", "fast.onnx", "out.onnx", "--inputs", "batch.npz")
    assert result.exit_code == 0, result.output
    assert "the inputs in batch.npz" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("m.onnx", "absent.onnx", "out.onnx"), 2, "cannot read absent.onnx"),
        (("fast.onnx", "m.onnx", "m.onnx"), 2, "would overwrite the input"),
        (("m.onnx", "fast.onnx", "out.txt"), 2, ".onnx"),
        (("m.onnx", "fast.onnx", "none/out.onnx"), 2, "none"),
        (("m.onnx", "fast.onnx", "out.onnx", "--inputs", "absent.npz"), 2, "absent.npz"),
        (("m.onnx", "fast.onnx", "out.onnx", "--inputs", "m.onnx"), 2, "numpy.savez"),
        (("m.onnx", "fast.onnx", "out.onnx", "--no-run", "--inputs", "x.npz"), 2, "--no-run"),
        (("m.onnx", "torn.onnx", "out.onnx"), 2, "torn.onnx is not an ONNX model"),
        (("m.onnx", "other.onnx", "out.onnx"), 1, "other.onnx was not made from m.onnx"),
    ],
)
def test_what_people_get_wrong(
    folder: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    Path("torn.onnx").write_bytes(Path("fast.onnx").read_bytes()[:-40])
    relu = onnx.helper.make_node("Relu", ["a"], ["b"])
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in "ab"]
    graph = onnx.helper.make_graph([relu], "g", ends[:1], ends[1:])
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), "other.onnx")
    before = everything(folder)
    result = run(*arguments)
    assert (result.exit_code, words in result.stderr) == (code, True), result.output
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert result.stdout == ""
    assert everything(folder) == before
