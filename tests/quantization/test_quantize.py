"""quantize(): modules that are kept stay in float, the rest does not, and the map is complete."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import modelexport
from damage import everything
from exports import export
from extraction.running import run, session
from modelexport.verification.feeds import make_feeds
from quantization.models import WIDTH, Block, Mixed, export_stack, export_unnamed_stack

pytestmark = pytest.mark.integration

TARGETS = ("int8-dynamic", "int8-static", "float16")
BORDER = {
    "int8-dynamic": {"DynamicQuantizeLinear"},
    "int8-static": {"QuantizeLinear", "DequantizeLinear"},
    "float16": {"Cast"},
}
"""The operators that convert the result of a module that stays in float, for the next one."""
KEPT = {"bert": "encoder.layer.0", "resnet": "encoder.stages.0"}
CASES = [
    pytest.param(name, strategy, to, id=f"{name}-{strategy}-{to}")
    for name, strategy in (("bert", "fx"), ("bert", "htp"), ("resnet", "fx"))
    for to in TARGETS
]


def operators(path: Path, module: str) -> Counter[str]:
    """Count the operators below a module."""
    return Counter(
        node.op_type
        for node, tag in modelexport.load(path).items()
        if tag is not None and f"{tag.hierarchy_module}.".startswith(f"{module}.")
    )


def check_file(path: Path) -> None:
    """Check that a file is valid, runs, has a map without contradictions, and can be stripped."""
    onnx.checker.check_model(path, full_check=True)
    validation = modelexport.validate(path, check_consistency=True)
    assert validation.valid, validation.findings
    model = modelexport.load(path)
    assert model.coverage == 1.0
    session(path)
    bare = path.with_name("bare.onnx")
    modelexport.strip(path, bare)
    assert not modelexport.load(bare).is_tagged
    session(bare)


def values_of(path: Path) -> dict[str, Any]:
    """Return all values of a file on its recorded inputs."""
    feeds = make_feeds(modelexport.load(path)).values
    model = onnx.load(path)
    known = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name not in known:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
    return {**feeds, **run(model, feeds)}


@pytest.mark.parametrize(("name", "strategy", "to"), CASES)
def test_a_kept_module_stays_in_float(name: str, strategy: str, to: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path / "in")
    before = everything(path.parent)
    out, module = tmp_path / "q.onnx", KEPT[name]
    report = modelexport.quantize(path, out, to=to, keep=module, preprocess=False)
    check_file(out)
    assert everything(path.parent) == before
    assert report.bytes_after < report.bytes_before
    assert report.converted > 0
    assert 0 < report.error.size < 0.1
    # By operators: all of the original, and else only what passes its result on.
    original, kept = operators(path, module), operators(out, module)
    assert original - kept == Counter()
    assert set(kept - original) <= BORDER[to]
    # By values: on what enters the module in the result, it computes what the original computes.
    extracted = modelexport.extract(path, module).model
    reference = session(extracted)
    quantized = values_of(out)
    entering = {value.name: quantized[value.name] for value in reference.get_inputs()}
    casts = {value.name: value.type for value in reference.get_inputs()}
    feeds = {
        key: value.astype(np.float32) if casts[key] == "tensor(float)" else value
        for key, value in entering.items()
    }
    if to == "int8-static":  # what the module reads is the value after the quantizer's rounding
        feeds = {
            key: quantized.get(f"{key}_DequantizeLinear_Output", value)
            for key, value in feeds.items()
        }
    for key, value in run(extracted, feeds).items():
        tolerance = 2e-3 if to == "float16" else 1e-5
        np.testing.assert_allclose(quantized[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("to", TARGETS)
def test_only_some_modules_are_quantized(to: str, tmp_path: Path) -> None:
    path, model, inputs = export("bert", "fx", tmp_path)
    out = tmp_path / "q.onnx"
    report = modelexport.quantize(path, out, to=to, only="pooler", preprocess=False)
    check_file(out)
    assert operators(path, "encoder") - operators(out, "encoder") == Counter()
    assert report.in_float == len(modelexport.select(path, "pooler", invert=True))
    verification = modelexport.verify(model, inputs, out, atol=1e-5, rtol=1e-5)
    assert not verification.agrees
    assert all(cause.startswith("pooler") for cause in verification.causes), verification.causes


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_preprocessed_copy_keeps_modules_too(name: str, tmp_path: Path) -> None:
    path, _, _ = export(name, "fx", tmp_path)
    whole, out = tmp_path / "whole.onnx", tmp_path / "q.onnx"
    modelexport.quantize(path, whole, to="int8-static")
    report = modelexport.quantize(path, out, to="int8-static", keep=KEPT[name])
    check_file(out)
    assert any("real data" in text for text in report.notes)
    assert report.calibration.endswith(("the recorded inputs", "the recorded ones"))
    inserted = ("QuantizeLinear", "DequantizeLinear")
    counts = [sum(operators(file, KEPT[name])[op] for op in inserted) for file in (whole, out)]
    assert counts[1] <= 2 < counts[0], "only the module's own result is quantized, for the next"


def test_float16_keeps_what_it_cannot_compute(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(Mixed().eval(), torch.randn(4, WIDTH), path, strategy="htp")
    broken = modelexport.quantize(path, tmp_path / "broken.onnx", to="float16")
    assert broken.error.size > 0.1
    report = modelexport.quantize(path, tmp_path / "q.onnx", to="float16", keep="wide")
    check_file(tmp_path / "q.onnx")
    assert report.error.size < 1e-2
    limited = modelexport.quantize(path, tmp_path / "l.onnx", to="float16", max_error=1e-2)
    assert "wide" in {kept.module.partition(".")[0] for kept in limited.kept}
    assert limited.error.size <= 1e-2


@pytest.mark.parametrize("to", TARGETS)
def test_an_initializer_that_is_shared_stays_exact_for_a_kept_module(
    to: str, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(Block(), Block()).eval()
    model[1].load_state_dict(model[0].state_dict())
    path, out = tmp_path / "m.onnx", tmp_path / "q.onnx"
    modelexport.export_model(model, torch.randn(4, WIDTH), path, strategy="fx")
    shared = set(modelexport.select(path, "0", what="initializers"))
    assert shared & set(modelexport.select(path, "1", what="initializers"))
    modelexport.quantize(path, out, to=to, keep="0", preprocess=False)
    check_file(out)
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(out).graph.initializer}
    kept = modelexport.select(out, "0", what="initializers", op_types=["Gemm", "MatMul", "Add"])
    assert kept
    assert {stored[name] for name in kept} == {onnx.TensorProto.FLOAT}


class Twice(torch.nn.Module):
    """One square layer that runs twice, and whose weight is looked up in as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.shared.weight[x[:, 0].long().abs() % WIDTH]
        return self.head(self.shared(self.shared(x).relu()) + found)


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize("keep", [(), ("shared",), ("head",)])
def test_a_weight_with_several_consumers_keeps_its_values(
    keep: tuple[str, ...], strategy: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path, out = tmp_path / "m.onnx", tmp_path / "q.onnx"
    modelexport.export_model(Twice().eval(), torch.randn(4, WIDTH), path, strategy=strategy)
    report = modelexport.quantize(path, out, keep=keep)
    check_file(out)
    assert report.error.size < 0.05
    assert report.converted > 0
    ranked = modelexport.measure_sensitivity(path)
    assert all(each.error is None or each.error.size < 0.05 for each in ranked.modules)


class Folded(torch.nn.Module):
    """A model that returns a value of its parameters alone, too large for dynamo to fold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = torch.nn.Parameter(torch.rand(200, 100) + 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x).abs() ** (self.scale * 0.5)[0, 0], self.scale - 0.5


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("preprocess", [None, True, False])
def test_an_output_of_constants(
    to: str, preprocess: bool | None, strategy: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "m.onnx", tmp_path / "q.onnx"
    modelexport.export_model(Folded().eval(), torch.randn(4, WIDTH), path, strategy=strategy)
    report = modelexport.quantize(path, out, to=to, preprocess=preprocess)
    check_file(out)
    assert report.error.size < 0.05


@pytest.mark.regression
def test_a_folded_constant_does_not_count_as_converted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(Folded().eval(), torch.randn(4, WIDTH), path, strategy="fx")
    with pytest.raises(modelexport.ArgumentError, match="nothing to quantize"):
        modelexport.quantize(path, tmp_path / "q.onnx", to="int8-static", keep="layer")


@pytest.mark.regression
def test_samples_of_another_precision_calibrate(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(Block().eval(), torch.randn(4, WIDTH), path)
    (name,) = modelexport.load(path).graph.inputs
    samples = np.random.default_rng(0).standard_normal((4, WIDTH))
    assert samples.dtype == np.float64
    report = modelexport.quantize(
        path, tmp_path / "q.onnx", to="int8-static", calibration=[{name: samples}]
    )
    assert report.converted > 0


def test_nodes_without_names_are_kept_by_module(tmp_path: Path) -> None:
    path = export_unnamed_stack(tmp_path)
    out = tmp_path / "q.onnx"
    modelexport.quantize(path, out, keep=["blocks.0", "blocks.3"])
    check_file(out)
    quantized = {
        tag.hierarchy_module
        for node, tag in modelexport.load(out).items()
        if tag is not None and "Integer" in node.op_type
    }
    assert quantized == {f"blocks.{number}.linear" for number in (1, 2, 4, 5)} | {"head"}


@pytest.mark.parametrize("to", TARGETS)
def test_a_large_model_gets_a_data_file(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelexport.quantization.prepare.LARGE_MODEL", 0)
    path, _, _ = export("bert", "fx", tmp_path)
    out = tmp_path / "out" / "q.onnx"
    out.parent.mkdir()
    report = modelexport.quantize(path, out, to=to, keep="pooler")
    check_file(out)
    assert report.data_paths == (out.parent / "q.onnx.data",)
    assert report.data_paths[0].stat().st_size > 0
    assert not [file for file in tmp_path.rglob(".modelexport-*") if file.exists()]


def test_samples_calibrate(tmp_path: Path) -> None:
    path = export_stack()
    (name,) = modelexport.load(path).graph.inputs
    generator = np.random.default_rng(0)
    samples = [{name: generator.normal(size=(4, WIDTH)).astype(np.float32)} for _ in range(3)]
    folder = tmp_path / "samples"
    folder.mkdir()
    for number, sample in enumerate(samples):
        np.savez(folder / f"{number}.npz", **sample)
    first = modelexport.quantize(
        path, tmp_path / "a.onnx", to="int8-static", calibration=folder, keep="blocks.2"
    )
    second = modelexport.quantize(
        path, tmp_path / "b.onnx", to="int8-static", calibration=samples, keep="blocks.2"
    )
    assert first.calibration == "3 files in samples"
    assert first.notes == ()
    assert first.error == second.error
    narrow = [{name: sample[name] / 100} for sample in samples]
    clipped = modelexport.quantize(
        path, tmp_path / "c.onnx", to="int8-static", calibration=narrow, inputs=samples[0],
        keep="blocks.2",
    )  # fmt: skip
    assert clipped.error.size > 2 * first.error.size


def test_what_people_get_wrong(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    np.savez(tmp_path / "part.npz", input_ids=np.zeros((2, 5), np.int64))
    empty = tmp_path_factory.mktemp("empty")
    before = everything(tmp_path)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"keep": "encodr"}, modelexport.ArgumentError, "near it: encoder"),
        ({"only": "nothing.here"}, modelexport.ArgumentError, "no module"),
        ({"to": "int4"}, modelexport.ArgumentError, "known: int8-dynamic"),
        ({"keep": ""}, modelexport.ArgumentError, "nothing is left to quantize"),
        ({"only": "pooler", "keep": "pooler"}, modelexport.ArgumentError, "nothing is left"),
        ({"only": "pooler.activation"}, modelexport.ArgumentError, "converts none"),
        ({"calibration": tmp_path / "part.npz"}, modelexport.ArgumentError, "no value for the"),
        ({"calibration": empty}, modelexport.ArgumentError, "no .npz file"),
        ({"calibration": []}, modelexport.ArgumentError, "no sample"),
        ({"max_error": -1}, modelexport.ArgumentError, "0 or more"),
        ({"max_error": "x"}, modelexport.ArgumentTypeError, "pass a number"),
        ({"max_error": 1.0, "depth": 0}, modelexport.ArgumentError, "1 or more"),
        ({"output_path": path}, modelexport.ArgumentError, "would overwrite the input"),
        ({"output_path": tmp_path / "q.txt"}, modelexport.ArgumentError, ".onnx"),
        ({"path": tmp_path / "absent.onnx"}, modelexport.FileError, "absent.onnx"),
    ]
    for options, kind, words in wrong:
        arguments = {"path": path, "output_path": tmp_path / "q.onnx", **options}
        with pytest.raises(kind) as caught:
            modelexport.quantize(**arguments)
        assert words in str(caught.value), options
        assert everything(tmp_path) == before


def test_a_model_that_does_not_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = onnx.load(export_stack())
    model.graph.node[-1].domain = "nowhere"
    model.opset_import.append(onnx.helper.make_opsetid("nowhere", 1))
    onnx.save(model, path)
    with pytest.raises(modelexport.FormatError, match="ONNX Runtime rejects the model"):
        modelexport.quantize(path, tmp_path / "q.onnx")
    assert not (tmp_path / "q.onnx").exists()
