"""The exporter `transformers` for one file: its bytes, its map, and caches among the inputs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
import transformers
from click.testing import CliRunner

import modelexport
from language_models import SMALL
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.transformers_exporter import check_inputs
from modelexport.cli.main import main
from proof import model_unchanged
from scopes import RecordedScopes, differences


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1})
    return transformers.LlamaForCausalLM(config).eval()


def with_cache(model: Any) -> dict[str, Any]:
    """Return the inputs of a step after three tokens."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache)
    return {"input_ids": torch.tensor([[8]]), "past_key_values": cache}


@pytest.mark.must
def test_a_file_with_a_cache(tmp_path: Path) -> None:
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = llama()
    inputs = with_cache(model)
    (tmp_path / "alone").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = OnnxConfig(output_path=str(tmp_path / "alone" / "m.onnx"))
        OnnxExporter().export(llama(), copy.deepcopy(inputs), config)
    with model_unchanged(model):
        report = modelexport.export_model(
            model, inputs, tmp_path / "m.onnx", exporter="transformers"
        )
    assert (report.strategy, report.exporter, report.coverage) == ("fx", "transformers", 1.0)
    assert inputs["past_key_values"].get_seq_length() == 3  # the caller's cache is unchanged
    names = [info.name for info in report.hierarchy.export.inputs]
    assert names == [
        "input_ids",
        "input.past_key_values.layers.0.keys",
        "input.past_key_values.layers.0.values",
    ]
    assert list(report.hierarchy.export.example_inputs) == names
    modelexport.strip(tmp_path / "m.onnx", tmp_path / "stripped.onnx")
    alone = (tmp_path / "alone" / "m.onnx").read_bytes()
    assert (tmp_path / "stripped.onnx").read_bytes() == alone
    data = (tmp_path / "m.onnx.data").read_bytes()
    assert data == (tmp_path / "alone" / "m.onnx.data").read_bytes()
    tagged = modelexport.load(tmp_path / "m.onnx")
    assert differences(tagged, model, RecordedScopes(model)) == []
    assert modelexport.verify(model, inputs, tmp_path / "m.onnx").agrees


@pytest.mark.sanity
def test_names_cannot_be_chosen(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(modelexport.ArgumentError, match="names inputs and outputs itself"):
        modelexport.export_model(
            model,
            {"input_ids": torch.tensor([[5, 6]])},
            tmp_path / "m.onnx",
            exporter="transformers",
            input_names=["x"],
        )


def prophetnet() -> tuple[Any, dict[str, Any]]:
    """Build a model that dynamo alone cannot export: it subtracts a tensor of bools."""
    torch.manual_seed(0)
    kinds = ("encoder", "decoder")
    config = transformers.ProphetNetConfig(
        vocab_size=50,
        hidden_size=16,
        max_position_embeddings=32,
        **{f"num_{kind}_layers": 1 for kind in kinds},
        **{f"num_{kind}_attention_heads": 2 for kind in kinds},
        **{f"{kind}_ffn_dim": 16 for kind in kinds},
    )
    tokens = torch.tensor([[4, 5, 6]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    model = transformers.ProphetNetModel(config).eval()
    return model, {**inputs, "decoder_input_ids": torch.tensor([[4, 5]])}


def test_auto_tries_it_where_dynamo_fails(tmp_path: Path) -> None:
    model, inputs = prophetnet()
    with pytest.warns(modelexport.FallbackWarning, match="transformers was used, which replaces"):
        report = modelexport.export_model(model, inputs, tmp_path / "m.onnx")
    assert (report.strategy, report.exporter, report.coverage) == ("fx", "transformers", 1.0)
    assert report.fallback_reason is not None
    assert modelexport.verify(model, inputs, tmp_path / "m.onnx").agrees


def test_auto_goes_on_where_it_refuses(tmp_path: Path) -> None:
    """Here because the caller chooses names, which this exporter does not take."""
    model, inputs = prophetnet()
    names = list(inputs)
    with pytest.warns(modelexport.FallbackWarning, match="torchscript was used"):
        report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", input_names=names)
    assert [info.name for info in report.hierarchy.export.inputs] == names


def test_auto_takes_no_file_with_other_inputs(tmp_path: Path) -> None:
    model = llama()
    inputs = ModelInputs((), {"input_ids": torch.tensor([[5, 6]])})
    graph = onnx_ir.Graph([onnx_ir.val("input_ids"), onnx_ir.val("cu_seqlens")], [], nodes=[])
    with pytest.raises(ValueError, match="inputs that were not given: cu_seqlens"):
        check_inputs(model, inputs, graph)


def test_it_is_recommended_for_models_of_transformers_only() -> None:
    _, reason = modelexport.recommend_strategy(llama())
    assert "fx with transformers or htp with torchscript" in reason
    assert "transformers" not in modelexport.recommend_strategy(torch.nn.Linear(2, 2))[1]


def test_the_command_line_with_dynamic_axes(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "llama")
    arguments = ["export", tmp_path / "llama", tmp_path / "m.onnx", "--exporter", "transformers"]
    done = CliRunner().invoke(main, [*map(str, arguments), "--dynamic"])
    assert done.exit_code == 0, done.output
    assert "exporter transformers" in done.stdout
    export = modelexport.load(tmp_path / "m.onnx").records.export
    (info,) = (one for one in export.inputs if one.name == "input_ids")
    assert all(isinstance(size, str) for size in info.shape)
