"""verify() accepts every right file, reports another precision, type or shape, and measures."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import modelexport
from exports import CASES, EXPORTER, export
from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, ModelRunError
from modelexport.verification.records import (
    FAILED,
    Blame,
    Outcome,
    Tolerance,
    measure_difference,
)
from modelexport.verification.runtime import Session
from proof import hooks_of
from zoo import ZOO

pytestmark = pytest.mark.integration


@pytest.mark.must
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_right_file_agrees_in_every_module(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    hooks, training = hooks_of(model), [module.training for module in model.modules()]
    result = modelexport.verify(model, inputs, path)
    assert result.agrees, [parity for parity in result.modules if parity.outcome in FAILED]
    assert result.first is None
    assert not result.causes
    assert result.outcomes.get("agrees", 0) >= 1
    records = modelexport.load(path).modules
    for parity in result.modules:
        results = records[parity.module].results
        # Modules in subgraphs have no recorded results.
        removed = not results or not any(results[parity.call or 0])
        assert parity.outcome != Outcome.UNKNOWN or removed, (
            f"{parity.module!r} has a result in the file"
        )
        assert parity.outcome != Outcome.ABSORBED or records[parity.module].status == "absorbed"
    assert hooks_of(model) == hooks
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def int8(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(str(path), str(path.with_name("int8.onnx")), weight_type=QuantType.QInt8)
    return path.with_name("int8.onnx")


def float16(path: Path) -> Path:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(
        convert_float_to_float16(onnx.load(path), keep_io_types=True),
        path.with_name("float16.onnx"),
    )
    return path.with_name("float16.onnx")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", EXPORTER)
def test_files_of_another_precision(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("bert", strategy, tmp_path)
    result = modelexport.verify(model, inputs, int8(path), atol=1e-2, rtol=1e-2)
    assert result.first == "encoder.layer.0.attention.self.query"
    layers = dict(model.named_modules())
    assert result.causes
    assert all(isinstance(layers[cause], nn.Linear) for cause in result.causes)
    assert {parity.blame for parity in result.modules if parity.outcome in FAILED} >= {
        Blame.HERE,
        Blame.INHERITED,
    }
    own = [
        parity.own_abs
        for cause in result.causes
        for parity in result.modules
        if parity.module == cause
    ]
    assert own == sorted(own, reverse=True, key=lambda value: value or 0)
    half = modelexport.verify(model, inputs, float16(path), atol=1e-2, rtol=1e-2)
    assert half.agrees
    assert any(parity.note == "float16 for float32" for parity in half.modules)
    assert not modelexport.verify(
        model, inputs, path.with_name("float16.onnx"), atol=1e-5, rtol=1e-5
    ).agrees


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_an_optimiser_rewrote(tmp_path: Path) -> None:
    """Values that kept their names are compared, the others are reported as not found."""
    import onnxruntime

    path, model, inputs = export("bert", "htp", tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result = modelexport.verify(model, inputs, tmp_path / "optimised.onnx")
    assert result.agrees
    assert result.outcomes["agrees"] > 10


def test_narrowed_to_a_module(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "fx", tmp_path)
    for text in ("encoder.layer.1", "/BertModel/BertEncoder/BertLayer.1"):
        result = modelexport.verify(model, inputs, path, module=text)
        assert {parity.module.startswith("encoder.layer.1") for parity in result.modules} == {True}
    steps: list[str] = []
    with pytest.raises(ArgumentError, match="near it"):
        modelexport.verify(model, inputs, path, module="encoder.layer.9", on_step=steps.append)
    assert steps == [], "a name that matches nothing is refused before a model runs"


def test_another_shape_is_reported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    x = torch.ones(2, 4)
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy="htp")
    model[1] = nn.Flatten(1)
    result = modelexport.verify(model, (x,), tmp_path / "m.onnx")
    assert result.first == "1"
    assert not result.agrees
    parity = next(parity for parity in result.modules if parity.module == "1")
    assert parity.outcome == Outcome.SHAPE
    assert parity.note == "float32[8], not float32[2,4]"


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    path, model, inputs = export("one_leaf_root", "fx", tmp_path)
    with pytest.raises(ArgumentTypeError, match="is a str"):
        modelexport.verify("model", inputs, path)  # type: ignore[arg-type]
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="atol"):
            modelexport.verify(model, inputs, path, atol=wrong)
    modelexport.strip(path, tmp_path / "plain.onnx")
    with pytest.raises(FormatError, match="no tags"):
        modelexport.verify(model, inputs, tmp_path / "plain.onnx")

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    with pytest.raises(ModelRunError):
        modelexport.verify(Fails(), inputs, path)


def test_a_saved_program_is_compared_as_a_whole(tmp_path: Path) -> None:
    model, inputs = ZOO["block_three_times"]()
    program = torch.export.export(model.eval(), (inputs,))
    modelexport.export_model(program, None, tmp_path / "m.onnx", strategy="fx")
    result = modelexport.verify(program, None, tmp_path / "m.onnx")
    assert result.agrees
    assert [parity.module for parity in result.modules if parity.outcome == Outcome.AGREES] == [""]


@pytest.mark.parametrize(
    ("first", "second", "within"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([np.nan, np.inf, -np.inf], [np.nan, np.inf, -np.inf], True),
        ([np.nan], [0.0], False),
        ([np.inf], [-np.inf], False),
        ([1e30, -3.4e38], [1e30, -3.4e38], True),
        ([0.0], [5e-5], True),
        ([], [], True),
    ],
)
def test_when_two_tensors_agree(first: list[float], second: list[float], within: bool) -> None:
    difference = measure_difference(np.array(first), np.array(second), Tolerance())
    assert difference.within == within
    assert not math.isnan(difference.max_abs + difference.max_rel + difference.cosine)


def test_measures() -> None:
    difference = measure_difference(np.array([1.0, 0.0]), np.array([0.0, 1.0]), Tolerance())
    assert (difference.max_abs, difference.cosine) == (1.0, 0.0)
    assert measure_difference(np.array([2.0]), np.array([3.0]), Tolerance()).max_rel == 0.5
    assert measure_difference(np.array([True]), np.array([False]), Tolerance()).max_abs == 1


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sum()


class TwiceTheSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(self.fc(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.act(self.fc(x)) + 1


@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize("kind", [Total, TwiceTheSame, InPlace])
def test_no_false_alarm(kind: type[nn.Module], strategy: str, tmp_path: Path) -> None:
    model = kind()
    x = torch.randn(2, 4, requires_grad=True) * 2  # no leaf: it cannot be deep-copied
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy=strategy)
    assert modelexport.verify(model, (x,), tmp_path / "m.onnx").agrees


def test_whole_numbers_are_the_same_or_not() -> None:
    assert not measure_difference(np.array([70000]), np.array([70060]), Tolerance()).within


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_compared_by_its_outputs(tmp_path: Path) -> None:
    def compiled() -> torch.jit.ScriptModule:
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    model = compiled()
    modelexport.export_model(model, (torch.ones(2, 4),), tmp_path / "m.onnx", strategy="htp")
    assert modelexport.verify(model, (torch.ones(2, 4),), tmp_path / "m.onnx").agrees
    assert not modelexport.verify(compiled(), (torch.ones(2, 4),), tmp_path / "m.onnx").agrees


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1)], ids=["no kernel", "no such type"]
)
def test_a_type_that_the_runtime_has_no_kernel_for(
    layer: nn.Module, strategy: str, tmp_path: Path
) -> None:
    model, x = nn.Sequential(copy.deepcopy(layer)).bfloat16(), torch.randn(1, 4, 4)
    modelexport.export_model(model, (x.bfloat16(),), tmp_path / "m.onnx", strategy=strategy)
    with pytest.raises(
        FormatError, match=r"export and verify a float32 copy of the model"
    ) as caught:
        modelexport.verify(model, (x.bfloat16(),), tmp_path / "m.onnx")
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 1
    modelexport.export_model(model.float(), (x,), tmp_path / "m.onnx", strategy=strategy)
    assert modelexport.verify(model, (x,), tmp_path / "m.onnx").agrees


def test_sessions_need_no_torch() -> None:
    """Commands that only read files may open a session."""
    code = "import modelexport.verification.runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_errors_of_the_runtime_are_ours(tmp_path: Path) -> None:
    path, _, _ = export("one_leaf_root", "htp", tmp_path)
    with pytest.raises(FormatError, match="ONNX Runtime rejects the model"):
        Session(b"not a model")
    with pytest.raises(FormatError, match="ONNX Runtime cannot run the model"):
        Session(path).run({})
