"""verify() accepts every right file, and names the wrong layer of a wrong one."""

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
from modelexport.capture.inputs import ModelInputs
from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError, ModelRunError
from modelexport.verification.pytorch_run import random_input_sets
from modelexport.verification.records import (
    FAILED,
    Blame,
    Outcome,
    Tolerance,
    Verification,
    measure_difference,
)
from modelexport.verification.runtime import Session
from proof import hooks_of
from zoo import ZOO, distinct

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


class OwnWork(nn.Module):
    """Has an operation of its own between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale)


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


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    path, model, _ = export("block_three_times", "fx", tmp_path)
    with pytest.raises(ArgumentError, match="use the inputs that the file was exported with"):
        modelexport.verify(model, (torch.ones(3, 8),), path)


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


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = OwnWork(), OwnWork()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


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
