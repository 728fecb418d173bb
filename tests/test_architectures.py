"""Real transformers architectures, both exporters: the map is true and the graph is the baseline's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import modelexport
from architectures import ARCHITECTURES
from proof import plain_export, prove, strip_bytes

EXPORTER = {"fx": "dynamo", "htp": "torchscript"}
NEEDS_CACHE = {"gpt2", "llama", "whisper"}
"""Without a cache these use an operator that the torchscript exporter does not have."""

pytestmark = [pytest.mark.must, pytest.mark.integration]


@pytest.mark.parametrize("strategy", EXPORTER)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, strategy: str, tmp_path: Path) -> None:
    model, inputs = ARCHITECTURES[name]()
    cached = strategy == "htp" and name in NEEDS_CACHE
    model.config.use_cache = cached
    verdict = prove(model, inputs, tmp_path, strategy)
    assert verdict.checked > 10
    exported = modelexport.load(tmp_path / "model.onnx")
    assert exported.sidecar is not None
    assert bool(exported.sidecar.export.dropped_outputs) == cached
    if cached:
        return
    names = [output.name for output in exported.proto.graph.output]
    (tmp_path / "plain").mkdir()
    plain_export(
        model, inputs, tmp_path / "plain" / "model.onnx", EXPORTER[strategy], output_names=names
    )
    assert strip_bytes(tmp_path / "model.onnx") == (tmp_path / "plain" / "model.onnx").read_bytes()


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
    model, inputs = ARCHITECTURES["bert"]()
    report = modelexport.export_model(model, inputs, tmp_path / "bert.onnx", strategy=strategy)
    modules = report.hierarchy.modules
    assert {record.tag for record in modules.values() if record.tag is not None} == BERT_TAGS
    assert set(report.hierarchy.expected_hierarchy) == BERT_TAGS
    assert report.hierarchy.expected_hierarchy[0] == "/BertModel"
    assert [output.name for output in report.hierarchy.export.outputs] == [
        "last_hidden_state",
        "pooler_output",
    ]
    assert [value.name for value in report.hierarchy.export.inputs] == [
        "input_ids",
        "attention_mask",
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_torch_can_only_translate_without_gradients(tmp_path: Path) -> None:
    """With a learned bias in its attention, dynamo captures other kernels than it decomposes to."""
    model, inputs = ARCHITECTURES["t5"]()
    model.set_attn_implementation("sdpa")
    (tmp_path / "plain").mkdir()
    prove(model, inputs, tmp_path, "fx")
    names = [output.name for output in modelexport.load(tmp_path / "model.onnx").proto.graph.output]
    plain = tmp_path / "plain" / "model.onnx"
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(model, (), str(plain), kwargs=inputs, dynamo=True, verbose=False)
    plain_export(model, inputs, plain, "dynamo", output_names=names)
    assert strip_bytes(tmp_path / "model.onnx") == plain.read_bytes()


@pytest.mark.regression
@pytest.mark.parametrize("strategy", EXPORTER)
def test_the_last_norm_of_a_stack_owns_its_nodes(strategy: str, tmp_path: Path) -> None:
    """A dropout follows the norm and does nothing; the norm's result goes by another name."""
    model, inputs = ARCHITECTURES["t5"]()
    report = modelexport.export_model(model, inputs, tmp_path / "t5.onnx", strategy=strategy)
    modules = report.hierarchy.modules
    for stack in ("encoder", "decoder"):
        assert modules[f"{stack}.final_layer_norm"].nodes >= 6
        assert modules[f"{stack}.final_layer_norm"].status == "nodes"
        assert modules[f"{stack}.dropout"].nodes == 0
    if strategy == "fx":
        assert modules["encoder.final_layer_norm"].nodes == 7
