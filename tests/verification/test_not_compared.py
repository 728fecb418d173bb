"""verify() lists the modules and results that it does not compare."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import modelexport
from exports import EXPORTER, export
from modelexport.verification.records import (
    Outcome,
)
from verification.blocks import TwoBlocks
from zoo import distinct

pytestmark = pytest.mark.integration


class Branches(nn.Module):
    """Two branches of which each is a module without operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.yes = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.no = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return torch.cond(y.sum() > 0, self.yes, self.no, (y,))


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
def test_modules_in_the_subgraph_of_a_conditional_are_not_compared(tmp_path: Path) -> None:
    model, x = distinct(Branches()), torch.randn(2, 4)
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy="fx")
    result = modelexport.verify(model, (x,), tmp_path / "m.onnx")
    assert result.agrees
    assert (result.modules_compared, result.modules_total) == (2, 8)
    assert set(result.not_compared) == {"yes", "yes.0", "yes.1", "no", "no.0", "no.1"}
    assert set(result.not_compared.values()) == {
        "its nodes are in the subgraph of a conditional or a loop"
    }
    narrowed = modelexport.verify(model, (x,), tmp_path / "m.onnx", module="yes")
    assert not narrowed.agrees
    assert narrowed.modules_compared == 0


@pytest.mark.regression
def test_a_result_that_is_not_in_the_file_is_not_compared(tmp_path: Path) -> None:
    """Rename one tensor: the module that returns it does not agree, it is not compared."""
    model, x = distinct(TwoBlocks()), torch.randn(2, 8)
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, (x,), path, strategy="fx")
    records = modelexport.load(path).modules
    (name,) = records["one.first"].results[0]
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.input[:] = ["renamed" if value == name else value for value in node.input]
        node.output[:] = ["renamed" if value == name else value for value in node.output]
    onnx.save(proto, path)
    result = modelexport.verify(model, (x,), path)
    assert result.agrees
    assert result.not_compared == {"one.first": f"its result {name!r} is not in the file anymore"}
    assert (result.modules_compared, result.modules_total) == (6, 7)
    assert {f.module for f in result.modules if f.outcome == Outcome.AGREES} == set(records) - {
        "one.first"
    }
    nothing = modelexport.verify(model, (x,), path, module="one.first")
    assert not nothing.agrees
    assert nothing.modules_compared == 0


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
def test_removed_results_are_reported(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("lstm", strategy, tmp_path)
    result = modelexport.verify(model, inputs, path)
    assert result.partly_compared == ("lstm",)
    (parity,) = [parity for parity in result.modules if parity.module == "lstm"]
    assert len(parity.tensors) < parity.results
    assert parity.note == f"{len(parity.tensors)} of {parity.results} results compared"


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
def test_every_module_that_ran_is_compared_or_listed(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("bert", strategy, tmp_path)
    result = modelexport.verify(model, inputs, path)
    ran = {name for name, record in modelexport.load(path).modules.items() if record.calls}
    agreeing = {parity.module for parity in result.modules if parity.outcome == Outcome.AGREES}
    assert agreeing | set(result.not_compared) == ran
    assert agreeing.isdisjoint(result.not_compared)
    assert result.modules_compared == len(agreeing)
    assert result.modules_total == len(ran)
    assert all(result.not_compared.values())
