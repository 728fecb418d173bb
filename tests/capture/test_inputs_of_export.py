"""Example inputs as callers pass them: accepted, bound to forward's parameters, or rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modelexport
from modelexport.capture.inputs import ModelInputs, bind_inputs, parse_inputs
from modelexport.errors import ArgumentTypeError
from zoo import ZOO

pytestmark = pytest.mark.sanity
A, B, C = torch.randn(3, 1, 4).unbind()


@pytest.mark.parametrize(
    "inputs",
    [torch.ones(1), (torch.ones(1), 2), [torch.ones(1)], {"x": torch.ones(1), "flag": True}],
)
def test_accepted_inputs(inputs: object) -> None:
    read = parse_inputs(inputs)
    assert len(read.args) + len(read.kwargs) == (
        1 if isinstance(inputs, torch.Tensor) else len(inputs)
    )


@pytest.mark.parametrize(
    "inputs", ["text", 3, None, np.ones(2), (np.ones(2),), {"x": object()}, {1: torch.ones(1)}]
)
def test_rejected_inputs(inputs: object) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        parse_inputs(inputs)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("strategy", "order"), [("fx", ["second", "first"]), ("htp", ["first", "second"])]
)
def test_keyword_inputs_in_any_order(strategy: str, order: list[str], tmp_path: Path) -> None:
    """Inputs of the graph keep the caller's order with dynamo, and forward's with torch.jit."""
    model, inputs = ZOO["keywords_out_of_order"]()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert [value.name for value in report.hierarchy.export.inputs] == order
    assert modelexport.verify(model, inputs, report.onnx_path).agrees
    named = modelexport.export_model(
        model, inputs, tmp_path / "n.onnx", strategy=strategy, input_names=["one", "two"]
    )
    assert modelexport.verify(model, inputs, named.onnx_path).agrees


def test_a_dict_at_the_end_holds_keywords_if_forward_takes_them() -> None:
    model, (scale, fields) = ZOO["dict_at_the_end"]()
    assert bind_inputs(model, ModelInputs((scale, fields), {})).args == (scale, fields)
    assert bind_inputs(model, ModelInputs((scale, fields, {}), {})).args == (scale, fields)
    keywords = bind_inputs(model, ModelInputs(({"scale": scale, "fields": fields},), {}))
    assert keywords == ModelInputs((), {"scale": scale, "fields": fields}, named=False)
    assert keywords.names is None
    assert ModelInputs((scale, fields), {}).for_torch == (scale, fields, {})


class TakesBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor | None = None, *, c: Tensor | None = None) -> Tensor:
        y = self.fc(a) if b is None else self.fc(a) * b
        return y if c is None else y - c


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ((A, {"b": B}), 2),
        (((A,), {"b": B}), 2),
        (((A, B), {"c": C}), 3),
        ((A, B, {"c": C}), 3),
        (((), {"a": A, "c": C}), 2),
    ],
)
def test_positional_and_keyword_inputs_together(
    strategy: str, inputs: object, count: int, tmp_path: Path
) -> None:
    model = TakesBoth()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert len(report.hierarchy.export.inputs) == count
    assert modelexport.verify(model, inputs, report.onnx_path).agrees


class TakesATuple(nn.Module):
    def forward(
        self, pair: tuple[Tensor, Tensor], scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return torch.cat(pair, 1) * scale


def test_a_tuple_that_the_model_takes_stays_a_tuple() -> None:
    called = bind_inputs(TakesATuple(), ModelInputs(((A,), {"scale": C}), {}))
    assert called == ModelInputs(((A,),), {"scale": C}, named=False)
