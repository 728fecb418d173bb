"""Write initializers inside the file, or into one data file beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import modelexport
from modelexport.capture import model_state
from modelexport.errors import ArgumentError

pytestmark = [pytest.mark.must, pytest.mark.integration]


def net() -> nn.Module:
    tail = nn.Linear(40, 3).to(torch.float32)
    return nn.Sequential(
        nn.Linear(20, 40), nn.LayerNorm(40), nn.Linear(40, 40, bias=False), tail
    ).eval()


def check(path: Path, model: nn.Module, inputs: torch.Tensor) -> onnx.ModelProto:
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(result, model(inputs).numpy(), atol=1e-5)
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize("external", [True, False])
def test_initializers_are_where_external_data_says(
    strategy: str, external: bool, tmp_path: Path
) -> None:
    model, inputs = net(), torch.randn(2, 20)
    report = modelexport.export_model(
        model, inputs, tmp_path / "m.onnx", strategy, external_data=external
    )
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"m.onnx", "m_hierarchy.json"} | ({"m.onnx.data"} if external else set())
    assert [path.name for path in report.data_paths] == (["m.onnx.data"] if external else [])
    proto = check(tmp_path / "m.onnx", model, inputs)
    stored = {
        entry.value
        for t in proto.graph.initializer
        for entry in t.external_data
        if entry.key == "location"
    }
    assert stored == ({"m.onnx.data"} if external else set())
    assert report.coverage == 1.0


def test_the_graph_is_the_same_with_external_data(tmp_path: Path) -> None:
    model, inputs = net(), torch.randn(2, 20)
    for name, external in (("inside", False), ("beside", True)):
        modelexport.export_model(
            model, inputs, tmp_path / f"{name}.onnx", "htp", external_data=external
        )
        modelexport.strip(tmp_path / f"{name}.onnx", tmp_path / f"{name}_stripped.onnx")
    inside, beside = (
        onnx.load(tmp_path / f"{name}_stripped.onnx") for name in ("inside", "beside")
    )
    for ours, theirs in zip(beside.graph.initializer, inside.graph.initializer, strict=True):
        assert ours.name == theirs.name
        np.testing.assert_array_equal(
            onnx.numpy_helper.to_array(ours), onnx.numpy_helper.to_array(theirs)
        )
    del inside.graph.initializer[:], beside.graph.initializer[:]
    assert inside == beside


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_model_over_the_limit_of_one_file(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "_INLINE_LIMIT", 1000)
    model, inputs = net(), torch.randn(2, 20)
    with pytest.raises(ArgumentError, match="2 GiB"):
        modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy, external_data=False)
    assert not list(tmp_path.iterdir())
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy)
    assert {path.name for path in tmp_path.iterdir()} == {
        "m.onnx",
        "m.onnx.data",
        "m_hierarchy.json",
    }
    check(tmp_path / "m.onnx", model, inputs)
