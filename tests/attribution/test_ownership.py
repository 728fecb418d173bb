"""Which module owns a node where the exporter removed operations around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modelexport

pytestmark = pytest.mark.regression


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def swap(x: Tensor) -> Tensor:
    return x.transpose(2, 3)


def owners(model: nn.Module, inputs: Tensor, strategy: str, folder: Path) -> dict[str, list[str]]:
    """Export a model and return the operators of each module."""
    path = folder / "model.onnx"
    modelexport.export_model(model.eval(), inputs, path, strategy=strategy)
    found: dict[str, list[str]] = {}
    for node, tag in modelexport.load(path).items():
        assert tag is not None
        found.setdefault(tag.hierarchy_module, []).append(node.op_type)
    return found


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize(
    ("first", "operator"),
    [
        (nn.BatchNorm2d(3), "BatchNormalization"),
        (Apply(lambda x: x * 3), "Mul"),
        (Apply(lambda x: torch.relu(x) / 2), "Div"),
    ],
    ids=["norm", "constant", "quotient"],
)
def test_cancelled_transposes_do_not_move_the_node_before_them(
    first: nn.Module, operator: str, strategy: str, tmp_path: Path
) -> None:
    within = nn.Sequential(first, Apply(lambda x: swap(swap(x)) + 1))
    across = nn.Sequential(first, Apply(swap), Apply(swap), nn.ReLU())
    for model in (within, across):
        found = owners(model, torch.rand(2, 3, 8, 8), strategy, tmp_path)
        assert operator in found["0"]
        (extracted, _) = modelexport.extract(tmp_path / "model.onnx", "0")
        assert operator in [node.op_type for node in extracted.graph.node]


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_of_three_transposes_the_last_one_remains(strategy: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), Apply(swap), Apply(swap), Apply(swap))
    found = owners(model, torch.rand(2, 3, 8, 8), strategy, tmp_path)
    assert found == {"0": ["Relu"], "3": ["Transpose"]}


def repeat(x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(x) * 2
    return x


def repeat_by_size(x: Tensor) -> Tensor:
    for _ in range(x.size(0)):
        x = torch.relu(x) * 2
    return x


def repeat_while_positive(x: Tensor) -> Tensor:
    steps = 0
    while steps < 3 and bool(x.sum() > 0):
        x = torch.relu(x) * 2
        steps += 1
    return x


@pytest.mark.parametrize("function", [repeat, repeat_by_size, repeat_while_positive])
def test_a_scripted_loop_belongs_to_the_module_that_called_it(
    function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        loop = Apply(torch.jit.script(function))
    flat = nn.Sequential(nn.Linear(4, 4), loop, nn.Linear(4, 4))
    found = owners(flat, torch.rand(2, 4), "htp", tmp_path)
    assert found["0"] == found["2"] == ["Gemm"]
    assert found.keys() == {"0", "1", "2"}
    assert "Loop" in found["1"]
    nested = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(loop, nn.Tanh())
    )
    found = owners(nested, torch.rand(2, 4), "htp", tmp_path)
    assert found["0.1"] == ["Relu"]
    assert "Loop" in found["1.0"]
    assert found["1.1"] == ["Tanh"]


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_model_without_operations(strategy: str, tmp_path: Path) -> None:
    """The exporter connects the input to the output with a node that no module made."""
    assert owners(nn.Identity(), torch.rand(2, 3), strategy, tmp_path) == {"": ["Identity"]}
    assert modelexport.validate(tmp_path / "model.onnx", check_consistency=True).findings == ()


def test_a_name_that_looks_like_a_repeated_call(tmp_path: Path) -> None:
    """torch marks the second call of a module so; it is no evidence for another module here."""
    model = nn.Sequential()
    model.add_module("@1", nn.Linear(3, 3))
    model.add_module("act", nn.Tanh())
    found = owners(model, torch.rand(2, 3), "fx", tmp_path)
    assert found == {"@1": ["Gemm"], "act": ["Tanh"]}
    assert not any(
        tag and tag.hierarchy_covers for tag in modelexport.load(tmp_path / "model.onnx").tags
    )
