"""How models are called for an export, and that they come back as they were."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modelexport
from architectures import ARCHITECTURES
from modelexport.baseline.calling import OutputShape, preserved, read_inputs
from modelexport.errors import ArgumentTypeError, ExportError
from proof import hooks_of
from zoo import ZOO

pytestmark = pytest.mark.sanity


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(1))
        self.seen: object = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = self.fc(x)
        return self.drop(self.seen)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.fc.mark = y
        raise RuntimeError("this model cannot run")


@pytest.mark.must
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_the_model_leaves_as_it_came(strategy: str, tmp_path: Path) -> None:
    model = Stateful()
    model.drop.eval()
    seen: list[Tensor] = []
    model.fc.register_forward_hook(lambda module, args, output: seen.append(output))
    before = [dict(module.__dict__) for module in model.modules()]
    modelexport.export_model(model, (torch.randn(2, 4),), tmp_path / "m.onnx", strategy=strategy)
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert model.training
    assert not model.drop.training
    assert model.count.item() == 0
    assert model.seen is None
    assert hooks_of(model) == 1


@pytest.mark.must
@pytest.mark.parametrize("strategy", ["fx", "htp", "auto"])
def test_also_after_a_failed_export(strategy: str, tmp_path: Path) -> None:
    model = Breaks()
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ExportError, match="this model cannot run"):
        modelexport.export_model(model, (torch.randn(2, 4),), tmp_path / "m.onnx", strategy=strategy)
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert hooks_of(model) == 0
    assert list(tmp_path.iterdir()) == []


def test_preserved_restores_what_forward_replaces() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with preserved(model):
        model.weight = nn.Parameter(torch.zeros(2, 2))
        model.register_buffer("extra", torch.ones(1))
        model.note = 1  # type: ignore[assignment]
    assert model.weight is weight
    assert not hasattr(model, "extra")
    assert not hasattr(model, "note")


@pytest.mark.parametrize(
    "inputs", [torch.ones(1), (torch.ones(1), 2), [torch.ones(1)], {"x": torch.ones(1), "flag": True}]
)
def test_inputs_that_are_taken(inputs: object) -> None:
    read = read_inputs(inputs)
    assert len(read.args) + len(read.kwargs) == (1 if isinstance(inputs, torch.Tensor) else len(inputs))


@pytest.mark.parametrize("inputs", ["text", 3, None, np.ones(2), (np.ones(2),), {"x": object()}, {1: torch.ones(1)}])
def test_inputs_that_are_refused(inputs: object) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        read_inputs(inputs)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_keyword_inputs_in_any_order(strategy: str, tmp_path: Path) -> None:
    model, inputs = ZOO["keyword_only_forward"]()
    reports = [
        modelexport.export_model(model, given, tmp_path / f"{number}.onnx", strategy=strategy, external_data=False)
        for number, given in enumerate([inputs, dict(reversed(inputs.items()))])
    ]
    files = [modelexport.strip(report.onnx_path, tmp_path / "s.onnx").read_bytes() for report in reports]
    assert files[0] == files[1]
    assert [value.name for value in reports[1].hierarchy.export.inputs] == ["value", "gate"]
    assert [value.name for value in reports[1].hierarchy.export.outputs] == ["zeta", "alpha"]


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_outputs_that_are_no_tensors_are_dropped_and_named(strategy: str, tmp_path: Path) -> None:
    model, inputs = ZOO["outputs_not_tensors"]()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert report.dropped_outputs == ("cache: Cache",)
    assert [value.name for value in report.hierarchy.export.outputs] == ["score", "hidden_0", "hidden_1"]


def test_a_cache_is_dropped(tmp_path: Path) -> None:
    model, inputs = ARCHITECTURES["llama"]()
    model.config.use_cache = True
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx")
    assert report.strategy == "fx"
    assert report.dropped_outputs == ("past_key_values: DynamicCache",)


def test_an_output_named_like_an_input_gets_another_name() -> None:
    shape = OutputShape(["x"])
    shape(nn.Identity(), (), {"x": torch.ones(1), "y": torch.ones(1)})
    assert shape.names == ["x_1", "y"]


def test_nothing_of_torch_reaches_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, inputs = ZOO["block_three_times"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strategy in ("fx", "htp"):
            modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.integration
def test_threads_take_turns(tmp_path: Path) -> None:
    reports: dict[int, object] = {}

    def work(number: int) -> None:
        model, inputs = ZOO["block_three_times"]()
        strategy = "htp" if number % 2 else "fx"
        reports[number] = modelexport.export_model(model, inputs, tmp_path / f"{number}.onnx", strategy=strategy)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert all(modelexport.load(tmp_path / f"{number}.onnx").coverage == 1 for number in range(4))
