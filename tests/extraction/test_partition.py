"""Partition of a module: the extracted models, their inputs and outputs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import modelexport
from exports import export
from modelexport.errors import ArgumentError, FormatError


def children_of(path: Path, module: str = "") -> list[tuple[str, int | None]]:
    return [
        (extracted.record.module, extracted.record.call)
        for extracted in modelexport.partition(path, module)
    ]


def test_children_in_the_order_of_execution(bert: Path) -> None:
    assert children_of(bert) == [
        ("", None),
        ("embeddings", None),
        ("encoder", None),
        ("pooler", None),
    ]
    layers = [("encoder.layer.0", None), ("encoder.layer.1", None)]
    assert children_of(bert, "encoder") == layers, "a list is replaced by its children"
    assert children_of(bert, "encoder.layer") == layers


def test_one_extracted_model_for_each_call(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "htp", tmp_path)
    calls = [
        extracted.record.call
        for extracted in modelexport.partition(path)
        if extracted.record.module == "block"
    ]
    assert calls == [0, 1, 2]
    inner = [extracted.record.module for extracted in modelexport.partition(path, "block", call=1)]
    assert "block.fc" in inner


def test_inputs_are_outputs_of_earlier_models(bert: Path) -> None:
    have = {value.name for value in modelexport.load(bert).proto.graph.input}
    for extracted in modelexport.partition(bert):
        assert {value.name for value in extracted.record.inputs} <= have
        have |= {value.name for value in extracted.record.outputs}
    assert {value.name for value in modelexport.load(bert).proto.graph.output} <= have


def test_a_call_that_another_module_interrupts_is_split(tmp_path: Path) -> None:
    path, _, _ = export("lent_modules", "fx", tmp_path)
    parts = [
        (p.record.call, p.record.part)
        for p in modelexport.partition(path)
        if p.record.module == "runner"
    ]
    assert parts == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.regression
def test_a_node_that_consumes_its_own_output_is_refused(bert: Path) -> None:
    model = onnx.load(bert)
    last = model.graph.node[-1]
    last.input.append(last.output[0])
    with pytest.raises(FormatError, match="in no order that runs"):
        list(modelexport.partition(model))


def test_an_unknown_module(bert: Path) -> None:
    with pytest.raises(ArgumentError, match="near it"):
        list(modelexport.partition(bert, "encodr"))
