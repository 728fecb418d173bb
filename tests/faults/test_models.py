"""Models that fail half way or change themselves: they and the earlier output stay as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modelexport
from modelexport.errors import ExportError
from proof import hooks_of

pytestmark = [pytest.mark.must, pytest.mark.integration]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.spare = [nn.Linear(4, 4)]
        self.seen: list[int] = []
        self.register_buffer("count", torch.zeros(()))


class RaisesHalfWay(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(1)
        self.first(x)
        raise RuntimeError("half way")


class InterruptedHalfWay(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        self.first(x)
        raise KeyboardInterrupt


class ReplacesModules(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.first = self.spare.pop()
        self.added = nn.ReLU()
        y = self.added(self.first(x))
        for layer in self.layers:
            y = layer(y)
        return y


class DropsModules(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        last = self.layers[-1]
        del self.layers[-1]
        self.seen.append(len(self.layers))
        return last(y)


class AddsHooks(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.first.register_forward_hook(lambda module, args, output: output * 2)
        return self.first(x)


REFUSED_BY_TORCH = {("htp", ReplacesModules), ("htp", DropsModules)}


def state(model: nn.Module) -> list[object]:
    """Describe a model: modules, parameters, buffers, values, hooks and attributes."""
    return [
        [(name, id(module), module.training) for name, module in model.named_modules()],
        [(name, id(tensor), tensor.clone().tolist()) for name, tensor in model.named_parameters()],
        [(name, id(tensor), tensor.clone().tolist()) for name, tensor in model.named_buffers()],
        [
            {k: list(v) if isinstance(v, list) else id(v) for k, v in m.__dict__.items()}
            for m in model.modules()
        ],
        hooks_of(model),
    ]


@pytest.mark.parametrize("kind", [RaisesHalfWay, InterruptedHalfWay])
@pytest.mark.parametrize("strategy", ["auto", "fx", "htp"])
def test_a_forward_that_ends_half_way(kind: type[Base], strategy: str, tmp_path: Path) -> None:
    modelexport.export_model(nn.Linear(4, 4), torch.ones(1, 4), tmp_path / "m.onnx", strategy="htp")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = kind().train()
    was = state(model)
    with pytest.raises((ExportError, KeyboardInterrupt)):
        modelexport.export_model(model, torch.ones(1, 4), tmp_path / "m.onnx", strategy=strategy)
    assert state(model) == was
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", [ReplacesModules, DropsModules, AddsHooks])
@pytest.mark.parametrize("strategy", ["auto", "htp"])
def test_a_model_that_changes_its_own_modules(
    kind: type[Base], strategy: str, tmp_path: Path
) -> None:
    model = kind().train()
    was = state(model)
    if (strategy, kind) in REFUSED_BY_TORCH:
        with pytest.raises(ExportError):
            modelexport.export_model(
                model, torch.ones(1, 4), tmp_path / "m.onnx", strategy=strategy
            )
        assert list(tmp_path.iterdir()) == []
    else:
        report = modelexport.export_model(
            model, torch.ones(1, 4), tmp_path / "m.onnx", strategy=strategy
        )
        assert report.coverage == 1.0
        assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid
    assert state(model) == was
