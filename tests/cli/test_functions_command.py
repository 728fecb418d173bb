"""`modelexport functions`: what it prints, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import modelexport
from damage import everything, net
from exports import export
from modelexport.cli.main import main
from zoo import distinct

pytestmark = pytest.mark.integration


@pytest.fixture
def bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return export("bert", "fx", tmp_path)[0]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["functions", *arguments], catch_exceptions=False)


def test_there_and_back(bert: Path) -> None:
    result = run("model.onnx", "out.onnx")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "out.onnx: 15 functions of 15 modules, nested 4 levels deep",
        "  the main graph has 7 nodes, calls included, instead of 71",
        "  with model.onnx.data",
    ]
    assert "group the nodes by module" in result.stderr
    back = run("out.onnx", "back.onnx", "--inline")
    assert back.exit_code == 0, back.output
    assert back.stdout == ""
    assert "wrote back.onnx, the file that out.onnx was made from" in back.stderr
    assert Path("back.onnx").read_bytes() == bert.read_bytes()


def test_options(bert: Path) -> None:
    assert "3 functions of 3 modules" in run("model.onnx", "a.onnx", "--depth", "1").stdout
    assert "27 functions of 27 modules" in run("model.onnx", "a.onnx", "--all-modules").stdout
    usage = run("a.onnx", "b.onnx", "--inline", "--depth", "1")
    assert usage.exit_code == 2
    assert "--inline restores the whole file" in usage.stderr


def test_lines_fit_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export("lent_modules", "fx", tmp_path)
    result = run("model.onnx", "out.onnx")
    assert "0 functions of 0 modules\n" in result.stdout
    assert "no module below the root has more than one node" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m.onnx", "out.onnx", "--depth", "0"), "--depth must be a positive number of levels"),
        (("m.onnx", "m.onnx"), "output m.onnx would overwrite the input"),
        (("m.onnx", "out.txt"), "the output 'out.txt' does not end in .onnx"),
        (("m.onnx", "none/out.onnx"), "the folder none does not exist"),
        (("none.onnx", "out.onnx"), "cannot read none.onnx"),
        (("plain.onnx", "out.onnx"), "plain.onnx has no tags (pass a file"),
        (("m.onnx", "out.onnx", "--inline"), "m.onnx was not written by modelexport functions"),
        (("text.onnx", "out.onnx"), "text.onnx is not an ONNX model"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, inputs = net()
    modelexport.export_model(distinct(model), inputs, "m.onnx", strategy="htp")
    modelexport.strip("m.onnx", "plain.onnx")
    Path("text.onnx").write_text("not a model")
    before = everything(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert everything(tmp_path) == before
