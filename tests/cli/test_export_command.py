"""The command line as people use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import transformers
from click.testing import CliRunner, Result

import modelexport
from modelexport.cli.main import main

pytestmark = [pytest.mark.integration, pytest.mark.sanity]
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `modelexport demo` made, once for all tests."""
    folder = tmp_path_factory.mktemp("demo")
    result = run("demo", str(folder))
    assert result.exit_code == 0, result.output
    (folder / "stdout.txt").write_text(result.stdout)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.smoke
def test_demo_shows_the_tree_and_what_to_try(demo: Path) -> None:
    text = (demo / "stdout.txt").read_text().replace(str(demo), "DIR")
    lines = [line.rstrip() for line in text.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("module "))
    tree = "\n".join(lines[start : start + 26]) + "\n"
    assert tree == (GOLDEN / "demo_tree.txt").read_text()
    assert "85 of 85 nodes tagged" in text
    assert "Look at it: open DIR/bert-tiny.html in a browser.\n\nTry next:" in text
    assert (demo / "bert-tiny.html").read_text().startswith("<!doctype html>")
    assert (
        max(len(line) for line in lines[start:] if "Try" not in line and "modelexport" not in line)
        <= 80
    )
    exported = modelexport.load(demo / "bert-tiny.onnx")
    assert exported.coverage == 1.0
    onnx.checker.check_model(str(demo / "bert-tiny.onnx"), full_check=True)


def test_what_the_demo_suggests_works(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    text = (demo / "stdout.txt").read_text().split("Try next:")[1]
    commands = [line.strip() for line in text.splitlines() if line.startswith("  modelexport ")]
    assert len(commands) == 15
    for command in commands:
        result = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    assert modelexport.load(demo / "all.onnx").sidecar.export.inputs[0].shape == (2, 64)
    baseline = demo / "baseline.onnx"
    assert not modelexport.load(baseline).is_tagged


@pytest.mark.parametrize("strategy", ["auto", "fx", "htp", "usage_based"])
def test_each_strategy_from_a_folder(demo: Path, strategy: str, tmp_path: Path) -> None:
    result = run(
        "export",
        demo / "bert-tiny",
        tmp_path / "m.onnx",
        "--strategy",
        strategy,
        "--input-text",
        "hello",
    )
    assert result.exit_code == 0, result.output
    sidecar = json.loads((tmp_path / "m_hierarchy.json").read_text())
    assert sidecar["export"]["requested"] == strategy
    assert sidecar["model"]["source"] == "bert-tiny"
    assert sidecar["export"]["seed"] == 0
    assert [entry["shape"] for entry in sidecar["export"]["inputs"]] == [[1, 3]] * 3
    assert "BertModel" in result.stdout


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize(
    ("options", "shape", "opset"),
    [
        (["--input-text", "hello"], [1, 3], 20),
        (["--input-shape", "2,64"], [2, 64], 20),
        (["--dynamic"], ["batch", "sequence"], 20),
        (["--opset-version", "17"], [1, 11], 17),
        (["--opset-version", "newest"], [1, 11], None),
    ],
)
def test_the_demo_model_in_every_way(
    demo: Path,
    strategy: str,
    options: list[str],
    shape: list[object],
    opset: int | None,
    tmp_path: Path,
) -> None:
    newest = {"fx": 25, "htp": 20}[strategy]
    options = [str(newest) if option == "newest" else option for option in options]
    result = run(
        "export", demo / "bert-tiny", tmp_path / "m.onnx", "--strategy", strategy, *options
    )
    assert result.exit_code == 0, result.output
    exported = modelexport.load(tmp_path / "m.onnx")
    assert exported.sidecar is not None
    assert [list(info.shape) for info in exported.sidecar.export.inputs] == [shape] * 3
    assert exported.sidecar.model.opset == (opset or newest)
    assert exported.sidecar.export.inputs_from is not None
    assert exported.coverage == 1.0
    assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid


def test_names_that_no_module_has(demo: Path, tmp_path: Path) -> None:
    options = ["--torch-nn", "Linear,LayrNorm", "--include", "*encoder*", "--exclude", "head.*"]
    result = run("export", demo / "bert-tiny", tmp_path / "m.onnx", *options)
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if "no module" in line]
    assert told == [
        "note: --torch-nn names LayrNorm, but no module matches it",
        "note: --exclude names head.*, but no module matches it",
    ]
    assert "no module" not in run("export", demo / "bert-tiny", tmp_path / "n.onnx").stderr


@pytest.mark.filterwarnings("ignore")
def test_flags_reach_the_export(demo: Path, tmp_path: Path) -> None:
    result = run(
        "export", demo / "bert-tiny", tmp_path / "m.onnx", "--strategy", "htp",
        "--opset-version", 17, "--torch-nn", "all", "--exclude", "*Dropout*", "--max-depth", 4,
        "--clean", "--jit-graph", tmp_path / "jit.txt", "--fx-graph", tmp_path / "fx.txt",
        "--temp-dir", tmp_path, "-v",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    exported = modelexport.load(tmp_path / "m.onnx")
    assert not exported.is_tagged
    assert exported.sidecar is not None
    tags = [record.tag for record in exported.sidecar.modules.values() if record.tag is not None]
    assert max(tag.count("/") for tag in tags) == 4
    assert not any("Dropout" in tag for tag in tags)
    assert any("ModuleList" in tag for tag in tags)
    assert exported.sidecar.model.opset == 17
    assert "scope:" in (tmp_path / "jit.txt").read_text()
    assert not (tmp_path / "fx.txt").exists()
    assert "fx.txt was not written" in result.stderr


def test_fx_graph_and_alias_of_clean(demo: Path, tmp_path: Path) -> None:
    result = run(
        "export",
        demo / "bert-tiny",
        tmp_path / "m.onnx",
        "--fx-graph",
        tmp_path / "fx.txt",
        "--no-hierarchy-attrs",
    )
    assert result.exit_code == 0, result.output
    assert "ExportedProgram" in (tmp_path / "fx.txt").read_text()
    assert not modelexport.load(tmp_path / "m.onnx").is_tagged


FACTORIES = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

def pair():
    return model(), (torch.ones(1, 4),)

class Inner:
    make = staticmethod(pair)

def raises():
    raise RuntimeError("no luck")

def wrong():
    return 3

def broken():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("cannot be traced")
    return Broken(), torch.ones(1)

def unsupported():
    class Histogram(nn.Module):
        def forward(self, x):
            return torch.histc(x, bins=4)
    return Histogram(), torch.ones(1)

def branching():
    class Branching(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x
    return Branching(), torch.ones(1)

def misfit():
    return model(), (torch.ones(1, 5),)

constant = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("arguments", [["pair"], ["Inner.make"], ["model", "--input-shape", "1,4"]])
def test_factories(arguments: list[str], tmp_path: Path) -> None:
    result = run("export", f"my_factories:{arguments[0]}", "m.onnx", *arguments[1:])
    assert result.exit_code == 0, result.output
    sidecar = modelexport.load(tmp_path / "m.onnx").sidecar
    assert sidecar is not None
    assert sidecar.model.source == f"my_factories:{arguments[0]}"
    assert str(tmp_path) not in (tmp_path / "m_hierarchy.json").read_text()


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["my_factories:raises", "m.onnx"], 2, "RuntimeError: no luck"),
        (["my_factories:wrong", "m.onnx"], 2, "returned an int"),
        (["my_factories:constant", "m.onnx"], 2, "not a callable"),
        (["my_factories:absent", "m.onnx"], 2, "has no 'absent'"),
        (["absent_module:make", "m.onnx"], 2, "cannot import 'absent_module'"),
        (["my_factories:model", "m.onnx"], 2, "--input-specs"),
        (["my_factories:pair", "m.onnx", "--input-shape", "1,7"], 2, "shapes cannot be multiplied"),
        (["my_factories:pair", "m.onnx", "--input-shape", "y=1,4"], 2, "no input 'y'"),
        (["my_factories:pair", "m.onnx", "--dynamic-axes", "input"], 2, "names no axes"),
        (
            ["my_factories:pair", "m.onnx", "--dynamic-axes", "y=0:batch"],
            2,
            "which is not an input",
        ),
        (
            ["my_factories:pair", "m.onnx", "--dynamic", "--dynamic-axes", "input=0:b"],
            2,
            "give one of them",
        ),
        (["my_factories:pair", "m.onnx", "--random-weights"], 2, "is for Hugging Face models"),
        (["my_factories:pair", "m.onnx", "--opset-version", "26"], 2, "it writes opset 7 to 25"),
        (["my_factories:model", "m.onnx", "--input-text", "hi"], 2, "no tokenizer"),
        (["my_factories:pair", "m.txt"], 2, "does not end in .onnx"),
        (["my_factories:pair", "absent/m.onnx"], 2, "does not exist"),
        (
            ["my_factories:pair", "m.onnx", "--strategy", "guess"],
            2,
            "known: auto, fx, htp, usage_based",
        ),
        (["my_factories:pair", "m.onnx", "--input-shape", "1,x"], 2, "not a shape"),
        (["my_factories:pair", "m.onnx", "--opset-version", "3"], 2, "out of range"),
        (["my_factories:pair", "m.onnx", "--no-such-flag"], 2, "No such option"),
        (["my_factories.py", "m.onnx"], 2, "is a file"),
        ([".", "m.onnx"], 2, "no config.json"),
        (["no/such-model", "m.onnx"], 2, "cannot load 'no/such-model'"),
        (["my_factories:broken", "m.onnx"], 2, "my_factories.py:23: raise ValueError"),
        (["my_factories:branching", "m.onnx", "--no-fallback"], 3, "dynamo: "),
        (["my_factories:unsupported", "m.onnx"], 3, "operator aten.histc.default"),
        (
            ["my_factories:unsupported", "m.onnx"],
            3,
            "my_factories.py:29: return torch.histc(x, bins=4)",
        ),
        (["my_factories:unsupported", "m.onnx"], 3, "torchscript: UnsupportedOperatorError"),
    ],
)
def test_what_a_user_sees_who_gets_it_wrong(
    arguments: list[str], code: int, expected: str, tmp_path: Path
) -> None:
    result = run("export", *arguments)
    assert result.exit_code == code, result.output
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert "graph(" not in result.output
    assert result.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"my_factories.py", "__pycache__"}


@pytest.mark.regression
@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["my_factories:pair", "--input-shape", "1000000,1000000"],
            "shape 1000000,1000000 and dtype",
        ),
        (
            ["my_factories:model", "--input-shape", "1000000,1000000"],
            "shape 1000000,1000000 and dtype",
        ),
        (["my_factories:misfit"], "shapes cannot be multiplied"),
        (["my_factories.py:"], "the name of a factory is missing after the colon"),
        (["my_factories:"], "the name of a factory is missing after the colon"),
        (["my_factories:wrong"], "returned an int"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: list[str], expected: str) -> None:
    result = run("export", arguments[0], "m.onnx", *arguments[1:])
    (line,) = (line for line in result.stderr.splitlines() if not line.endswith(" ..."))
    assert result.exit_code == 2, result.output
    assert line.startswith("Error: ")
    assert expected in line


@pytest.mark.regression
@pytest.mark.usefixtures("factories")
def test_a_fallback_is_told_in_one_line() -> None:
    result = run("export", "my_factories:branching", "m.onnx")
    assert result.exit_code == 0, result.output
    first, second = (line for line in result.stderr.splitlines() if line.startswith("note: "))
    assert first.startswith("note: dynamo could not export this model (")
    assert first.endswith('(strategy="fx" or --no-fallback makes this an error)')
    assert "my_factories.py:35: Converting a tensor to a Python boolean" in second


def test_a_folder_that_cannot_be_written(demo: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    result = run("demo", blocked / "inner")
    assert result.exit_code == 2
    assert "cannot create" in result.stderr


def test_strip_command(demo: Path, tmp_path: Path) -> None:
    result = run("strip", demo / "bert-tiny.onnx", tmp_path / "base.onnx")
    assert result.exit_code == 0
    assert not modelexport.load(tmp_path / "base.onnx").is_tagged
    bad = run("strip", demo / "absent.onnx", tmp_path / "base2.onnx")
    assert bad.exit_code == 2
    assert "cannot read" in bad.stderr


@pytest.mark.parametrize("command", [[], ["export"], ["demo"], ["strip"]])
def test_help_is_enough(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.stdout.count("\n") > 5
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_a_vision_folder_by_shape(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
    )
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "vit")
    result = run("export", tmp_path / "vit", tmp_path / "vit.onnx", "--input-shape", "2,3,16,16")
    assert result.exit_code == 0, result.output
    sidecar = modelexport.load(tmp_path / "vit.onnx").sidecar
    assert sidecar is not None
    assert sidecar.export.inputs[0].name == "pixel_values"


def test_progress_goes_to_stderr_as_plain_lines(demo: Path, tmp_path: Path) -> None:
    result = run("export", demo / "bert-tiny", tmp_path / "m.onnx", "--strategy", "htp")
    assert "export with torch (torchscript) ..." in result.stderr
    assert "..." not in result.stdout.replace("…", "")
