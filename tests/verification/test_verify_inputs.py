"""The inputs that verify() runs a model with: as given, further ones, and random ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modelexport
from exports import export
from modelexport.capture.inputs import ModelInputs
from modelexport.errors import ArgumentError, ArgumentTypeError
from modelexport.verification.pytorch_run import random_input_sets
from zoo import ZOO

pytestmark = pytest.mark.integration


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    path, model, _ = export("block_three_times", "fx", tmp_path)
    with pytest.raises(ArgumentError, match="use the inputs that the file was exported with"):
        modelexport.verify(model, (torch.ones(3, 8),), path)


class LeavesOneOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        return self.fc(p) - r


def test_inputs_that_names_do_not_tell_apart_are_not_guessed(tmp_path: Path) -> None:
    model, inputs = LeavesOneOut(), tuple(torch.randn(2, 4) for _ in range(3))
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    with pytest.raises(ArgumentError, match="do not tell which"):
        modelexport.verify(model, inputs, tmp_path / "m.onnx")
    named = dict(zip("pqr", inputs, strict=True))
    modelexport.export_model(model, named, tmp_path / "m.onnx", strategy="htp")
    assert modelexport.verify(model, named, tmp_path / "m.onnx").agrees


class WrongForLarge(nn.Module):
    """Only values above 2 tell the two apart."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.first = nn.Hardtanh(-4.0, most)
        self.second = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.regression
def test_other_inputs_find_what_the_example_hides(tmp_path: Path) -> None:
    small, large = torch.zeros(2, 4), torch.full((2, 4), 5.0)
    wide = torch.tensor([[-3.0, 0.0, 1.0, 1.9]] * 2)
    path = tmp_path / "m.onnx"
    modelexport.export_model(WrongForLarge(2.0), (small,), path, strategy="fx")
    model = WrongForLarge(3.0)
    assert modelexport.verify(model, small, path).agrees
    result = modelexport.verify(model, small, path, further_inputs=[wide, large])
    assert result.runs == 3
    assert not result.agrees
    assert result.causes == ("first",)
    runs = {parity.module: parity.run for parity in result.modules}
    assert runs == {"first": 2, "second": 2, "": 2}
    assert len(result.modules) == 3


@pytest.mark.regression
def test_random_inputs_are_seeded_and_like_the_example(tmp_path: Path) -> None:
    model, inputs = ZOO["block_three_times"]()
    path = tmp_path / "m.onnx"
    modelexport.export_model(model.eval(), inputs, path, strategy="fx")
    result = modelexport.verify(model, inputs, path, random_inputs=3, seed=5)
    assert result.agrees
    assert result.runs == 4
    assert result == modelexport.verify(model, inputs, path, random_inputs=3, seed=5)
    given = ModelInputs(
        (torch.tensor([[3, 9, 7]]), torch.ones(1, 3, dtype=torch.int64)),
        {
            "mask": torch.tensor([0.5, -math.inf]),
            "half": torch.ones(64, dtype=torch.float16),
            "flag": True,
        },
    )
    sets = random_input_sets(given, 20, 1)
    for drawn in sets:
        tokens, ones = drawn.args
        assert tokens.dtype == torch.int64
        assert tokens.shape == (1, 3)
        assert tokens.min() >= 3
        assert tokens.max() <= 9
        assert torch.equal(ones, given.args[1])
        assert torch.isinf(drawn.kwargs["mask"]).tolist() == [False, True]
        assert drawn.kwargs["half"].dtype == torch.float16
        assert drawn.kwargs["flag"] is True
    assert len({tuple(drawn.args[0].flatten().tolist()) for drawn in sets}) > 1


@pytest.mark.regression
def test_inputs_that_cannot_be_drawn_or_fed(tmp_path: Path) -> None:
    path, model, inputs = export("block_three_times", "fx", tmp_path)
    with pytest.raises(
        ArgumentError,
        match=r"run 2 of 2: the file's input .*: expected \[.*\], got \[3,8\] .*--dynamic",
    ):
        modelexport.verify(model, inputs, path, further_inputs=[torch.ones(3, 8)])
    with pytest.raises(ArgumentError, match="random_inputs must be 0 or more, got -1"):
        modelexport.verify(model, inputs, path, random_inputs=-1)
    with pytest.raises(ArgumentTypeError, match="seed must be a whole number, got a str"):
        modelexport.verify(model, inputs, path, random_inputs=1, seed="a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no input can vary"):
        random_input_sets(ModelInputs((torch.zeros(2, 3, dtype=torch.int64),), {}), 1, 0)
