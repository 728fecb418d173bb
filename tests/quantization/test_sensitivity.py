"""Sensitivity: which modules cause the error, and which stay in float for a limit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import modelexport
from exports import export
from quantization.models import SENSITIVE, export_stack

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("to", ["int8-dynamic", "int8-static"])
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_sensitive_module_comes_first(strategy: str, to: str) -> None:
    result = modelexport.measure_sensitivity(export_stack(strategy), to=to)
    assert result.depth == 1, "a ModuleList is no level of its own"
    modules = [row.module for row in result.modules if not row.own]
    assert set(modules) == {*(f"blocks.{number}" for number in range(6)), "head"}
    first, second = result.modules[:2]
    assert first.module == SENSITIVE
    assert first.size > 2 * second.size
    assert all(row.saved > 0 for row in result.modules if not row.own)
    assert first.error is not None
    assert first.error.sqnr_db == pytest.approx(-20 * math.log10(first.size), rel=1e-6)
    sizes = [row.size for row in result.modules]
    assert sizes == sorted(sizes, reverse=True)
    assert result.whole.size > 0.5 * first.size


def test_the_default_depth_has_several_modules(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    result = modelexport.measure_sensitivity(path)
    assert len(result.modules) >= 4
    assert {"encoder.layer.0", "encoder.layer.1"} <= {row.module for row in result.modules}
    shallow = modelexport.measure_sensitivity(path, depth=1)
    assert {row.module for row in shallow.modules} == {"embeddings", "encoder", "pooler"}
    saved = {row.module: row.saved for row in result.modules}
    assert sum(saved.values()) == pytest.approx(result.whole.saved, rel=0.01)


def test_patterns_choose_the_modules(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    result = modelexport.measure_sensitivity(path, only=["encoder.layer.?", "pooler"])
    assert {row.module for row in result.modules} == {
        "encoder.layer.0",
        "encoder.layer.1",
        "pooler",
    }
    assert result.depth is None
    deeper = modelexport.measure_sensitivity(path, only="encoder.layer.0", depth=3)
    assert all(row.module.startswith("encoder.layer.0.") for row in deeper.modules)
    with pytest.raises(modelexport.ArgumentError, match="converts none"):
        modelexport.measure_sensitivity(path, only="pooler.activation")


@pytest.mark.parametrize("to", ["int8-dynamic", "int8-static"])
def test_a_limit_keeps_the_sensitive_module_only(to: str, tmp_path: Path) -> None:
    path, out = export_stack(), tmp_path / "q.onnx"
    whole = modelexport.quantize(path, out, to=to)
    limit = whole.error.size / 3
    report = modelexport.quantize(path, out, to=to, max_error=limit)
    assert any(text.startswith("the limit holds on ") for text in report.notes)
    assert report.error.size <= limit
    assert [kept.module for kept in report.kept] == [SENSITIVE]
    assert report.modules > 1
    (kept,) = report.kept
    assert kept.relative is not None
    assert kept.relative > limit
    assert kept.bytes > 0
    assert report.converted > 0


@pytest.mark.parametrize(("name", "to"), [
    ("bert", "int8-dynamic"), ("bert", "int8-static"), ("bert", "float16"),
    ("resnet", "int8-dynamic"), ("resnet", "int8-static"),
])  # fmt: skip
def test_a_limit_is_met_on_real_structure(name: str, to: str, tmp_path: Path) -> None:
    path, _, _ = export(name, "fx", tmp_path)
    whole = modelexport.measure_sensitivity(path, to=to)
    limit = max(whole.whole.size * 0.8, 1.01 * min(row.size for row in whole.modules))
    report = modelexport.quantize(path, tmp_path / "q.onnx", to=to, max_error=limit)
    assert report.error.size <= limit
    assert 0 < len(report.kept) < report.modules
    assert modelexport.validate(tmp_path / "q.onnx", check_consistency=True).valid


def test_a_limit_that_needs_nothing_keeps_nothing(tmp_path: Path) -> None:
    report = modelexport.quantize(export_stack(), tmp_path / "q.onnx", max_error=10)
    assert report.kept == ()
    assert report.modules == 7
    assert report.in_float == 0


def test_a_limit_that_cannot_be_met_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(modelexport.ArgumentError) as caught:
        modelexport.quantize(export_stack(), tmp_path / "q.onnx", max_error=1e-9)
    assert "the smallest is 0.00" in str(caught.value)
    assert not (tmp_path / "q.onnx").exists()


class _StopError(Exception):
    pass


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    results, path = tmp_path / "results.json", export_stack()
    steps: list[str] = []

    def interrupt(step: str) -> None:
        if step.startswith("module 4 of 7"):
            raise _StopError

    with pytest.raises(_StopError):
        modelexport.measure_sensitivity(path, resume=results, on_step=interrupt)
    (recorded,) = msgspec.json.decode(results.read_bytes()).values()
    assert len(recorded) == 4, "three modules, and the whole"
    resumed = modelexport.measure_sensitivity(path, resume=results, on_step=steps.append)
    assert "3 of 7 modules are already measured" in steps
    assert sum(step.startswith("module ") for step in steps) == 4
    assert any("left" in step for step in steps)
    assert resumed == modelexport.measure_sensitivity(path)
    again: list[str] = []
    assert modelexport.measure_sensitivity(path, resume=results, on_step=again.append) == resumed
    assert not any(step.startswith("module ") for step in again)


@pytest.mark.parametrize("options", [{"to": "float16"}, {"inputs": "other"}, {"path": "other"}])
def test_results_of_another_model_or_option_are_not_used(
    options: dict[str, Any], tmp_path: Path
) -> None:
    results, path = tmp_path / "results.json", export_stack()
    modelexport.measure_sensitivity(path, resume=results, only="head")
    steps: list[str] = []
    given: dict[str, Any] = {"path": path, **options}
    if "inputs" in options:
        (name,) = modelexport.load(path).graph.inputs
        given["inputs"] = {name: np.ones((4, 32), np.float32)}
    if options.get("path") == "other":
        given["path"] = export_stack("fx")
    modelexport.measure_sensitivity(resume=results, only="head", on_step=steps.append, **given)
    assert sum(step.startswith("module ") for step in steps) == 1
    assert len(msgspec.json.decode(results.read_bytes())) == 2


@pytest.mark.parametrize("content", [b'{"a": 1}', b'{"\xff": {}}', b'{"a":' * 5000])
def test_a_file_of_other_content_is_refused(content: bytes, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_bytes(content)
    with pytest.raises(modelexport.FormatError, match="not a file of results"):
        modelexport.measure_sensitivity(export_stack(), resume=results)
    assert results.read_bytes() == content
