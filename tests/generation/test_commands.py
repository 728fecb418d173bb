"""The commands for language models: export in parts, generate, verify and profile a part."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import msgspec
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
from modelexport.generation import check
from modelexport.generation.records import read_generation
from modelexport.generation.run import _TextWriter


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
    assert "weights of all parts in m_generation.onnx.data" in stdout
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


def test_pytorch_may_leave_out_the_last_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Whisper does with the one that ends the text."""
    path = folder / "m_generation.json"
    record = read_generation(path)
    tokens = modelexport.generate(path, input_ids=[5, 6], max_new_tokens=4).tokens
    for last, equal in ((3, True), (5, False)):
        generated = msgspec.structs.replace(
            modelexport.generate(path, input_ids=[5, 6]), tokens=(*tokens, last)
        )
        monkeypatch.setattr(check, "generate_with_pytorch", lambda *_: tokens)
        answer = check.check_tokens(str(folder / "llama"), path, record, generated, {}, 5)
        assert (answer.first_difference is None) is equal


def test_another_model_generates_other_tokens(folder: Path, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "other")
    path = folder / "m_generation.json"
    done = run("generate", path, "every node", "--check", tmp_path / "other")
    assert done.exit_code == 1
    assert "differs" in done.stderr


def test_token_ids_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    path = folder / "m_generation.json"
    record = json.loads(path.read_text())
    for name in ("m_prefill.onnx", "m_decode.onnx", "m_generation.onnx.data"):
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
        case "has 65 axes":
            state["empty"] = [1] * 65
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
        case "is the output 'x', which":
            state["source"] = "x"
        case "has no source":
            state.update(role="prompt", source=None)
        case "has the number 10000000000000000000000":
            decode["inputs"]["position_ids"]["start"] = 10**22
        case "the part 'decode' is not beside it":
            decode["onnx"] = ".."
        case "its cache holds -1 tokens":
            record["max_cache_length"] = -1
        case "has no scores":
            decode["logits"] = None


@pytest.mark.regression
@pytest.mark.parametrize("name", ["absent/tokenizer", "a" * 300])
def test_a_tokenizer_that_is_not_needed_is_not_looked_for(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads((folder / "m_generation.json").read_text())
    path = folder / "elsewhere_generation.json"
    path.write_text(json.dumps({**record, "tokenizer": name}))
    asked: list[bool] = []

    def from_pretrained(_: str, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError("not there")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    modelexport.generate(path, input_ids=[1, 2], max_new_tokens=1)
    with pytest.raises(modelexport.SourceError, match="cannot load the tokenizer"):
        modelexport.generate(path, "every", max_new_tokens=1)
    assert asked == ([True, False] if len(name) < 256 else [])


@pytest.mark.sanity
@pytest.mark.parametrize(
    "flaw",
    [
        "has no part 'decode'",
        "is not beside it",
        "has the shape [1, -1]",
        "has the shape [9999999, 9999999]",
        "has 65 axes",
        "which the generation file does not describe",
        "takes no tokens",
        "has no known origin",
        "does not return 'x'",
        "is the output 'x', which",
        "has no source",
        "has the number 10000000000000000000000",
        "the part 'decode' is not beside it",
        "its cache holds -1 tokens",
        "has no scores",
    ],
)
def test_a_damaged_file_is_named_in_one_line(folder: Path, tmp_path: Path, flaw: str) -> None:
    for name in ("m_prefill.onnx", "m_decode.onnx", "m_generation.onnx.data"):
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
    """Into the folder of the model, where outputs do not count as files of the model."""
    shutil.copytree(folder / "llama", tmp_path / "llama")
    jobs = [{"model": "llama", "output": "llama/one.onnx", "generation": True}]
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": jobs}))
    done = run("batch", tmp_path / "jobs.json")
    assert done.exit_code == 0, done.output
    record = read_generation(tmp_path / "llama" / "one_generation.json")
    assert record.parts.keys() == {"prefill", "decode"}
    assert "skipped" in run("batch", tmp_path / "jobs.json", "--resume").stderr


def test_jobs_that_would_write_the_same_part(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "llama")
    jobs = [
        {"model": model, "output": "one.onnx", "generation": True},
        {"model": model, "output": "one_decode.onnx"},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": jobs}))
    done = run("batch", tmp_path / "jobs.json")
    assert done.exit_code == 2
    assert "one_decode.onnx" in done.stderr


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


def test_other_files_beside_a_part(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("m_*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "a_generation.json").write_bytes(b"\xff")
    (tmp_path / "b_generation.json").mkdir()
    command = ("profile", tmp_path / "m_decode.onnx", "--runs", 1, "--cache-length", 4)
    done = run(*command)
    assert done.exit_code == 0, done.output
    refused = run(*command, "--output-file", tmp_path / "m_generation.json")
    assert (refused.exit_code, "would overwrite" in refused.stderr) == (2, True), refused.output
    assert read_generation(tmp_path / "m_generation.json").parts


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


@pytest.mark.sanity
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": [[5, 6], [7, 8]]}, "one text at a time, and input_ids has 2 rows"),
        ({"input_ids": [5, 6]}, "one row of token ids, got the shape [2]"),
        ({"input_ids": [[5.5, 6]]}, "whole numbers"),
        ({"input_ids": [[5, -6]]}, "0 or more"),
        ({"input_ids": [["a"]]}, "whole numbers"),
        ({"input_ids": np.zeros((1, 0), int)}, "the prompt is empty"),
        ({"input_ids": [[0, 5]], "attention_mask": [[0, 1]]}, "a text without padding"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "a text without padding"),
        ({"input_ids": [[5, 6]], "other": [[1]]}, "takes no input 'other'"),
    ],
)
def test_arrays_that_are_no_prompt(
    folder: Path, tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    done = run("generate", folder / "m_generation.json", "--inputs", tmp_path / "x.npz")
    assert done.exit_code == 2
    assert message in done.stderr
    both = run("generate", folder / "m_generation.json", "a", "--inputs", tmp_path / "x.npz")
    assert "are both the prompt" in both.stderr


def test_a_prompt_may_hold_any_token(folder: Path, tmp_path: Path) -> None:
    """Also the one for padding, which PyTorch would mask without a mask, and the last one."""
    np.savez(tmp_path / "x.npz", input_ids=np.array([[0, 5, 3, 0, 6]]))
    path, inputs = folder / "m_generation.json", ("--inputs", tmp_path / "x.npz")
    done = run("generate", path, *inputs, "--check", folder / "llama", "--max-new-tokens", 1)
    assert done.exit_code == 0, done.output
    assert "1 token in " in done.stderr
    huge = run("generate", path, "--input-ids", 10**30)
    assert (huge.exit_code, huge.stderr.count("\n")) == (2, 1)


def test_a_long_text_is_decoded_in_windows(folder: Path) -> None:
    words, sizes, pieces = tokenizer(), [], []

    class Counted:
        def decode(self, tokens: list[int], **options: Any) -> str:
            sizes.append(len(tokens))
            return str(words.decode(tokens, **options))

    writer = _TextWriter(Counted(), pieces.append)
    for number in range(1000):
        writer.add(4 + number % 13)
    assert max(sizes) < 200
    assert "".join(pieces) == writer.finish()


def test_an_export_in_one_file_beside_the_parts(folder: Path, tmp_path: Path) -> None:
    """The same output with and without `--generation`: no file of one is a file of the other."""
    for path in folder.glob("m_*"):
        shutil.copy(path, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run("export", folder / "llama", tmp_path / "m.onnx")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "m.onnx.data").exists()
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.iterdir()}.items()


def test_pages_and_reports_of_the_parts(folder: Path, tmp_path: Path) -> None:
    flags = ("--with-view", "--with-report", "--no-external-data")
    done = run("export", folder / "llama", tmp_path / "a b.v1", "--generation", *flags)
    assert done.exit_code == 0, done.output
    for part in ("prefill", "decode"):
        for line in (f"page a b.v1_{part}.html", f"report a b.v1_{part}_report.md"):
            assert line in done.stdout
            assert (tmp_path / line.partition(" ")[2]).exists()
    assert not list(tmp_path.glob("*.data"))
    # What it says comes next can be pasted.
    command = done.stderr.splitlines()[-1].removeprefix("next: modelexport ")
    assert run(*shlex.split(command)).exit_code == 0


def test_other_inputs_have_to_be_arrays(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input_ids=np.array([[5, 6]]))
    done = run("generate", folder / "m_generation.json", "--inputs", tmp_path / "x.npz")
    expected = run("generate", folder / "m_generation.json", "--input-ids", "5,6")
    assert (done.exit_code, done.stdout) == (0, expected.stdout)
