"""Real architectures of transformers: the map is true and the graph is the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import modelexport
from architectures import ARCHITECTURES
from exports import EXPORTER, cases, export, prove_export
from proof import plain_export, prove, strip_bytes

pytestmark = [pytest.mark.must, pytest.mark.integration]


@pytest.mark.parametrize(("name", "strategy"), cases(*ARCHITECTURES))
def test_architecture(name: str, strategy: str, tmp_path: Path) -> None:
    assert prove_export(name, strategy).checked > 10
    path, model, inputs = export(name, strategy, tmp_path)
    sidecar = modelexport.load(path).sidecar
    assert sidecar is not None
    assert sidecar.export.dropped_outputs == ()
    outputs = [value.name for value in sidecar.export.outputs]
    assert any(".layers.0." in name for name in outputs) == model.config.use_cache
    if not model.config.use_cache:
        assert_baseline_bytes(path, model, inputs, EXPORTER[strategy])


def assert_baseline_bytes(path: Path, model: nn.Module, inputs: Any, exporter: str) -> None:
    """Check that a file without its map has the bytes of a plain export with the same names."""
    names = [value.name for value in onnx.load(path).graph.output]
    plain = path.parent / "plain" / path.name
    plain.parent.mkdir()
    plain_export(model, inputs, plain, exporter, output_names=names)
    assert strip_bytes(path) == plain.read_bytes()


LAYER = "/BertModel/BertEncoder/BertLayer.{}"
BERT_TAGS = {
    "/BertModel",
    "/BertModel/BertEmbeddings",
    "/BertModel/BertEmbeddings/Embedding.word_embeddings",
    "/BertModel/BertEmbeddings/Embedding.position_embeddings",
    "/BertModel/BertEmbeddings/Embedding.token_type_embeddings",
    "/BertModel/BertEmbeddings/LayerNorm",
    "/BertModel/BertEncoder",
    "/BertModel/BertPooler",
} | {
    LAYER.format(number) + rest
    for number in (0, 1)
    for rest in (
        "",
        "/BertAttention",
        "/BertAttention/BertSelfAttention",
        "/BertAttention/BertSelfOutput",
        "/BertAttention/BertSelfOutput/LayerNorm",
        "/BertIntermediate",
        "/BertIntermediate/GELUActivation",
        "/BertOutput",
        "/BertOutput/LayerNorm",
    )
}


@pytest.mark.parametrize("strategy", EXPORTER)
def test_bert_has_its_26_tags(strategy: str, tmp_path: Path) -> None:
    assert len(BERT_TAGS) == 26
    path, _, _ = export("bert", strategy, tmp_path)
    sidecar = modelexport.load(path).sidecar
    assert sidecar is not None
    tags = [record.tag for record in sidecar.modules.values()]
    assert {tag for tag in tags if tag is not None} == BERT_TAGS
    assert set(sidecar.expected_hierarchy) == BERT_TAGS
    assert sidecar.expected_hierarchy[0] == "/BertModel"
    outputs = [value.name for value in sidecar.export.outputs]
    assert outputs == ["last_hidden_state", "pooler_output"]
    assert [value.name for value in sidecar.export.inputs] == ["input_ids", "attention_mask"]


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_torch_can_only_translate_without_gradients(tmp_path: Path) -> None:
    """With a learned bias in its attention, dynamo captures other kernels than it decomposes to."""
    model, inputs = ARCHITECTURES["t5"]()
    model.set_attn_implementation("sdpa")
    prove(model, inputs, tmp_path, "fx")
    refused = str(tmp_path / "refused.onnx")
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(model, (), refused, kwargs=inputs, dynamo=True, verbose=False)
    assert_baseline_bytes(tmp_path / "model.onnx", model, inputs, "dynamo")


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
def test_the_last_norm_of_a_stack_owns_its_nodes(strategy: str, tmp_path: Path) -> None:
    """A dropout without effect follows the norm, so that its result has another name."""
    path, _, _ = export("t5", strategy, tmp_path)
    modules = modelexport.load(path).modules
    for stack in ("encoder", "decoder"):
        assert modules[f"{stack}.final_layer_norm"].nodes >= 6
        assert modules[f"{stack}.final_layer_norm"].status == "nodes"
        assert modules[f"{stack}.dropout"].nodes == 0
    if strategy == "fx":
        assert modules["encoder.final_layer_norm"].nodes == 7
