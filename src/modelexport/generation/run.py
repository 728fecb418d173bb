"""generate(): greedy generation with the parts of a model in ONNX Runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelexport.errors import ArgumentError, FormatError
from modelexport.generation.prompt import load_tokenizer, make_prompt
from modelexport.generation.records import (
    DECODE,
    ENCODE,
    MASK,
    OUTPUT_PREFIX,
    PREFILL,
    RUN_PARTS,
    TOKENS,
    GenerationFile,
    GenerationInput,
    GenerationPart,
    InputRole,
    read_generation,
)
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.option_values import spell_option
from modelexport.verification.records import Array
from modelexport.verification.runtime import OPTIMIZED, Session

# Nothing here imports torch: the files run without it.

_WINDOW, _OVERLAP = 128, 16
"""The most tokens that are decoded for one more, and how many of them the next window keeps."""


class Generation(msgspec.Struct, frozen=True):
    """What a model generated."""

    prompt: tuple[int, ...]
    """The token ids that the text begins with."""
    tokens: tuple[int, ...]
    """The token ids that follow."""
    text: str | None
    """What the tokens say; None without a tokenizer."""
    tokens_per_second: float
    """Of all steps after the first one."""
    first_seconds: float
    """The time to the first token."""


def generate(
    path: StrPath,
    text: str | None = None,
    *,
    input_ids: Sequence[int] | None = None,
    inputs: Mapping[str, Array] | None = None,
    max_new_tokens: int = 20,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Generate text greedily with ONNX Runtime: each token is the one with the highest score.

    Args:
        path: The generation file, `<stem>_generation.json`.
        text: The prompt, for the model's tokenizer.
        input_ids: The prompt as token ids, instead of a text.
        inputs: Arrays by name for a model that takes other inputs than text, such as features of a
            sound; they have one row.
        max_new_tokens: The greatest number of tokens to generate.
        on_text: Called with each piece of text as it is generated; without a tokenizer, with ids.

    Returns:
        The tokens and the text, and how fast they came.

    Raises:
        ArgumentError: There is no prompt, or it does not fit the model.
        FileError: A file cannot be read.
        FormatError: A file is damaged, or ONNX Runtime rejects it.
        SourceError: ONNX Runtime or the tokenizer is missing.
    """
    path = as_path(path)
    if max_new_tokens < 1:
        raise ArgumentError(
            f"{spell_option('max_new_tokens')} must be 1 or more, got {max_new_tokens}"
        )
    record = read_generation(path)
    tokenizer = load_tokenizer(path, record, needed=text is not None)
    prompt = make_prompt(record, tokenizer, text, input_ids, inputs)
    runner = Runner(path.parent, record)
    writer = _TextWriter(tokenizer, on_text)
    tokens: list[int] = []
    begin = first = time.perf_counter()
    for token in runner.run(prompt, max_new_tokens):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        writer.add(token)
    steps, seconds = len(tokens) - 1, time.perf_counter() - first
    return Generation(
        prompt=tuple(int(token) for token in prompt.get(TOKENS, np.zeros((1, 0)))[0]),
        tokens=tuple(tokens),
        text=writer.finish(),
        tokens_per_second=steps / seconds if steps > 0 and seconds > 0 else 0.0,
        first_seconds=first - begin,
    )


class Runner:
    """The sessions of the parts of a model, and the values that go from step to step.

    Args:
        folder: The folder of the files.
        record: What the generation file says.
    """

    def __init__(self, folder: Path, record: GenerationFile) -> None:
        self._record = record
        names = [name for name in RUN_PARTS if name in record.parts]
        for name in names:
            _check_runnable(name, record.parts[name])
        self._sessions = {
            name: Session(folder / record.parts[name].onnx, settings=OPTIMIZED) for name in names
        }
        for name, session in self._sessions.items():
            _check_described(session, record.parts[name])
        self._shapes = {
            name: {info.name: list(map(_size, info.shape)) for info in session.inputs}
            for name, session in self._sessions.items()
        }
        """The shape of each input of a part, None for a symbolic axis."""
        self._given: Mapping[str, Array] = {}
        self._encoded: Mapping[str, Array] = {}
        self._state: dict[str, Array] = {}
        self._past = 0

    def run(self, prompt: Mapping[str, Array], max_new_tokens: int) -> Iterator[int]:
        """Yield tokens until one of them ends the text.

        Raises:
            ArgumentError: The prompt and the tokens do not fit into the cache.
            FormatError: ONNX Runtime cannot run a part.
        """
        self._given, self._state, self._past = prompt, {}, 0
        tokens = list(self._record.tokens.decoder_start)
        if ENCODE in self._sessions:
            self._encoded = self._run(ENCODE, [])
        elif TOKENS not in prompt:
            raise ArgumentError(f"the model needs {TOKENS}", hint="pass a text or --input-ids")
        else:
            tokens = [int(token) for token in prompt[TOKENS][0]]
        if not tokens:
            raise FormatError("the generation file names no token that starts the text")
        longest = self._record.max_cache_length
        if longest is not None and len(tokens) + max_new_tokens - 1 > longest:
            raise ArgumentError(
                f"{len(tokens)} tokens and {max_new_tokens} new ones do not fit into a cache of "
                f"{longest}",
                hint="pass a smaller --max-new-tokens",
            )
        scores = np.zeros(0)
        while tokens:
            part = DECODE if self._past else self._first_part(len(tokens))
            count = self._most_tokens(part) or len(tokens)
            scores = self._step(part, tokens[:count])
            tokens = tokens[count:]
        for number in range(max_new_tokens):
            token = int(scores.argmax())
            yield token
            if token in self._record.tokens.eos or number + 1 == max_new_tokens:
                return
            scores = self._step(DECODE, [token])

    def _first_part(self, tokens: int) -> str:
        """Return the part for the first step: `prefill` may take a fixed number of tokens."""
        fits = PREFILL in self._sessions and (self._most_tokens(PREFILL) or 0) <= tokens
        return PREFILL if fits else DECODE

    def _most_tokens(self, part: str) -> int | None:
        """Return the number of tokens that a part takes; None for any number."""
        inputs = self._record.parts[part].inputs
        for name, shape in self._shapes[part].items():
            if inputs[name].role is InputRole.TOKENS and shape:
                return shape[-1]
        raise FormatError(f"the part {part} takes no tokens", hint="export the model again")

    def _step(self, part: str, tokens: Sequence[int]) -> Array:
        """Run one step, keep its state, and return the scores of the next token."""
        results = self._run(part, tokens)
        self._past += len(tokens)
        self._state = {_leaf(output): value for output, value in results.items()}
        name = self._record.parts[part].logits
        if name is None or name not in results:
            raise FormatError(f"the part {part} has no scores of the next token")
        scores: Array = results[name][0, -1]
        return scores

    def _run(self, part: str, tokens: Sequence[int]) -> dict[str, Array]:
        inputs = self._record.parts[part].inputs
        feeds = {
            name: self._value(inputs[name], shape, tokens)
            for name, shape in self._shapes[part].items()
        }
        return self._sessions[part].run(feeds)

    def _value(
        self, one: GenerationInput, shape: Sequence[int | None], tokens: Sequence[int]
    ) -> Array:
        """Return the value of an input; symbolic axes have one row."""
        count = len(tokens)
        match one.role:
            case InputRole.TOKENS:
                return np.array([tokens], np.int64)
            case InputRole.MASK:
                return step_mask(one.window, self._past, count)
            case InputRole.CAUSAL_MASK:
                columns = np.arange(self._record.max_cache_length or self._past + count)
                rows = np.arange(self._past, self._past + count)
                return (columns <= rows[:, None])[None, None]
            case InputRole.POSITIONS:
                first = one.start + self._past
                sizes = [size or 1 for size in shape[:-1]]
                return np.broadcast_to(np.arange(first, first + count), (*sizes, count)).copy()
            case InputRole.CONSTANT:
                return np.full((1, count), one.start, np.int64)
            case InputRole.RESULT:
                if one.source is None or one.source not in self._encoded:
                    raise FormatError(f"the part {ENCODE} does not return {one.source!r}")
                return self._encoded[one.source]
            case InputRole.PROMPT:
                return self._prompt(str(one.source))
        state = self._state.get(_leaf(one.source or ""))
        return np.zeros(one.empty) if state is None else state

    def _prompt(self, name: str) -> Array:
        if name not in self._given and name == MASK:
            first = next(iter(self._given.values()))
            return np.ones(first.shape[:2], np.int64)
        return self._given[name]


def step_mask(window: int, past: int, count: int) -> Array:
    """Return the mask of a step: all tokens in the first one, a window of them in later ones."""
    mask = np.ones((1, past + count), np.int64)
    if window and past:
        mask[:, : max(past + 1 - window, 0)] = 0
    return mask


def _leaf(output: str) -> str:
    """Return the name of a value of the cache, which every step has in its outputs."""
    return output.removeprefix(OUTPUT_PREFIX)


def _size(size: int | str | None) -> int | None:
    """Return the size of an axis; torch writes one that it fixed as a symbol of digits."""
    return int(str(size)) if str(size).isdecimal() else None


def _check_runnable(name: str, part: GenerationPart) -> None:
    """Raise an error if `generate` does not know what to pass to a part."""
    if part.unknown_inputs:
        raise ArgumentError(
            f"the input {part.unknown_inputs[0]!r} of {part.onnx} has no known origin",
            hint=f"run the part {name} with values of your own",
        )


def _check_described(session: Session, part: GenerationPart) -> None:
    """Raise an error if the file of a part has other inputs than the generation file says."""
    unknown = [info.name for info in session.inputs if info.name not in part.inputs]
    if unknown:
        raise FormatError(
            f"{part.onnx} takes {unknown[0]!r}, which the generation file does not describe",
            hint="export the model again",
        )


class _TextWriter:
    """Decode tokens as they come, and pass on the text that is complete.

    The text of a token may depend on those before it, so that some are decoded again with each.
    """

    def __init__(self, tokenizer: Any | None, on_text: Callable[[str], None] | None) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text or (lambda _: None)
        self._tokens: list[int] = []
        self._first = 0
        """The first token that is decoded again."""
        self._written = ""
        """The text from that token on that was passed on."""

    def add(self, token: int) -> None:
        """Decode one more token."""
        self._tokens.append(token)
        if self._tokenizer is None:
            self._on_text(f"{',' if len(self._tokens) > 1 else ''}{token}")
            return
        text = self._decode(self._first)
        # A character may take several tokens; until the last one it ends in this mark.
        if not text.endswith("\ufffd") and text.startswith(self._written):
            self._on_text(text[len(self._written) :])
            self._written = text
            if len(self._tokens) - self._first > _WINDOW:
                self._first = len(self._tokens) - _OVERLAP
                self._written = self._decode(self._first)

    def finish(self) -> str | None:
        """Pass on what is left, and return the whole text."""
        if self._tokenizer is None:
            return None
        text = self._decode(self._first)
        if text.startswith(self._written):
            self._on_text(text[len(self._written) :])
        return self._decode(0)

    def _decode(self, first: int) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(self._tokens[first:], skip_special_tokens=True))
