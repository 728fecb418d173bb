"""Dynamic axes are detected for any model, and hold in ONNX Runtime at a second size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import modelexport
from caches import KEYS, decode_step
from folders import KINDS, save
from modelexport.errors import SourceError
from modelexport.source.dynamic_axes import Axes, PreparedInputs, export_dynamic, prepare_inputs
from modelexport.source.example_inputs import InputRequest
from modelexport.source.load import LoadedModel, load_source

pytestmark = pytest.mark.integration
STRATEGIES = ["fx", "htp"]
_SIZES = {"batch": 3, "sequence": 13}


def resized(prepared: PreparedInputs) -> dict[str, Tensor]:
    """The inputs at sizes that the export has not seen."""
    assert prepared.axes
    inputs = dict(prepared.inputs)
    for name, axes in prepared.axes.items():
        for axis, label in axes.items():
            size = _SIZES.get(label, 5)
            if inputs[name].shape[axis] > 1000:  # sound
                size = 12345
            inputs[name] = inputs[name].index_select(
                axis, torch.arange(size) % inputs[name].shape[axis]
            )
    return inputs


def check_at_a_second_size(model: nn.Module, prepared: PreparedInputs, path: Path) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = resized(prepared)
    results = session.run(
        None, {value.name: inputs[value.name].numpy() for value in session.get_inputs()}
    )
    with torch.no_grad():
        expected = model.eval()(**inputs)
    first = expected if isinstance(expected, Tensor) else next(iter(dict(expected).values()))
    np.testing.assert_allclose(results[0], first.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_runs_at_a_second_size(kind: str, strategy: str, tmp_path: Path) -> None:
    source = load_source(str(save(kind, tmp_path / "model")))
    assert isinstance(source.model, nn.Module)
    prepared = prepare_inputs(source, InputRequest(), True, {}, seed=0)
    assert prepared.axes is not None
    labels = {label for axes in prepared.axes.values() for label in axes.values()}
    assert "batch" in labels
    assert ("sequence" in labels) == (kind not in ("vision", "speech"))
    report = modelexport.export_model(
        source.model, prepared.inputs, tmp_path / "m.onnx", strategy, dynamic_shapes=prepared.axes
    )
    assert report.coverage == 1.0
    shapes = {info.name: info.shape for info in report.hierarchy.export.inputs}
    for name, axes in prepared.axes.items():
        for axis, label in axes.items():
            assert shapes[name][axis] == label
    assert modelexport.validate(report.onnx_path).valid
    check_at_a_second_size(source.model, prepared, report.onnx_path)


class Mixer(nn.Module):
    """Any batch and any number of rows; the width is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x).softmax(-1) + y.mean(1, keepdim=True)


INPUTS = (torch.randn(1, 6, 4), torch.randn(1, 3, 4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_processor_the_model_is_tried(strategy: str, tmp_path: Path) -> None:
    source = LoadedModel(Mixer(), "mixer", INPUTS)
    prepared = prepare_inputs(source, InputRequest(), True, {}, seed=0)
    assert prepared.axes == {"x": {0: "batch", 1: "sequence"}, "y": {0: "batch", 1: "y_1"}}
    assert isinstance(source.model, nn.Module)
    report = modelexport.export_model(
        source.model, prepared.inputs, tmp_path / "m.onnx", strategy, dynamic_shapes=prepared.axes
    )
    check_at_a_second_size(source.model, prepared, report.onnx_path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_axes_by_hand(strategy: str, tmp_path: Path) -> None:
    source = LoadedModel(Mixer(), "mixer", INPUTS)
    axes: Axes = {"x": {0: "batch", 1: "rows"}, "y": {0: "batch"}}
    prepared = prepare_inputs(source, InputRequest(), False, axes, seed=0)
    assert prepared.inputs["x"].shape[0] == prepared.inputs["y"].shape[0] == 2
    assert isinstance(source.model, nn.Module)
    report = modelexport.export_model(
        source.model, prepared.inputs, tmp_path / "m.onnx", strategy, dynamic_shapes=prepared.axes
    )
    assert [info.shape for info in report.hierarchy.export.inputs] == [
        ("batch", "rows", 4),
        ("batch", 3, 4),
    ]
    check_at_a_second_size(source.model, prepared, report.onnx_path)


def test_what_goes_with_a_named_axis_changes_with_it(tmp_path: Path) -> None:
    source = load_source(str(save("text_encoder", tmp_path / "model")))
    prepared = prepare_inputs(
        source, InputRequest(), False, {"input_ids": {0: "batch", 1: "words"}}, seed=0
    )
    assert prepared.axes == {
        "input_ids": {0: "batch", 1: "words"},
        "attention_mask": {0: "batch", 1: "words"},
    }
    assert prepared.inputs["attention_mask"].shape[0] == 2


class Loops(nn.Module):
    """A Python loop over an axis, which a tracer unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(x[:, step]) for step in range(x.shape[1])], 1)


@pytest.mark.parametrize(
    ("may_drop", "shape"), [(True, ("batch", 3, 4)), (False, ("batch", "sequence", 4))]
)
def test_an_axis_that_the_tracer_fixed_is_dropped(
    may_drop: bool, shape: tuple[object, ...], tmp_path: Path
) -> None:
    source = LoadedModel(Loops(), "loops", (torch.randn(1, 3, 4),))
    prepared = prepare_inputs(source, InputRequest(), True, {}, seed=0)
    assert prepared.axes == {"x": {0: "batch", 1: "sequence"}}
    export = partial(
        modelexport.export_model, source.model, prepared.inputs, tmp_path / "m.onnx", "htp"
    )
    report, (note,) = export_dynamic(
        export, source.model, prepared, may_drop, on_step=lambda step: None
    )
    assert "fixed sequence" in note
    assert report.hierarchy.export.inputs[0].shape == shape


class FixesALaterOutput(nn.Module):
    """The first output follows the size; the second uses the size as a Python number."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = int(x.shape[1])
        return x * 2, torch.zeros(2, dtype=torch.int64) + count if self.whole else x.sum() / count


@pytest.mark.regression
@pytest.mark.parametrize("whole", [True, False])
def test_every_output_is_compared_at_a_second_size(whole: bool, tmp_path: Path) -> None:
    model = FixesALaterOutput(whole)
    prepared = PreparedInputs({"x": torch.full((2, 3), 9.0)}, {"x": {1: "sequence"}}, "")
    export = partial(modelexport.export_model, model, prepared.inputs, tmp_path / "m.onnx", "htp")
    report, notes = export_dynamic(
        export, model, prepared, may_drop=True, on_step=lambda step: None
    )
    assert ["fixed sequence" in note for note in notes] == [True]
    assert report.hierarchy.export.inputs[0].shape == (2, 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", [False, True])
def test_the_length_of_a_cache_is_dynamic(mask: bool, strategy: str, tmp_path: Path) -> None:
    """A mask over all tokens has to grow with the cache of those before."""
    model, inputs = decode_step("llama", mask)
    source = LoadedModel(model, "llama", inputs)
    prepared = prepare_inputs(source, InputRequest(), True, {}, seed=0)
    assert prepared.axes is not None
    length = {name: prepared.axes[name][2] for name in KEYS}
    assert length == dict.fromkeys(KEYS, "past_key_values_2")
    assert all(axes[0] == "batch" for axes in prepared.axes.values())
    export = partial(
        modelexport.export_model, model, prepared.inputs, tmp_path / "m.onnx", strategy
    )
    report, notes = export_dynamic(export, model, prepared, may_drop=True, on_step=lambda _: None)
    assert notes == []
    other = dict(prepared.inputs)
    other["past_key_values"] = tree_map(
        lambda tensor: torch.cat([tensor] * 3, 0).repeat(1, 1, 2, 1), other["past_key_values"]
    )
    other["input_ids"] = torch.cat([other["input_ids"]] * 3)
    if mask:
        total = 14 + other["input_ids"].shape[1]
        other["attention_mask"] = torch.ones(len(other["input_ids"]), total, dtype=torch.long)
    assert modelexport.verify(model, other, report.onnx_path).agrees


@pytest.mark.regression
def test_a_file_that_the_runtime_rejects_is_not_tried(tmp_path: Path) -> None:
    """ONNX Runtime has no kernels for bfloat16; the export itself is right."""
    model = nn.Linear(4, 4).bfloat16()
    inputs = {"input": torch.ones(2, 4, dtype=torch.bfloat16)}
    prepared = PreparedInputs(inputs, {"input": {0: "batch"}}, "")
    export = partial(modelexport.export_model, model, inputs, tmp_path / "m.onnx", "htp")
    report, (note,) = export_dynamic(
        export, model, prepared, may_drop=True, on_step=lambda step: None
    )
    assert note.startswith("the file was not tried at another size: ONNX Runtime rejects the model")
    assert report.hierarchy.export.inputs[0].shape == ("batch", 4)


def test_inputs_that_are_no_tensors_have_no_axes(tmp_path: Path) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
            return x * scale if bias is None else x * scale + bias

    source = LoadedModel(Scales(), "scales", {"x": torch.randn(1, 3), "scale": 3.0, "bias": None})
    prepared = prepare_inputs(source, InputRequest(), True, {}, seed=0)
    for strategy in STRATEGIES:
        report = modelexport.export_model(
            source.model,
            prepared.inputs,
            tmp_path / "m.onnx",
            strategy,
            dynamic_shapes=prepared.axes,
        )
        assert [info.name for info in report.hierarchy.export.inputs] == ["x"]


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 4) * 2


@pytest.mark.parametrize(
    ("model", "axes", "expected"),
    [
        (Fixed(), {}, "no axis can be dynamic"),
        (Mixer(), {"z": {0: "batch"}}, "names 'z', which is not an input"),
        (Mixer(), {"x": {5: "batch"}}, "axis 5 of x, which has 3 axes"),
    ],
)
def test_axes_that_cannot_be(model: nn.Module, axes: Axes, expected: str) -> None:
    inputs: Any = INPUTS if isinstance(model, Mixer) else (torch.ones(3, 4),)
    with pytest.raises(SourceError) as caught:
        prepare_inputs(LoadedModel(model, "m", inputs), InputRequest(), not axes, axes, seed=0)
    assert expected in str(caught.value)
