"""The map after real tools: complete, byte for byte what the tool wrote, and true by value.

`make tools` runs every tool on every export.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import modelexport
from architectures import ARCHITECTURES
from exports import cases, export
from retag.oracles import (
    Judgement,
    Values,
    example_values,
    judge_by_value,
    judge_by_weight,
    judge_quantized,
    judge_without_names,
)
from retag.tools import FLOAT_TOOLS, INT_TOOLS, TOOLS, apply
from zoo import ZOO

ZOO_TOOLS = tuple(TOOLS) if os.environ.get("ALL_TOOLS") else ("ort-all", "onnxslim", "int8-qdq")
WEIGHT_MODELS = ("bert", "resnet", "t5", "swin")


def check_retagged(original: Path, changed: Path, out: Path, inputs: Values) -> None:
    """Retag a file, and check what is true of every retagged file."""
    report = modelexport.retag(original, changed, out, inputs=inputs)
    retagged = modelexport.load(out)
    assert None not in retagged.tags
    assert report.nodes == len(retagged.tags) == sum(report.methods.values())
    back = modelexport.strip(out, out.with_name("back.onnx"))
    assert back.read_bytes() == changed.read_bytes()
    checks = modelexport.validate(out, check_consistency=True).checks
    assert checks == {
        "onnx": modelexport.validate(changed).checks["onnx"],  # not every tool sorts its nodes
        "tags": "passed",
        "consistency": "passed",
    }


def share_right(judgements: list[Judgement]) -> float:
    judged = sum(judgement.judged for judgement in judgements)
    assert judged
    return 1 - sum(len(judgement.wrong) for judgement in judgements) / judged


def tools_for(name: str, strategy: str) -> list[str]:
    """Return the tools for an export: each tool runs on one of the two exports of a model.

    With ALL_TOOLS=1, as `make tools` sets it, each runs on both.
    """
    if os.environ.get("ALL_TOOLS"):
        return list(TOOLS)
    turn = list(ARCHITECTURES).index(name) + (strategy == "fx")
    return list(TOOLS)[turn % 2 :: 2]


@pytest.mark.parametrize(("name", "strategy"), cases(*ARCHITECTURES))
def test_architectures(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    matched, others = example_values(path, model, inputs, strategy)
    without_names, quantized = [], []
    for tool in tools_for(name, strategy):
        changed, out = tmp_path / f"{tool}.onnx", tmp_path / f"{tool}-tagged.onnx"
        if not apply(tool, path, changed, matched):
            assert tool in INT_TOOLS or tool == "transformers-0"
            continue
        check_retagged(path, changed, out, matched)
        assert judge_by_value(path, out, others).wrong == [], tool
        if tool in FLOAT_TOOLS and tool != "renamed":
            without_names.append(judge_without_names(path, changed, matched, tmp_path))
        elif tool in INT_TOOLS:
            quantized.append(judge_quantized(path, out, others))
    # For a single model; over all of them, 0.995 and 0.99 are the least that is acceptable.
    assert share_right(without_names) >= 0.99
    assert share_right(quantized) >= 0.97


@pytest.mark.parametrize(("name", "strategy"), cases(*ZOO))
def test_zoo(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    matched, others = example_values(path, model, inputs, strategy)
    for tool in ZOO_TOOLS:
        changed, out = tmp_path / f"{tool}.onnx", tmp_path / f"{tool}-tagged.onnx"
        if apply(tool, path, changed, matched):
            check_retagged(path, changed, out, matched)
            assert judge_by_value(path, out, others).wrong == [], tool


@pytest.mark.parametrize(("name", "strategy"), cases(*WEIGHT_MODELS))
def test_the_owner_of_a_changed_weight(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    matched, _ = example_values(path, model, inputs, strategy)
    judged = 0
    for seed, tool in enumerate(TOOLS):
        changed, out = tmp_path / f"{tool}.onnx", tmp_path / f"{tool}-tagged.onnx"
        if apply(tool, path, changed, matched):
            modelexport.retag(path, changed, out, inputs=matched)
            judgement = judge_by_weight(tool, path, changed, out, matched, seed)
            judged += judgement.judged
            assert judgement.wrong == [], tool
    assert judged >= len(FLOAT_TOOLS)
