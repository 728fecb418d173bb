"""Call models for an export, and leave them as they were."""

from __future__ import annotations

import copy
import io
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modelexport
from modelexport.capture.hooks import OutputFilter
from modelexport.capture.inputs import ModelInputs, check_model_runs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.errors import ArgumentError, ExportError
from proof import hooks_of
from zoo import ZOO

pytestmark = pytest.mark.sanity
A = torch.randn(1, 4)


class CausesItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x + {}["absent"]
        except KeyError as error:
            raise error from error


class OpensAFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + len(Path("absent.txt").read_text())


@pytest.mark.regression
@pytest.mark.parametrize(
    ("model", "cause", "strategy"),
    [
        (CausesItself(), "KeyError", "htp"),  # torch's dynamo exporter ends the process
        (OpensAFile(), "FileNotFoundError", "htp"),
        (OpensAFile(), "FileNotFoundError", "auto"),
    ],
)
def test_an_error_of_the_model_is_named(
    model: nn.Module, cause: str, strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(modelexport.ModelRunError, match=cause):
        modelexport.export_model(model, (A,), tmp_path / "m.onnx", strategy=strategy)
    assert list(tmp_path.iterdir()) == []


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
def test_the_model_is_unchanged_after_an_export(strategy: str, tmp_path: Path) -> None:
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
def test_the_model_is_unchanged_after_a_failed_export(strategy: str, tmp_path: Path) -> None:
    model = Breaks()
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ExportError, match="this model cannot run"):
        modelexport.export_model(
            model, (torch.randn(2, 4),), tmp_path / "m.onnx", strategy=strategy
        )
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert hooks_of(model) == 0
    assert list(tmp_path.iterdir()) == []


def test_preserve_model_restores_replaced_attributes() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with preserve_model(model):
        model.weight = nn.Parameter(torch.zeros(2, 2))
        model.register_buffer("extra", torch.ones(1))
        model.note = 1  # type: ignore[assignment]
    assert model.weight is weight
    assert not hasattr(model, "extra")
    assert not hasattr(model, "note")


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))]
)
def test_a_wrapped_model_is_exported_without_its_wrapper(
    wrap: Callable[[nn.Module], nn.Module], strategy: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    wrapped = wrap(model)
    report = modelexport.export_model(wrapped, A, tmp_path / "m.onnx", strategy=strategy)
    assert list(report.hierarchy.modules) == ["", "0", "1"]
    assert report.hierarchy.model.class_ == "torch.nn.modules.container.Sequential"
    assert modelexport.verify(wrapped, A, report.onnx_path).agrees
    assert modelexport.verify(model, A, report.onnx_path).agrees


@pytest.mark.parametrize("name", ["mean", "x", "fc.weight"])
def test_an_output_name_of_another_value_is_rejected(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO["keys_like_inner_names"]()
    names = ["a", name, *"bcde"]
    with pytest.raises(ArgumentError, match=f"'{name}' is the name of another value"):
        modelexport.export_model(
            model, inputs, tmp_path / "m.onnx", strategy="fx", output_names=names
        )
    assert list(tmp_path.iterdir()) == []


class Averages(nn.Module):
    """Write a result of its parameters to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.mean.mul_(0.9).add_(y.mean(0))
        return y - self.mean


@pytest.mark.must
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_buffer_is_a_leaf_again(strategy: str, tmp_path: Path) -> None:
    model = Averages()
    modelexport.export_model(model, torch.randn(2, 4), tmp_path / "m.onnx", strategy=strategy)
    assert model.mean.is_leaf
    assert not model.mean.requires_grad
    assert torch.equal(model.mean, torch.ones(4))
    copy.deepcopy(model)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.fc)(x)


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_module_under_vmap(strategy: str, tmp_path: Path) -> None:
    model, inputs = Mapped(), torch.randn(3, 2, 4)
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert report.coverage == 1
    assert report.hierarchy.modules["fc"].nodes == report.nodes
    assert modelexport.verify(model, inputs, report.onnx_path).agrees


class Gradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda inner: self.fc(inner).tanh().sum())(x)


@pytest.mark.regression
def test_a_gradient_in_forward_does_not_crash_the_tracer(tmp_path: Path) -> None:
    """torch cannot trace it, and says so."""
    with pytest.raises(modelexport.ExportError, match="torch cannot export"):
        modelexport.export_model(Gradient(), torch.randn(2, 4), tmp_path / "m.onnx", strategy="htp")


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_outputs_that_are_not_tensors_are_dropped_and_reported(
    strategy: str, tmp_path: Path
) -> None:
    model, inputs = ZOO["outputs_not_tensors"]()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert report.dropped_outputs == ("cache: Cache",)
    assert [value.name for value in report.hierarchy.export.outputs] == [
        "score",
        "hidden_0",
        "hidden_1",
    ]


def test_an_output_named_like_an_input_gets_another_name() -> None:
    shape = OutputFilter(["x"])
    shape(nn.Identity(), (), {"x": torch.ones(1), "y": torch.ones(1)})
    assert shape.names == ["x_1", "y"]


def test_nothing_of_torch_reaches_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, inputs = ZOO["block_three_times"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strategy in ("fx", "htp"):
            modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.integration
def test_exports_in_threads_run_one_at_a_time(tmp_path: Path) -> None:
    reports: dict[int, object] = {}

    def work(number: int) -> None:
        model, inputs = ZOO["block_three_times"]()
        strategy = "htp" if number % 2 else "fx"
        reports[number] = modelexport.export_model(
            model, inputs, tmp_path / f"{number}.onnx", strategy=strategy
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert all(modelexport.load(tmp_path / f"{number}.onnx").coverage == 1 for number in range(4))


@pytest.mark.regression
def test_silent_blocks_in_two_threads_restore_the_streams() -> None:
    before = sys.stdout, sys.stderr
    one_is_in, other_is_in, one_is_out = threading.Event(), threading.Event(), threading.Event()

    def one() -> None:
        with silence_torch(verbose=False):
            one_is_in.set()
            other_is_in.wait(0.5)  # times out where the other one waits for the lock
        one_is_out.set()

    def other() -> None:
        one_is_in.wait()
        with silence_torch(verbose=False):
            other_is_in.set()
            one_is_out.wait()

    threads = [threading.Thread(target=work) for work in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = before
    assert after == before
    assert not any(stream.closed for stream in before)


@pytest.mark.regression
def test_a_model_on_the_meta_device_is_rejected(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    for inputs in (torch.ones(1, 4), torch.ones(1, 4, device="meta")):
        with pytest.raises(ArgumentError, match=r"has no weights: 1\.weight is on the meta device"):
            modelexport.export_model(model, inputs, tmp_path / "m.onnx")
    with pytest.raises(ArgumentError, match="on the meta device"):
        modelexport.verify(model, torch.ones(1, 4), tmp_path / "m.onnx")
    with pytest.raises(ArgumentError, match="on the meta device"):
        check_model_runs(model, ModelInputs((torch.ones(1, 4),), {}))
    assert list(tmp_path.iterdir()) == []


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x))


class Quantizable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant = torch.ao.quantization.QuantStub()
        self.twice = Inner()
        self.once = Inner()
        self.dequant = torch.ao.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.twice(self.once(self.twice(self.quant(x)))))


def statically_quantized(inputs: Tensor) -> nn.Module:
    model = Quantizable().eval()
    model.qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
    prepared = torch.ao.quantization.prepare(model)
    prepared(inputs)
    return torch.ao.quantization.convert(prepared)


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
def test_a_statically_quantized_model(tmp_path: Path) -> None:
    """torch compiles its packed parameters, and traces the model before it exports it."""
    inputs = torch.randn(2, 4)
    model = statically_quantized(inputs)
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    plain = io.BytesIO()
    torch.onnx.export(model, (inputs,), plain, dynamo=False)
    stripped = modelexport.strip(report.onnx_path, tmp_path / "plain.onnx")
    assert stripped.read_bytes() == plain.getvalue()
    modules = report.hierarchy.modules
    assert report.hierarchy.statistics.methods == {"scope": report.nodes}
    assert modules["twice"].nodes == 2 * modules["once"].nodes > 0
    assert report.nodes == sum(
        modules[path].nodes for path in ("quant", "twice", "once", "dequant")
    )
    assert {node.call for node in report.hierarchy.nodes.values() if node.module == "twice.fc"} == {
        0,
        1,
    }
    assert modelexport.verify(model, inputs, report.onnx_path).agrees
    assert hooks_of(model) == 0


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
def test_the_error_of_a_dynamically_quantized_model_names_the_operator(tmp_path: Path) -> None:
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8
    )
    with pytest.raises(ExportError, match=r"'quantized::linear_dynamic'.* is not supported"):
        modelexport.export_model(model, torch.randn(2, 4), tmp_path / "m.onnx", strategy="htp")
