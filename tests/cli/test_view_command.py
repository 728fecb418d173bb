"""`modelexport view`, and the page that an export writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import modelexport
from damage import net
from exports import export
from modelexport.cli.main import main
from modelexport.viewing import page as page_module
from viewing.pages import read_page


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def test_the_page_is_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("norm_before_dropout", "fx", tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run("view", "model.onnx")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("model.html: 16 nodes in 9 modules, ")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert read_page(tmp_path / "model.html")["models"][0]["file"] == "model.onnx"


def test_two_models_an_output_and_an_overlay(tmp_path: Path) -> None:
    path, _, _ = export("norm_before_dropout", "fx", tmp_path)
    other = tmp_path / "other.onnx"
    modelexport.strip(path, other)
    times = tmp_path / "times.json"
    command = ("profile", path, "--runs", 1, "--output-format", "json", "--output-file", times)
    assert run(*command).exit_code == 0
    out = tmp_path / "out.html"
    result = run("view", path, other, out, "--overlay", times)
    assert result.exit_code == 0, result.output
    data = read_page(out)
    assert [columns["file"] for columns in data["models"]] == ["model.onnx", "other.onnx"]
    assert [overlay["name"] for overlay in data["overlays"]] == ["latency"]


def test_open_starts_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(page_module.webbrowser, "open", opened.append)
    assert run("view", path, "--open").exit_code == 0
    assert opened == [(tmp_path / "model.html").as_uri()]


def test_for_model_explorer(tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    out = tmp_path / "m.json"
    result = run("view", path, out, "--format", "model-explorer")
    assert result.exit_code == 0, result.output
    assert '"graphs"' in out.read_text()
    assert run("view", path, path, out, "--format", "model-explorer").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.onnx"], "No such file"),
        (["model.onnx", "out.txt"], "does not end in .html"),
        (["model.onnx", "nowhere/out.html"], "nowhere"),
        (["model.onnx", "a.onnx", "b.onnx"], "one or two .onnx files"),
        (["model.onnx", "a.html", "b.html"], "one or two .onnx files"),
        (["model.onnx", "--overlay", "model_hierarchy.json"], "not the result of a known command"),
        (["model_hierarchy.json"], "not an ONNX"),
        (["."], ". is a folder"),
        ([".", "--format", "model-explorer"], ". is a folder"),
        (["model.onnx", "--overlay", "huge.json"], "huge.json is damaged"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export("conv_batch_norm", "fx", tmp_path)
    monkeypatch.chdir(tmp_path)
    modules = [{"path": "", "own_ms": 10**400}]
    Path("huge.json").write_text(json.dumps({"kernel_ms": 1, "modules": modules}))
    before = sorted(tmp_path.iterdir())
    result = run("view", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_export_with_a_page_and_a_report(tmp_path: Path) -> None:
    model, inputs = net()
    path = tmp_path / "m.onnx"
    report = modelexport.export_model(
        model, inputs, path, strategy="htp", with_view=True, with_report=True
    )
    assert report.view_path == tmp_path / "m.html"
    assert report["files"]["view"] == str(report.view_path)
    assert "](m.html)" in (tmp_path / "m_report.md").read_text()
    assert read_page(report.view_path)["models"][0]["file"] == "m.onnx"


def test_a_page_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(page_module, "page_data", fail)
    path = tmp_path / "m.onnx"
    with pytest.warns(modelexport.ViewWarning, match="ZeroDivisionError: odd"):
        report = modelexport.export_model(
            nn.Linear(2, 2).eval(), torch.rand(1, 2), path, with_view=True
        )
    assert report.view_path is None
    assert report.view_error == "ZeroDivisionError: odd"
    assert modelexport.load(path).coverage == 1.0
    assert not (tmp_path / "m.html").exists()
