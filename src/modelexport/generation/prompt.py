"""What a user passes to generate(): a text, token ids, or arrays by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelexport.errors import ArgumentError, SourceError, first_line, plural
from modelexport.generation.records import ENCODE, MASK, TOKENS, GenerationFile, InputRole
from modelexport.packages import import_package
from modelexport.verification.records import Array

# Nothing here imports torch: the files run without it.


def load_tokenizer(path: Path, record: GenerationFile, needed: bool) -> Any | None:
    """Load the tokenizer that a generation file names; None if there is none.

    Raises:
        SourceError: It is needed and cannot be loaded.
    """
    ids = "pass token ids with --input-ids"
    if record.tokenizer is None:
        if needed:
            raise SourceError(f"{path.name} names no tokenizer", hint=ids)
        return None
    if needed:
        import_package("transformers", otherwise=ids)
    folder = path.parent / record.tokenizer
    try:
        name = str(folder) if folder.is_dir() else record.tokenizer
        transformers = importlib.import_module("transformers")
        # Only a text is worth the network.
        return transformers.AutoTokenizer.from_pretrained(name, local_files_only=not needed)
    except Exception as error:  # folders of other versions fail in many ways
        if not needed:
            return None
        raise SourceError(
            f"cannot load the tokenizer in {record.tokenizer}: {first_line(error)}",
            hint=f'change "tokenizer" in {path.name} if its folder has moved, or {ids}',
        ) from error


def make_prompt(
    record: GenerationFile,
    tokenizer: Any | None,
    text: str | None,
    input_ids: Sequence[int] | None,
    inputs: Mapping[str, Array] | None,
) -> dict[str, Array]:
    """Return what the user passes, as arrays of one row by name.

    Raises:
        ArgumentError: There is no prompt, more than one, or one that the model cannot take.
    """
    given = {name: np.asarray(array) for name, array in (inputs or {}).items()}
    prompts = {"text": text, TOKENS: input_ids, f"{TOKENS} of inputs": given.get(TOKENS)}
    several = [name for name, one in prompts.items() if one is not None]
    if len(several) > 1:
        raise ArgumentError(
            f"{several[0]} and {several[1]} are both the prompt", hint="give one of them"
        )
    if text is not None:
        assert tokenizer is not None  # see load_tokenizer
        input_ids = tokenizer(text)[TOKENS]
    if input_ids is not None:
        given[TOKENS] = np.asarray(input_ids)[None]
    if TOKENS in given:
        given[TOKENS] = _check_tokens(given[TOKENS])
        # Always given: PyTorch's `generate` would mask what looks like padding.
        given.setdefault(MASK, np.ones_like(given[TOKENS]))
    _check_names(record, given)
    _check_rows(record, given)
    return given


def _check_tokens(tokens: Array) -> Array:
    """Return token ids as int64."""
    if not tokens.size:
        raise ArgumentError("the prompt is empty", hint="pass a text or token ids")
    if tokens.dtype.kind not in "iu" or tokens.min() < 0:
        raise ArgumentError("token ids must be whole numbers, 0 or more", hint="such as 5,6,7")
    if tokens.ndim != 2:
        shape = list(tokens.shape)
        raise ArgumentError(f"{TOKENS} must be one row of token ids, got the shape {shape}")
    return tokens.astype(np.int64)


def _check_names(record: GenerationFile, given: Mapping[str, Array]) -> None:
    """Check that the user passes what the parts take, and nothing else."""
    sources = {
        one.source
        for part in record.parts.values()
        for one in part.inputs.values()
        if one.role is InputRole.PROMPT and one.source is not None
    }
    needed = sources or {TOKENS}
    missing = sorted(name for name in needed - {MASK} if name not in given)
    if missing:
        ways = "a text or --input-ids" if TOKENS in missing else "an .npz file with --inputs"
        raise ArgumentError(f"the model needs {', '.join(missing)}", hint=f"pass {ways}")
    unknown = sorted(given.keys() - needed - {TOKENS, MASK})
    if unknown:
        raise ArgumentError(
            f"the model takes no input {unknown[0]!r}", hint=f"it takes {', '.join(sorted(needed))}"
        )


def _check_rows(record: GenerationFile, given: Mapping[str, Array]) -> None:
    """Check that there is one text, without padding where a mask for it would change each step."""
    for name, array in given.items():
        if array.ndim and len(array) != 1:
            rows = plural(len(array), "row")
            raise ArgumentError(f"generate takes one text at a time, and {name} has {rows}")
    if ENCODE in record.parts or TOKENS not in given:
        return
    mask = given[MASK]
    if mask.shape != given[TOKENS].shape or not mask.all():
        raise ArgumentError(
            f"{MASK} must be a one for each token: generate takes a text without padding",
            hint=f"leave {MASK} and padding out",
        )
