"""The parts of a language model: complete and true maps, transformers' own bytes, right tokens."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import modelexport
from language_models import ALWAYS, CONFIGS, NAMES, VOCABULARY, build, exported, prompt
from modelexport.capture.inputs import ModelInputs
from modelexport.generation.check import generate_with_pytorch
from modelexport.generation.export import widen_inputs
from modelexport.generation.parts import SplitModel, greedy_generation, split_model
from modelexport.generation.records import read_generation
from modelexport.onnx_file.model_file import external_tensors
from scopes import RecordedScopes, differences

EIGHT = 8
LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 5, "<|de|>": 6},
    "task_to_id": {"transcribe": 7, "translate": 8},
    "no_timestamps_token_id": VOCABULARY - 1,
    "suppress_tokens": [12, 13, 14],
    "begin_suppress_tokens": [9, 10],
}
"""What the configuration of a Whisper of several languages adds."""


def split(name: str) -> SplitModel:
    model = build(name)
    return split_model(model, widen_inputs(prompt(model)))


@pytest.mark.must
@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_tagged_as_torch_recorded(name: str) -> None:
    path = exported(name)
    parts = {part.name: part.model for part in split(name).parts}
    record = read_generation(path)
    assert list(record.parts) == list(parts)
    for part, module in parts.items():
        tagged = modelexport.load(path.with_name(record.parts[part].onnx))
        assert all(tag is not None for _, tag in tagged.items())
        assert differences(tagged, module, RecordedScopes(module)) == []
        assert modelexport.validate(tagged.path).findings == ()
        onnx.checker.check_model(str(tagged.path), full_check=True)


@pytest.mark.must
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_pytorch(name: str) -> None:
    """At other lengths than that of the export, shorter and longer."""
    path, model = exported(name), build(name)
    seen: set[int] = set()
    for length in (2, 9):
        given = {n: t.numpy() for n, t in prompt(model, length, seed=length).items()}
        ids = given["input_ids"][0].tolist() if "input_ids" in given else None
        result = modelexport.generate(
            path, input_ids=ids, inputs=None if ids else given, max_new_tokens=EIGHT
        )
        assert result.tokens == generate_with_pytorch(model, given, read_generation(path), EIGHT)
        seen.update(result.tokens)
    assert len(seen) > 2  # or the test would prove little


def test_generate_may_run_the_model_before_the_first_step(tmp_path: Path) -> None:
    """Whisper finds out the language by a call without a cache, and forbids some tokens."""
    model = build("whisper")
    for name, value in LANGUAGES.items():
        setattr(model.generation_config, name, value)
    path = modelexport.export_generation(model, prompt(model), tmp_path / "m").generation_path
    assert path is not None
    record = read_generation(path)
    assert list(record.parts) == ["encode", "prefill", "decode"]
    assert record.tokens.decoder_start[1] in (5, 6)  # the language
    given = {n: t.numpy() for n, t in prompt(model, seed=3).items()}
    result = modelexport.generate(path, inputs=given, max_new_tokens=EIGHT)
    assert result.tokens == generate_with_pytorch(model, given, record, EIGHT)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_a_part_agrees_with_pytorch(name: str) -> None:
    path = exported(name)
    record = read_generation(path)
    for part in split(name).parts:
        file = path.with_name(record.parts[part.name].onnx)
        result = modelexport.verify(
            part.model, ModelInputs((), part.inputs), file, atol=1e-3, rtol=1e-2
        )
        assert result.agrees, (part.name, result.causes)
        root = next(module for module in result.modules if not module.module)
        assert len(root.tensors) == len(record.parts[part.name].outputs)  # caches included


@pytest.mark.must
@pytest.mark.skipif("ALL_GENERATION" not in os.environ, reason="make generation")
@pytest.mark.parametrize("name", NAMES[1:])
def test_strip_gives_the_bytes_of_transformers(name: str, tmp_path: Path) -> None:
    # Both in this process: the order of operations may be that of a set, as in Gemma 3.
    model = build(name)
    path = modelexport.export_generation(model, prompt(model), tmp_path / "m").generation_path
    assert path is not None
    record = read_generation(path)
    for part in split(name).parts:
        alone = tmp_path / f"{part.name}.onnx"
        export_alone(part.model, part.inputs, alone)
        assert_same_but_for_location(path.with_name(record.parts[part.name].onnx), alone, tmp_path)


@pytest.mark.must
def test_strip_gives_the_bytes_of_export_for_generation(tmp_path: Path) -> None:
    """What transformers writes by itself, from the same inputs of `generate`."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    path, model = exported("llama"), build("llama")
    with warnings.catch_warnings(), greedy_generation(model) as config:
        programs = OnnxExporter().export_for_generation(
            model,
            widen_inputs(prompt(model)),
            OnnxConfig(dynamic=True),
            generation_config=config,
            multi_token_decode=True,
        )
    record = read_generation(path)
    assert set(programs) == set(record.parts)
    for part, program in programs.items():
        program.save(str(tmp_path / f"{part}.onnx"), external_data=True)
        ours = path.with_name(record.parts[part].onnx)
        assert_same_but_for_location(ours, tmp_path / f"{part}.onnx", tmp_path)


def export_alone(model: Any, inputs: dict[str, Any], path: Path) -> None:
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic=True, output_path=str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OnnxExporter().export(model, copy.deepcopy(inputs), config)


def assert_same_but_for_location(ours: Path, alone: Path, folder: Path) -> None:
    """Assert that two files are the same, with the same data at other places of data files."""
    stripped = folder / f"stripped-{ours.name}"
    modelexport.strip(ours, stripped)
    mine, theirs = (onnx.load(one, load_external_data=False) for one in (stripped, alone))
    tensors = [list(external_tensors(proto)) for proto in (mine, theirs)]
    for one, other in zip(*tensors, strict=True):
        assert data_of(one, ours.parent) == data_of(other, alone.parent)
        del one.external_data[:]
        one.external_data.extend(other.external_data)
    assert mine.SerializeToString() == alone.read_bytes()


def data_of(tensor: onnx.TensorProto, folder: Path) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    start = int(entries["offset"])
    data = (folder / entries["location"]).read_bytes()
    return data[start : start + int(entries["length"])]


def test_weights_are_stored_once() -> None:
    path = exported("llama")
    record = read_generation(path)
    assert record.data == ("m_generation.onnx.data",)
    data = path.with_name("m_generation.onnx.data")
    spans = {}
    for part in record.parts.values():
        proto = onnx.load(path.with_name(part.onnx), load_external_data=False)
        for tensor in external_tensors(proto):
            spans[data_of(tensor, path.parent)] = tensor
            assert tensor.external_data[0].value == data.name
    assert sum(map(len, spans)) <= data.stat().st_size <= sum(map(len, spans)) + 4096 * len(spans)
    weights = sum(p.numel() * p.element_size() for p in build("llama").parameters())
    assert data.stat().st_size < 1.2 * weights
    assert sorted(one.name for one in path.parent.iterdir()) == [
        "m_decode.onnx",
        "m_decode_hierarchy.json",
        "m_generation.json",
        "m_generation.onnx.data",
        "m_prefill.onnx",
        "m_prefill_hierarchy.json",
        "tokenizer",
    ]


def test_texts_of_different_lengths_in_one_batch() -> None:
    """The mask is an input, and rows of any number are padded on the left."""
    path, model = exported("llama"), build("llama")
    ids = torch.randint(4, 18, (3, 6))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[2, :1] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    session = onnxruntime.InferenceSession(path.with_name("m_prefill.onnx"))
    (logits,) = session.run(["logits"], {name: t.numpy() for name, t in feeds.items()})
    with torch.no_grad():
        expected = model(**feeds).logits[:, -1].numpy()
    np.testing.assert_allclose(logits[:, -1], expected, atol=1e-3, rtol=1e-2)


def test_a_cache_of_fixed_size() -> None:
    path, model = exported("llama", 16), build("llama")
    record = read_generation(path)
    assert record.max_cache_length == 16
    given = {"input_ids": prompt(model, 4)["input_ids"].numpy()}
    result = modelexport.generate(path, input_ids=given["input_ids"][0], max_new_tokens=12)
    assert result.tokens == generate_with_pytorch(model, given, record, 12)
    with pytest.raises(modelexport.ArgumentError, match="do not fit into a cache of 16"):
        modelexport.generate(path, input_ids=[5, 6, 7, 8, 9], max_new_tokens=13)


@pytest.mark.parametrize(("name", "reason"), [("t5", "encode"), ("mistral", "window")])
def test_no_cache_of_fixed_size(name: str, reason: str, tmp_path: Path) -> None:
    model = build(name)
    with pytest.raises(modelexport.ArgumentError, match=f"{reason}.* has no cache of fixed size"):
        modelexport.export_generation(model, prompt(model), tmp_path / "m", max_cache_length=9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exporter": "dynamo"}, "exports with the transformers exporter"),
        ({"graphml_output": "m.graphml"}, "graphml_output names one file"),
        ({"fx_graph": "m.txt"}, "fx_graph names one file"),
        ({"max_cache_length": 0}, "max_cache_length must be 1 or more"),
        ({"max_cache_length": 6}, "too short for the example prompt: it needs 7"),
    ],
)
def test_options_that_cannot_work(options: Any, message: str, tmp_path: Path) -> None:
    model = build("llama")
    with pytest.raises(modelexport.ArgumentError, match=message):
        modelexport.export_generation(model, prompt(model), tmp_path / "m", **options)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": [[1, 2, 3]]}, modelexport.ArgumentTypeError, "input_ids is a list"),
        ({"input_ids": torch.tensor([1, 2])}, modelexport.ArgumentTypeError, "input_ids is a Ten"),
        (
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": [[1, 1]]},
            modelexport.ArgumentTypeError,
            "attention_mask is a list",
        ),
        (
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1]])},
            modelexport.ArgumentError,
            "attention_mask has the shape",
        ),
    ],
)
def test_tokens_that_are_no_tensors(
    inputs: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        modelexport.export_generation(build("llama"), inputs, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sanity
@pytest.mark.parametrize("output", ["", ".", "models/", "/"])
def test_an_output_without_a_name(output: str) -> None:
    model = build("llama")
    with pytest.raises(modelexport.ArgumentError, match="is a folder"):
        modelexport.export_generation(model, prompt(model), output)


def test_a_model_that_does_not_generate(tmp_path: Path) -> None:
    with pytest.raises(modelexport.ArgumentError, match="does not generate text"):
        modelexport.export_generation(torch.nn.Linear(2, 2), {}, tmp_path / "m")


def test_every_configuration_has_a_name() -> None:
    encoders = [name for name in CONFIGS if build(name).config.is_encoder_decoder]
    assert encoders == ["t5", "bart", "whisper"]
    assert len(NAMES) == len(CONFIGS) >= ALWAYS
