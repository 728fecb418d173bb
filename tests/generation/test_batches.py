"""Texts of different lengths in one batch, by a program that reads the generation file only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from language_models import ALWAYS, CONFIGS, VOCABULARY, build, exported
from modelexport.generation.parts import greedy_generation
from modelexport.verification.records import Array

TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": np.bool_}
LENGTHS = (3, 11, 6)
WINDOW = pytest.param(
    *("moshi", None),
    marks=pytest.mark.skipif("ALL_GENERATION" not in os.environ, reason="make generation"),
)
"""It relies on its cache to drop tokens outside a window."""


class Program:
    """What docs/formats.md says about the generation file, and nothing else."""

    def __init__(self, path: Path, tokens: Array, mask: Array) -> None:
        self.record = json.loads(path.read_text())
        self.parts = self.record["parts"]
        self.sessions = {
            name: onnxruntime.InferenceSession(path.with_name(part["onnx"]))
            for name, part in self.parts.items()
        }
        self.given = {"input_ids": tokens, "attention_mask": mask}
        self.rows, self.past = len(tokens), 0
        self.state: dict[str, Array] = {}
        self.encoded: dict[str, Array] = {}

    def generate(self, count: int) -> Array:
        tokens, self.mask = self.given["input_ids"], self.given["attention_mask"]
        if "encode" in self.parts:
            self.encoded = self.run("encode", tokens)
            start = self.record["tokens"]["decoder_start"]
            tokens = np.array([start] * self.rows)
            self.mask = np.ones_like(tokens)
        new: list[Array] = []
        for step in range(count):
            part = "decode" if step else "prefill"
            self.state = self.run(part, tokens)
            self.past += tokens.shape[1]
            tokens = self.state[self.parts[part]["logits"]][:, -1].argmax(-1)[:, None]
            self.mask = np.concatenate([self.mask, np.ones_like(tokens)], 1)
            new.append(tokens)
        return np.concatenate(new, 1)

    def run(self, part: str, tokens: Array) -> dict[str, Array]:
        session = self.sessions[part]
        feeds = {}
        for info in session.get_inputs():
            value = self.value(self.parts[part]["inputs"][info.name], tokens)
            feeds[info.name] = value.astype(TYPES[info.type])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    def value(self, one: dict[str, Any], tokens: Array) -> Array:
        count = tokens.shape[1]
        match one["role"]:
            case "tokens":
                return tokens
            case "mask":
                mask = self.mask.copy()
                if self.past and one.get("window"):
                    mask[:, : -one["window"]] = 0
                return mask
            case "causal_mask":
                seen = np.zeros((self.rows, 1, 1, self.record["max_cache_length"]))
                seen[:, 0, 0, : self.mask.shape[1]] = self.mask
                rows = np.arange(self.past, self.past + count)
                return seen * (np.arange(seen.shape[-1]) <= rows[:, None])
            case "positions":
                places = np.clip(self.mask.cumsum(1) - 1, 0, None) + one.get("start", 0)
                return places[:, -count:]
            case "state":
                shape = one.get("empty", [])
                return self.state.get(
                    one["source"], np.zeros([self.rows, *shape[1:]][: len(shape)])
                )
            case "prompt":
                return self.given[one["source"]]
            case "result":
                return self.encoded[one["source"]]
        raise AssertionError(one)


@pytest.mark.must
@pytest.mark.parametrize(
    ("name", "max_cache_length"),
    [*((name, None) for name in list(CONFIGS)[:ALWAYS]), ("llama", 16), WINDOW],
)
def test_padding_does_not_change_the_tokens(name: str, max_cache_length: int | None) -> None:
    path, model = exported(name, max_cache_length), build(name)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[-length:] = torch.randint(4, VOCABULARY, (length,), generator=generator)
    mask = (tokens > 0).long()
    count = 20 if max_cache_length is None else max_cache_length - max(LENGTHS) + 1
    model.generation_config.eos_token_id = None
    with greedy_generation(model) as config:
        config.max_new_tokens, config.pad_token_id = count, 0
        expected = model.generate(tokens, attention_mask=mask, generation_config=config)
    result = Program(path, tokens.numpy(), mask.numpy()).generate(count)
    assert result.tolist() == expected[:, -count:].tolist()
    assert len(np.unique(result)) > 3  # or the test would prove little
