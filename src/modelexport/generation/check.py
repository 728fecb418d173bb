"""Compare generated tokens with those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from modelexport.errors import ArgumentError, SourceError
from modelexport.generation.parts import check_can_generate, greedy_generation
from modelexport.generation.records import DECODE, TOKENS, GenerationFile
from modelexport.generation.run import Generation
from modelexport.options import SourceOptions
from modelexport.source.load import open_source
from modelexport.tagged.model import load
from modelexport.verification.records import Array


class TokenCheck(msgspec.Struct, frozen=True):
    """The tokens that PyTorch generates from the same prompt, and where they first differ."""

    expected: tuple[int, ...]
    first_difference: int | None
    """The number of the first token that differs, from 0; None if all are equal."""


def check_tokens(
    model: str,
    path: Path,
    record: GenerationFile,
    generated: Generation,
    prompt: Mapping[str, Array],
    max_new_tokens: int,
    trust_remote_code: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> TokenCheck:
    """Generate greedily with PyTorch, and compare the tokens with generated ones.

    Args:
        model: The model, as `export` takes it; it is loaded as the export recorded.
        path: The generation file.
        record: What it says.
        generated: What ONNX Runtime generated.
        prompt: The prompt as arrays by name.
        max_new_tokens: The greatest number of tokens to generate.
        trust_remote_code: Run the code that comes with the model.
        on_step: Called with each step as it begins.

    Returns:
        The comparison.

    Raises:
        SourceError: The model cannot be loaded, or does not generate.
    """
    decode = load(path.parent / record.parts[DECODE].onnx).records
    recorded = None if decode is None else decode.export.source_options
    seed = (None if decode is None else decode.export.seed) or 0
    source = open_source(model, recorded or SourceOptions(), trust_remote_code, seed, on_step)
    try:
        check_can_generate(source.model)  # type: ignore[arg-type]  # raises for other types
    except ArgumentError as error:
        raise SourceError(error.message, hint=error.hint) from error
    expected = generate_with_pytorch(source.model, prompt, record, max_new_tokens)
    end = generated.tokens[-1:]
    if expected + end == generated.tokens and end[0] in record.tokens.eos:
        expected += end  # a `generate` of a model's own may leave out the token that ends the text
    pairs = enumerate(zip(generated.tokens, expected, strict=False))
    different = next((number for number, (one, other) in pairs if one != other), None)
    if different is None and len(expected) != len(generated.tokens):
        different = min(len(expected), len(generated.tokens))
    return TokenCheck(expected, different)


def generate_with_pytorch(
    model: object, prompt: Mapping[str, Array], record: GenerationFile, max_new_tokens: int
) -> tuple[int, ...]:
    """Return the tokens that PyTorch's greedy `generate` adds to a prompt."""
    generator: object = model
    inputs = {name: torch.from_numpy(array.copy()) for name, array in prompt.items()}
    with greedy_generation(generator) as config:
        config.max_new_tokens = max_new_tokens
        sequences = generator.generate(**inputs, generation_config=config)  # type: ignore[attr-defined]
    tokens = tuple(int(token) for token in sequences[0])
    start = record.tokens.decoder_start or tuple(int(token) for token in prompt[TOKENS][0])
    # A `generate` of a model's own may return the new tokens alone.
    return tokens[len(start) :] if tokens[: len(start)] == start else tokens
