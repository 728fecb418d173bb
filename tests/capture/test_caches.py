"""Models with a cache as input and output: the map, names, shapes and generation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from torch.utils import _pytree

import modelexport
from caches import KEYS, decode_step
from exports import EXPORTER
from modelexport.verification.feeds import make_feeds
from proof import prove, strip_bytes
from values import names, open_session

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


@pytest.mark.must
@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "whisper"])
def test_a_decoder_with_a_cache(name: str, strategy: str, tmp_path: Path) -> None:
    """Every promise of the map holds, and every module agrees by value."""
    model, inputs = decode_step(name)
    cache = copy.deepcopy(inputs["past_key_values"])
    assert prove(model, inputs, tmp_path, strategy).checked > 10
    path = tmp_path / "model.onnx"
    report = modelexport.verify(model, inputs, path, random_inputs=1)
    assert report.agrees
    root = next(module for module in report.modules if not module.module)
    before, after = map(_pytree.tree_leaves, (cache, inputs["past_key_values"]))
    assert len(root.tensors) == len(onnx.load(path).graph.output) > len(before) > 0
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("strategy", EXPORTER)
def test_names_of_caches(strategy: str, tmp_path: Path) -> None:
    model, inputs = decode_step("llama")
    first = {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    report = modelexport.export_model(model, first, tmp_path / "p.onnx", strategy=strategy)
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state", *KEYS]
    assert report.dropped_outputs == ()
    report = modelexport.export_model(model, inputs, tmp_path / "d.onnx", strategy=strategy)
    repeated = [f"output.{name}" for name in KEYS]
    assert names(report.hierarchy.export.inputs) == ["input_ids", *KEYS]
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state", *repeated]
    assert report.dropped_outputs == ()
    positional = (inputs["input_ids"], None, None, inputs["past_key_values"])
    report = modelexport.export_model(model, positional, tmp_path / "a.onnx", strategy=strategy)
    assert names(report.hierarchy.export.inputs) == ["input_ids", *KEYS]
    assert modelexport.verify(model, positional, report.onnx_path).agrees


@pytest.mark.must
@pytest.mark.parametrize("name", ["llama", "t5", "mamba"])
def test_stripped_bytes_with_a_cache_are_the_baseline(name: str, tmp_path: Path) -> None:
    model, inputs = decode_step(name)
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx")
    plain = tmp_path / "plain" / "m.onnx"
    plain.parent.mkdir()
    torch.onnx.export(
        model,
        (),
        str(plain),
        kwargs=inputs,
        dynamo=True,
        verbose=False,
        input_names=names(report.hierarchy.export.inputs),
        output_names=names(report.hierarchy.export.outputs),
    )
    assert strip_bytes(report.onnx_path) == plain.read_bytes()


def test_generation_with_the_exported_files(tmp_path: Path) -> None:
    """The outputs of one step are the inputs of the next, by name."""
    model, step = decode_step("llama")
    tokens = torch.arange(5)[None]
    shapes = {"input_ids": None, **{name: {2: "past"} for name in KEYS}}
    prefill = modelexport.export_model(
        model, {"input_ids": tokens[:, :2]}, tmp_path / "p.onnx", strategy="fx"
    )
    decode = modelexport.export_model(
        model, step, tmp_path / "d.onnx", strategy="fx", dynamic_shapes=shapes
    )
    outputs = run(prefill.onnx_path, {"input_ids": tokens[:, :2].numpy()})
    for position in range(2, 5):
        cache = {name.removeprefix("output."): value for name, value in outputs.items()}
        cache.pop("last_hidden_state")
        token = tokens[:, position : position + 1].numpy()
        outputs = run(decode.onnx_path, {"input_ids": token, **cache})
    with torch.no_grad():
        expected = model(tokens).last_hidden_state[:, -1:]
    np.testing.assert_allclose(outputs["last_hidden_state"], expected, rtol=1e-3, atol=1e-4)


def run(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    session = open_session(str(path))
    outputs = names(session.get_outputs())
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


@pytest.mark.parametrize("strategy", EXPORTER)
def test_dynamic_shapes_of_a_cache(strategy: str, tmp_path: Path) -> None:
    """They may be nested as torch.export nests them, or by the names of the tensors."""
    model, inputs = decode_step("llama", mask=True)
    plain = {"attention_mask": {1: "total"}}
    files = []
    for number, shapes in enumerate(
        ({"past_key_values": [{2: "past"}] * 4}, {name: {2: "past"} for name in KEYS})
    ):
        report = modelexport.export_model(
            model,
            inputs,
            tmp_path / f"{number}.onnx",
            strategy=strategy,
            dynamic_shapes={**plain, **shapes},
            external_data=False,
            scrub=True,  # torch numbers the code that it generates
        )
        files.append(strip_bytes(report.onnx_path))
        by_name = {value.name: value.shape for value in report.hierarchy.export.inputs}
        assert by_name[KEYS[3]] == (1, 1, "past", 8)
        assert by_name["attention_mask"] == (1, "total")
        longer = {
            **inputs,
            "attention_mask": torch.ones(1, 11, dtype=torch.long),
            "past_key_values": _pytree.tree_map(
                lambda tensor: torch.cat([tensor, tensor[:, :, :3]], 2), inputs["past_key_values"]
            ),
        }
        assert modelexport.verify(model, longer, report.onnx_path).agrees
    assert files[0] == files[1]


def test_recorded_inputs_feed_a_cache(tmp_path: Path) -> None:
    model, inputs = decode_step("llama")
    path = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx").onnx_path
    feeds = make_feeds(modelexport.load(path))
    assert feeds.source == "inputs like the recorded ones"
    assert {name: value.shape for name, value in feeds.values.items()} == {
        "input_ids": (1, 1),
        **dict.fromkeys(KEYS, (1, 1, 7, 8)),
    }
    assert modelexport.profile(path, runs=1).modules
    changed = tmp_path / "changed.onnx"
    changed.write_bytes(strip_bytes(path))
    report = modelexport.retag(path, changed, tmp_path / "retagged.onnx")
    assert report.compared == "inputs like the recorded ones"


def test_what_an_exporter_cannot_write_is_dropped_and_named(tmp_path: Path) -> None:
    """torchscript lacks an operator that updates this cache."""
    model, inputs = decode_step("mamba")
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    assert report.dropped_outputs == ("cache_params: DynamicCache",)
    assert names(report.hierarchy.export.outputs) == ["last_hidden_state"]
    assert modelexport.verify(model, inputs, report.onnx_path).agrees


def test_a_live_program_with_a_cache(tmp_path: Path) -> None:
    model, inputs = decode_step("t5")
    expected = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="fx")
    program = torch.export.export(model, (), kwargs=inputs)
    report = modelexport.export_model(program, None, tmp_path / "p.onnx")
    for ours, theirs in (
        (report.hierarchy.export.inputs, expected.hierarchy.export.inputs),
        (report.hierarchy.export.outputs, expected.hierarchy.export.outputs),
    ):
        assert names(ours) == names(theirs)
    assert modelexport.verify(program, None, report.onnx_path).agrees


def test_transformers_still_has_what_is_called() -> None:
    """If it moves, caches are dropped without an error."""
    from transformers.exporters import exporter_dynamo

    assert exporter_dynamo.Cache is transformers.Cache
    assert exporter_dynamo.PreTrainedModel is transformers.PreTrainedModel
