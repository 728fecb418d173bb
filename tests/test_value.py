"""The heart of the project: on every awkward module, every promise of the map holds."""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch

import modelexport
from modelexport.graph.flat import nested_graphs
from proof import check_map, plain_export, prove, pytorch_values, strip_bytes, value_test
from scopes import differences, recorded_scopes
from zoo import TORCH_CANNOT, ZOO, distinct

EXPORTER = {"fx": "dynamo", "htp": "torchscript"}
GENERATED = re.compile(rb"<eval_with_key>\.\d+")
"""torch numbers the code of conditional bodies anew in each export."""

RETURNS_A_MAPPING = {
    "keyword_only_forward",
    "keys_like_inner_names",
    "output_named_after_a_step_without_effect",
}

pytestmark = [pytest.mark.must, pytest.mark.integration]


def unnumbered(data: bytes) -> bytes:
    """The same file without those numbers; a number of another length also changes lengths around it."""
    if not GENERATED.search(data):
        return data
    model = onnx.ModelProto.FromString(data)
    pending = [model.graph]
    while pending:
        for node in pending.pop().node:
            pending.extend(body for _, body in nested_graphs(node.attribute))
            for entry in node.metadata_props:
                entry.value = GENERATED.sub(b"", entry.value.encode()).decode()
    return model.SerializeToString()


def cases() -> list[object]:
    return [
        pytest.param(name, strategy, id=f"{name}-{strategy}")
        for name in ZOO
        for strategy in EXPORTER
        if name not in TORCH_CANNOT[EXPORTER[strategy]]
    ]


@pytest.mark.parametrize(("name", "strategy"), cases())
@pytest.mark.parametrize("weights", ["fresh", "distinct"])
def test_the_map_is_true(name: str, strategy: str, weights: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    if weights == "distinct":
        distinct(model)
    verdict = prove(model, inputs, tmp_path, strategy)
    assert verdict.checked > 0


@pytest.mark.parametrize(("name", "strategy"), cases())
def test_stripped_bytes_are_the_baseline(name: str, strategy: str, tmp_path: Path) -> None:
    if name == "outputs_not_tensors":
        pytest.skip("a plain export refuses outputs that are no tensors")
    model, inputs = ZOO[name]()
    distinct(model).eval()
    report = modelexport.export_model(model, inputs, tmp_path / "model.onnx", strategy=strategy)
    named = name in RETURNS_A_MAPPING
    names = (
        {"output_names": [output.name for output in report.hierarchy.export.outputs]}
        if named
        else {}
    )
    (tmp_path / "plain").mkdir()
    plain_export(model, inputs, tmp_path / "plain" / "model.onnx", EXPORTER[strategy], **names)
    ours, plain = (
        strip_bytes(tmp_path / "model.onnx"),
        (tmp_path / "plain" / "model.onnx").read_bytes(),
    )
    assert unnumbered(ours) == unnumbered(plain)
    for path in report.data_paths:
        assert path.read_bytes() == (tmp_path / "plain" / path.name).read_bytes()


@pytest.mark.parametrize("name", sorted(set(ZOO) - TORCH_CANNOT["torchscript"]))
def test_usage_based_never_contradicts(name: str, tmp_path: Path) -> None:
    """The careful strategy may leave nodes out, but only tags modules that ran."""
    model, inputs = ZOO[name]()
    report = modelexport.export_model(
        distinct(model), inputs, tmp_path / "model.onnx", strategy="usage_based"
    )
    exported = modelexport.load(report.onnx_path)
    ran = set(pytorch_values(model, inputs))
    tagged = {tag.hierarchy_module for tag in exported.tags if tag is not None}
    without_forward = {path for path in tagged - ran if exported.modules[path].calls == 0}
    assert tagged <= ran | without_forward
    assert all(
        tag.hierarchy_method in ("parameter", "scope", "dataflow") for tag in exported.tags if tag
    )


def test_a_wrong_map_fails_the_value_test(tmp_path: Path) -> None:
    """The proof can fail: give one module's nodes to another and it does."""
    from proof import onnx_values

    model, inputs = ZOO["ln_twice_beside_ln_1"]()
    report = modelexport.export_model(
        distinct(model), inputs, tmp_path / "model.onnx", strategy="htp"
    )
    exported = modelexport.load(report.onnx_path)
    returned, values = pytorch_values(model, inputs), onnx_values(report.onnx_path, inputs)
    assert not value_test(exported, returned, values).failures
    swap = {"ln_1": "fc", "fc": "ln_1"}
    exported.tags = [
        tag
        and msgspec.structs.replace(
            tag, hierarchy_module=swap.get(tag.hierarchy_module, tag.hierarchy_module)
        )
        for tag in exported.tags
    ]
    assert value_test(exported, returned, values).failures
    exported.tags[0] = None
    with pytest.raises(AssertionError, match="no tag"):
        check_map(exported, returned)


@pytest.mark.parametrize("strategy", EXPORTER)
def test_a_node_in_another_module_than_recorded_fails_the_proof(
    strategy: str, tmp_path: Path
) -> None:
    """The proof can fail: give the nodes of a norm to its caller, as a map that follows results does."""
    model, inputs = ZOO["norm_before_dropout"]()
    with recorded_scopes(model) as recorded:
        report = modelexport.export_model(
            distinct(model), inputs, tmp_path / "model.onnx", strategy=strategy
        )
    exported = modelexport.load(report.onnx_path)
    assert differences(exported, model, recorded) == []
    exported.tags = [
        tag
        and msgspec.structs.replace(
            tag, hierarchy_module=tag.hierarchy_module.removesuffix(".final_norm")
        )
        for tag in exported.tags
    ]
    assert len(differences(exported, model, recorded)) > 5


@pytest.mark.regression
@pytest.mark.parametrize(
    ("name", "function"), [("holds_a_traced_module", "trace"), ("scripted_function", "script")]
)
def test_the_zoo_builds_where_torch_deprecates_its_tracer(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 warns with another category than 2.13."""
    original = getattr(torch.jit, function)

    def deprecated(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"`torch.jit.{function}` is deprecated. Please switch.", FutureWarning, stacklevel=2
        )
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.jit, function, deprecated)
    assert ZOO[name]()


@pytest.mark.regression
def test_compat_has_an_environment_of_its_own() -> None:
    root = Path(__file__).parents[1]
    command = ["make", "--dry-run", "compat", "TORCH=9.8.7"]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "echo 'torch==9.8.7' >> build/compat-9.8.7/constraints.txt" in told
    assert "> constraints.txt" not in told
    assert "tests/test_value.py tests/test_architectures.py tests/baseline" in told
