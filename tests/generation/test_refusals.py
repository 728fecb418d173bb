"""What `export --generation` refuses: in one line, as early as it can be known, with no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

import modelexport
from language_models import GROUPED, VOCABULARY, exported
from modelexport.generation.export import _unknown_inputs
from modelexport.generation.records import GenerationInput, InputRole, read_generation
from modelexport.options import ExportOptions
from modelexport.source_export import run_export

DIA = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}
DIA_DECODER = {
    "cross_num_attention_heads": 4,
    "cross_num_key_value_heads": 4,
    "cross_head_dim": 8,
    "cross_hidden_size": 32,
    "eos_token_id": 10,
    "pad_token_id": 11,
    "bos_token_id": 12,
}


class Counting(transformers.LlamaForCausalLM):
    """A Llama that makes a Python number of the length of its cache, as ProphetNet does."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        length = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        result = super().forward(*args, past_key_values=past_key_values, **kwargs)
        result.logits = result.logits * torch.full((1,), 1.0 + length)
        return result


def xlnet() -> Any:
    return transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=64, vocab_size=VOCABULARY)
    )


def dia() -> Any:
    """A model that generates the codes of a sound: nine sequences at once."""
    return transformers.DiaForConditionalGeneration(
        transformers.DiaConfig(encoder_config=DIA, decoder_config={**DIA, **DIA_DECODER})
    )


def counting() -> Any:
    return Counting(transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (xlnet, modelexport.ArgumentError, "takes 3 tokens at each step of generate"),
        (dia, modelexport.ArgumentError, "generates 9 sequences of tokens at once, not a text"),
        (counting, modelexport.ExportError, "would take a cache of [0-9]+ tokens only"),
    ],
)
def test_a_model_that_generates_in_another_way(
    make: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    inputs = {"input_ids": prompt_ids()}
    with pytest.raises(error, match=message) as raised:
        modelexport.export_generation(model, inputs, tmp_path / "m")
    assert "leave generation" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def prompt_ids() -> torch.Tensor:
    return torch.randint(4, 10, (1, 5), generator=torch.Generator().manual_seed(0))


def test_a_part_with_an_input_of_unknown_origin() -> None:
    record = read_generation(exported("llama"))
    assert list(_unknown_inputs(record)) == []
    decode = record.parts["decode"]
    other = {**decode.inputs, "noise": GenerationInput(InputRole.OTHER)}
    parts = {**record.parts, "decode": msgspec.structs.replace(decode, inputs=other)}
    (note,) = _unknown_inputs(msgspec.structs.replace(record, parts=parts))
    assert note == "generate cannot run m_decode.onnx: the origin of its input 'noise' is not known"


@pytest.mark.sanity
@pytest.mark.parametrize("generation", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_the_output_folder_is_checked_before_torch_is_loaded(
    generation: bool, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "does not exist"
    if exists:
        monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
        message = "cannot write to"
    output = (tmp_path if exists else tmp_path / "absent") / "m.onnx"
    steps: list[str] = []
    with pytest.raises(modelexport.ModelExportError, match=message):
        run_export("no-model", output, ExportOptions(generation=generation), steps.append)
    assert steps == []
