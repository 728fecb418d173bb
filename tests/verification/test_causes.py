"""verify() names the module that causes a difference, and those that inherit it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import modelexport
from exports import EXPORTER, export
from modelexport.verification.records import (
    FAILED,
    Blame,
    Verification,
)
from verification.blocks import OwnWork, TwoBlocks
from zoo import distinct

pytestmark = pytest.mark.integration


def damaged(model: nn.Module, layer: str, by: float = 0.3) -> nn.Module:
    """Copy a model and change a weight of one layer, so that the file is wrong for the copy."""
    other = copy.deepcopy(model)
    weight = other.get_submodule(layer).get_parameter("weight")
    with torch.no_grad():
        weight.add_(by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return other


def blames(result: Verification) -> dict[str, Blame | None]:
    return {parity.module: parity.blame for parity in result.modules if parity.outcome in FAILED}


@pytest.mark.must
@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("bert", "encoder.layer.0.output.dense"),
        ("bert", "embeddings.word_embeddings"),
        ("llama", "layers.1.mlp.up_proj"),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.k"),
        ("vit", "layers.0.mlp.fc1"),
    ],
)
def test_a_damaged_layer_is_named_and_its_successors_inherit(
    name: str, layer: str, strategy: str, tmp_path: Path
) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    if layer not in dict(model.named_modules()):
        layer = next(
            path for path, module in model.named_modules() if isinstance(module, nn.Linear)
        )
    result = modelexport.verify(damaged(model, layer), inputs, path)
    assert not result.agrees
    assert result.first == layer
    assert result.causes == (layer,)
    others = blames(result)
    assert others.pop(layer) == Blame.HERE
    for other, blame in others.items():
        around = not other or layer.startswith(f"{other}.")
        assert blame == (Blame.INSIDE if around else Blame.INHERITED), other
    assert Blame.INHERITED in others.values()


def test_a_weight_that_is_damaged_in_the_file(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "htp", tmp_path)
    proto = onnx.load(path)
    bias = next(
        t for t in proto.graph.initializer if t.name == "encoder.layer.1.attention.self.value.bias"
    )
    bias.raw_data = (onnx.numpy_helper.to_array(bias) + 1).astype(np.float32).tobytes()
    onnx.save(proto, path)
    result = modelexport.verify(model, inputs, path)
    assert result.first == "encoder.layer.1.attention.self.value"
    assert result.causes == (result.first,)
    worst = next(parity for parity in result.modules if parity.module == result.first)
    assert worst.max_abs == pytest.approx(1, abs=1e-3)
    assert worst.own_abs == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("strategy", EXPORTER)
def test_a_module_s_own_work_between_its_children(strategy: str, tmp_path: Path) -> None:
    model = distinct(OwnWork())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy=strategy)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("scale").add_(1)
    result = modelexport.verify(other, (x,), tmp_path / "m.onnx")
    assert blames(result) == {"second": Blame.INHERITED, "": Blame.HERE}


@pytest.mark.parametrize("strategy", EXPORTER)
def test_each_call_of_a_reused_module_is_looked_at(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("block_three_times", strategy, tmp_path)
    result = modelexport.verify(damaged(model, "block.fc"), inputs, path)
    calls = {
        (parity.module, parity.call): parity.blame
        for parity in result.modules
        if parity.module == "block.fc"
    }
    assert calls == {("block.fc", call): Blame.HERE for call in range(3)}
    blocks = {parity.blame for parity in result.modules if parity.module == "block"}
    assert blocks == {Blame.INSIDE}


class RunsInAnyOrder(nn.Module):
    """Runs a module once per kind, in an order that a set would give."""

    def __init__(self, kinds: tuple[float, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        by_kind = {kind: self.block(x * kind) for kind in self.kinds}
        return by_kind[1.0] + 2 * by_kind[3.0] + 3 * by_kind[5.0]


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
def test_calls_in_another_order_than_in_the_export(strategy: str, tmp_path: Path) -> None:
    model, inputs = RunsInAnyOrder((1.0, 3.0, 5.0)).eval(), torch.randn(2, 4)
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    for kinds in ((5.0, 3.0, 1.0), (3.0, 5.0, 1.0)):
        other = RunsInAnyOrder(kinds).eval()
        other.load_state_dict(model.state_dict())
        result = modelexport.verify(other, inputs, tmp_path / "m.onnx")
        assert result.agrees, result.causes
        assert sorted(one.call for one in result.modules if one.module == "block") == [0, 1, 2]
        wrong = modelexport.verify(damaged(other, "block.0"), inputs, tmp_path / "m.onnx")
        assert not wrong.agrees


class Combines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q * self.weight - k.exp()


class GivesTwo(nn.Module):
    """The child takes two similar values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.child = Combines()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.child(y + 0.3, y - 0.3)


class SharesWork(nn.Module):
    """An exporter computes the sigmoid of both children once."""

    class Half(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.one, self.two = self.Half(2.0), self.Half(3.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.one(y) + self.two(y)


@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize("kind", [GivesTwo, SharesWork])
def test_inputs_of_a_module_are_not_guessed(
    kind: type[nn.Module], strategy: str, tmp_path: Path
) -> None:
    model, x = kind(), torch.randn(2, 4)
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy=strategy)
    with torch.no_grad():
        model.get_parameter("fc.bias").add_(1)
    assert modelexport.verify(model, (x,), tmp_path / "m.onnx").causes == ("fc",)


def test_a_child_s_damage_does_not_hide_its_parent_s(tmp_path: Path) -> None:
    model = distinct(TwoBlocks())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy="fx")
    with torch.no_grad():
        model.get_parameter("one.scale").add_(1)
        model.get_parameter("one.first.weight")[0, 0] += 2
    result = modelexport.verify(model, (x,), tmp_path / "m.onnx")
    assert set(result.causes) == {"one", "one.first"}
    narrowed = modelexport.verify(model, (x,), tmp_path / "m.onnx", module="one")
    assert blames(narrowed) == {
        path: blame for path, blame in blames(result).items() if path.startswith("one")
    }
