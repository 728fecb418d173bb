"""A module taken apart: which pieces there are, and what they take and give."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import modelexport
from exports import export
from modelexport.errors import ArgumentError, FormatError


def told(path: Path, module: str = "") -> list[tuple[str, int | None]]:
    return [
        (piece.record.module, piece.record.call) for piece in modelexport.partition(path, module)
    ]


def test_children_in_the_order_of_execution(bert: Path) -> None:
    assert told(bert) == [("", None), ("embeddings", None), ("encoder", None), ("pooler", None)]
    layers = [("encoder.layer.0", None), ("encoder.layer.1", None)]
    assert told(bert, "encoder") == layers, "a list stands for what is in it"
    assert told(bert, "encoder.layer") == layers


def test_one_piece_for_each_call(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "htp", tmp_path)
    calls = [
        piece.record.call for piece in modelexport.partition(path) if piece.record.module == "block"
    ]
    assert calls == [0, 1, 2]
    inner = [piece.record.module for piece in modelexport.partition(path, "block", call=1)]
    assert "block.fc" in inner


def test_what_one_takes_another_gives(bert: Path) -> None:
    have = {value.name for value in modelexport.load(bert).proto.graph.input}
    for piece in modelexport.partition(bert):
        assert {value.name for value in piece.record.inputs} <= have
        have |= {value.name for value in piece.record.outputs}
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
def test_a_node_that_reads_what_it_makes_is_refused(bert: Path) -> None:
    model = onnx.load(bert)
    last = model.graph.node[-1]
    last.input.append(last.output[0])
    with pytest.raises(FormatError, match="in no order that runs"):
        list(modelexport.partition(model))


def test_a_name_that_is_wrong(bert: Path) -> None:
    with pytest.raises(ArgumentError, match="near it"):
        list(modelexport.partition(bert, "encodr"))
