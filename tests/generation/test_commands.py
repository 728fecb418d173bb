"""The commands for language models: export in parts, generate, verify and profile a part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result

import modelexport
from exports import shared_folder
from folders import tokenizer
from language_models import SMALL, build
from modelexport.cli.main import main
from modelexport.generation.records import read_generation


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with a model `llama` of one layer, and its parts `m`."""

    def fill(folder: Path) -> None:
        config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1})
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder / "llama")
        tokenizer().save_pretrained(folder / "llama")
        done = run("export", folder / "llama", folder / "m.onnx", "--generation")
        assert done.exit_code == 0, done.output
        (folder / "stdout.txt").write_text(done.stdout)
        (folder / "stderr.txt").write_text(done.stderr)

    return shared_folder("generation-commands", fill)


@pytest.mark.smoke
def test_two_arguments_and_a_flag(folder: Path) -> None:
    stdout = (folder / "stdout.txt").read_text()
    assert "LlamaForCausalLM in parts" in stdout
    assert "weights of all parts in m.onnx.data" in stdout
    assert "batch, sequence and cache lengths are symbolic" in stdout
    assert "next: modelexport generate" in (folder / "stderr.txt").read_text()
    record = read_generation(folder / "m_generation.json")
    assert record.tokenizer == "llama"
    assert record.tokens == modelexport.TokenIds(bos=2, eos=(3,), pad=0)
    for part in record.parts.values():
        cached = [name for name, one in part.inputs.items() if one.role == "state"]
        assert len(cached) == (2 if part.onnx == "m_decode.onnx" else 0)
    assert str(folder) not in (folder / "m_generation.json").read_text()


def test_text_goes_to_stdout(folder: Path) -> None:
    path = folder / "m_generation.json"
    done = run("generate", path, "every node", "--max-new-tokens", 8, "--check", folder / "llama")
    assert done.exit_code == 0, done.output
    result = modelexport.generate(path, "every node", max_new_tokens=8)
    assert done.stdout == f"{result.text}\n"
    assert result.prompt == (5, 6)
    assert len(result.tokens) == 8
    assert "tokens per second" in done.stderr
    assert "PyTorch generates the same 8 tokens" in done.stderr


def test_another_model_generates_other_tokens(folder: Path, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "other")
    path = folder / "m_generation.json"
    done = run("generate", path, "every node", "--check", tmp_path / "other")
    assert done.exit_code == 1
    assert "differs" in done.stderr


def test_token_ids_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    path = folder / "m_generation.json"
    record = json.loads(path.read_text())
    for name in ("m_prefill.onnx", "m_decode.onnx", "m.onnx.data"):
        shutil.copy(folder / name, tmp_path)
    bare = tmp_path / "bare_generation.json"
    bare.write_text(json.dumps({**record, "tokenizer": None}))
    done = run("generate", bare, "--input-ids", "5,6", "--max-new-tokens", 3)
    tokens = modelexport.generate(path, input_ids=[5, 6], max_new_tokens=3).tokens
    assert (done.exit_code, done.stdout) == (0, f"{','.join(map(str, tokens))}\n")
    assert run("generate", bare, "every").exit_code == 2


@pytest.mark.sanity
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the model needs input_ids"),
        (("every", "--input-ids", "5"), "both the prompt"),
        (("--input-ids", "a"), "is not of the form 1,2,3"),
        (("",), "the prompt is empty"),
    ],
)
def test_a_bad_prompt(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run("generate", folder / "m_generation.json", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.sanity
@pytest.mark.parametrize("text", ["", "{}", '{"format": "modelexport-generation/2"}', "[1]"])
def test_a_bad_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m_generation.json"
    path.write_text(text)
    done = run("generate", path, "every")
    assert done.exit_code == 2
    assert "not a generation file" in done.stderr
    assert run("generate", tmp_path / "absent.json", "every").exit_code == 2


def _change(record: dict[str, Any], flaw: str) -> None:
    """Damage a generation file in one way."""
    decode = record["parts"]["decode"]
    state = next(one for one in decode["inputs"].values() if one["role"] == "state")
    match flaw:
        case "has no part 'decode'":
            del record["parts"]["decode"]
        case "is not beside it":
            decode["onnx"] = "../m_decode.onnx"
        case "has the shape [1, -1]":
            state["empty"] = [1, -1]
        case "has the shape [9999999, 9999999]":
            state["empty"] = [9999999, 9999999]
        case "which the generation file does not describe":
            decode["inputs"].pop("input_ids")
        case "takes no tokens":
            record["parts"]["prefill"]["inputs"]["input_ids"] = {
                "role": "prompt",
                "source": "input_ids",
            }
        case "has no known origin":
            state["role"] = "other"
        case "does not return 'x'":
            state.update(role="result", source="x")
        case "its cache holds -1 tokens":
            record["max_cache_length"] = -1
        case "has no scores":
            decode["logits"] = None


@pytest.mark.sanity
@pytest.mark.parametrize(
    "flaw",
    [
        "has no part 'decode'",
        "is not beside it",
        "has the shape [1, -1]",
        "has the shape [9999999, 9999999]",
        "which the generation file does not describe",
        "takes no tokens",
        "has no known origin",
        "does not return 'x'",
        "its cache holds -1 tokens",
        "has no scores",
    ],
)
def test_a_damaged_file_is_named_in_one_line(folder: Path, tmp_path: Path, flaw: str) -> None:
    for name in ("m_prefill.onnx", "m_decode.onnx", "m.onnx.data"):
        (tmp_path / name).hardlink_to(folder / name)
    record = json.loads((folder / "m_generation.json").read_text())
    _change(record, flaw)
    path = tmp_path / "m_generation.json"
    path.write_text(json.dumps({**record, "tokenizer": None}))
    done = run("generate", path, "--input-ids", "5,6")
    assert done.exit_code == 2, done.output
    assert flaw in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_batch_of_language_models(folder: Path, tmp_path: Path) -> None:
    jobs = [{"model": str(folder / "llama"), "output": "one.onnx", "generation": True}]
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": jobs}))
    done = run("batch", tmp_path / "jobs.json")
    assert done.exit_code == 0, done.output
    assert read_generation(tmp_path / "one_generation.json").parts.keys() == {"prefill", "decode"}


def test_verify_and_profile_a_part(folder: Path) -> None:
    for part in ("prefill", "decode"):
        done = run("verify", folder / "llama", folder / f"m_{part}.onnx")
        assert done.exit_code == 0, done.output
        assert "inputs from the model's tokenizer, by generate()" in done.stdout
    decode = folder / "m_decode.onnx"
    for shapes in ((), ("--cache-length", 40)):
        done = run("profile", decode, "--runs", 2, *shapes, "--output-format", "json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["kernel_ms"] > 0
    assert run("profile", folder / "m_prefill.onnx", "--cache-length", 4).exit_code == 2


def test_a_model_without_a_head(folder: Path, tmp_path: Path) -> None:
    bare = transformers.LlamaModel(transformers.LlamaConfig(**SMALL))
    bare.save_pretrained(tmp_path / "bare")
    done = run("export", tmp_path / "bare", tmp_path / "m", "--generation")
    assert done.exit_code == 2
    assert "does not generate text" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_a_model_without_a_cache(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    config = transformers.OpenAIGPTConfig(**sizes, vocab_size=len(tokenizer()))
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "gpt")
    done = run("export", tmp_path / "gpt", tmp_path / "m", "--generation")
    assert done.exit_code == 2
    assert "OpenAIGPTLMHeadModel keeps no cache" in done.stderr


def test_other_inputs_have_to_be_arrays(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input_ids=np.array([[5, 6]]))
    done = run("generate", folder / "m_generation.json", "--inputs", tmp_path / "x.npz")
    expected = run("generate", folder / "m_generation.json", "--input-ids", "5,6")
    assert (done.exit_code, done.stdout) == (0, expected.stdout)
