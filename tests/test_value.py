"""The heart of the project: on every awkward module, every promise of the map holds."""

from __future__ import annotations

import itertools
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch
from torch import nn

import modelexport
from exports import EXPORTER, cases, export, export_scopes, prove_export
from modelexport.graph.flat import nested_graphs
from proof import (
    check_map,
    onnx_values,
    plain_export,
    prove,
    pytorch_values,
    strip_bytes,
    value_test,
)
from scopes import differences
from zoo import TORCH_CANNOT, ZOO, distinct

GENERATED = re.compile(rb"<eval_with_key>\.\d+")
"""torch numbers the code of conditional branches from one export to the next."""

RETURNS_A_MAPPING = {
    "keyword_only_forward",
    "keys_like_inner_names",
    "output_named_after_a_step_without_effect",
}
NO_BASELINE = {"outputs_not_tensors"}
"""A plain export refuses outputs that are no tensors."""

EQUAL_WEIGHTS = {
    "block_three_times",
    "conditional_in_a_conditional",
    "conditional_bodies",
    "conv_batch_norm",
    "encoder_and_decoder_of_torch",
    "encoder_layer",
    "flatten_unflatten",
    "hook_calls_a_module",
    "ln_twice_beside_ln_1",
    "module_dict_odd_keys",
    "conditional_module_twice",
    "modules_without_gradients",
    "multi_head_attention",
    "norm_before_dropout",
    "padded_conv_batch_norm",
    "pass_through_children",
    "permutations_that_cancel",
    "same_object_two_names",
    "sequential_root",
    "sliced_lists",
    "tied_weights",
    "twice_the_same",
    "two_classes_one_name",
    "two_module_lists",
    "weight_norm",
}
"""Models in which torch initialises weights alike, such as with ones: exporters merge those."""

pytestmark = [pytest.mark.must, pytest.mark.integration]


def unnumbered(data: bytes) -> bytes:
    """Remove those numbers; one with more digits also changes the lengths stored around it."""
    if not GENERATED.search(data):
        return data
    model = onnx.ModelProto.FromString(data)
    pending = [model.graph]
    while pending:
        for node in pending.pop().node:
            pending.extend(subgraph for _, subgraph in nested_graphs(node.attribute))
            for entry in node.metadata_props:
                entry.value = GENERATED.sub(b"", entry.value.encode()).decode()
    return model.SerializeToString()


@pytest.mark.parametrize(("name", "strategy"), cases(*ZOO))
def test_the_map_is_true(name: str, strategy: str) -> None:
    assert prove_export(name, strategy).checked > 0


@pytest.mark.parametrize(("name", "strategy"), cases(*sorted(EQUAL_WEIGHTS)))
def test_the_map_is_true_with_equal_weights(name: str, strategy: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    assert prove(model, inputs, tmp_path, strategy).checked > 0


def test_equal_weights_are_listed() -> None:
    assert {name for name, build in ZOO.items() if has_equal_weights(build()[0])} == EQUAL_WEIGHTS


def has_equal_weights(model: nn.Module) -> bool:
    """Return whether a weight has one value only, or two weights are equal."""
    weights = [weight for weight in (*model.parameters(), *model.buffers()) if weight.numel()]
    return any(weight.unique().numel() == 1 for weight in weights) or any(
        torch.equal(first, second) for first, second in itertools.combinations(weights, 2)
    )


@pytest.mark.parametrize(
    ("name", "strategy"), cases(*(name for name in ZOO if name not in NO_BASELINE))
)
def test_stripped_bytes_are_the_baseline(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path / "tagged")
    options = {}
    if name in RETURNS_A_MAPPING:
        options["output_names"] = [value.name for value in onnx.load(path).graph.output]
    plain = tmp_path / "plain" / path.name
    plain.parent.mkdir()
    plain_export(model.eval(), inputs, plain, EXPORTER[strategy], **options)
    assert unnumbered(strip_bytes(path)) == unnumbered(plain.read_bytes())
    ours, theirs = (
        {data.name: data.read_bytes() for data in file.parent.glob("*.data")}
        for file in (path, plain)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", sorted(set(ZOO) - TORCH_CANNOT["torchscript"]))
def test_usage_based_never_contradicts(name: str, tmp_path: Path) -> None:
    """The strategy may leave nodes untagged, but only tags modules that ran."""
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
    path, model, inputs = export("ln_twice_beside_ln_1", "htp", tmp_path)
    exported = modelexport.load(path)
    returned, values = pytorch_values(model, inputs), onnx_values(path, inputs)
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
    """The proof can fail: give a norm's nodes to its caller, as a map that follows results does."""
    path, model, _ = export("norm_before_dropout", strategy, tmp_path)
    recorded = export_scopes("norm_before_dropout", strategy, model)
    exported = modelexport.load(path)
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
    recipe = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert "echo 'torch==9.8.7' >> build/compat-9.8.7/constraints.txt" in recipe
    assert "> constraints.txt" not in recipe
    tests = re.findall(r"tests/\S+", recipe)
    assert {"tests/test_value.py", "tests/test_architectures.py", "tests/capture"} <= {*tests}
    assert all((root / path).exists() for path in tests)
