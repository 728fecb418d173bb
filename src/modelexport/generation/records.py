"""The generation file: the parts of a model, and how the values of each step reach the next."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.onnx_file.atomic_write import is_inside
from modelexport.tagged.records import UNREADABLE, TensorInfo

FORMAT = "modelexport-generation/1"
OUTPUT_PREFIX = "output."
"""How the name of an output begins where an input has the same one, as caches do."""
ENCODE, PREFILL, DECODE = "encode", "prefill", "decode"
"""The parts: what runs once on the input, the first step of generation, and each further one."""
RUN_PARTS = (ENCODE, PREFILL, DECODE)
"""Those that `generate` runs; a multimodal model has others."""
TOKENS, DECODER_TOKENS, MASK = "input_ids", "decoder_input_ids", "attention_mask"
CACHE, LOGITS = "past_key_values", "logits"
"""The interface of transformers: what its `generate` takes, and its models take and return."""
_LARGEST_STATE = 1 << 30
"""The most elements of a state before the first step."""
_MOST_AXES = 64
"""The most axes that numpy's arrays have."""
_LARGEST_NUMBER = 1 << 31
"""The greatest position or constant."""


class InputRole(enum.StrEnum):
    """Where the value of an input of a part comes from."""

    TOKENS = "tokens"
    """The token ids of this step."""
    MASK = "mask"
    """A one for each token so far, those of this step included; a zero for padding, and from the
    second step on for each token but the last `window` ones, if there is a `window`."""
    CAUSAL_MASK = "causal_mask"
    """For each token of this step, whether it may see each place of a cache of fixed size: those of
    itself and of the tokens before it, without padding."""
    POSITIONS = "positions"
    """The position of each token of this step, counted from `start`; padding does not count."""
    STATE = "state"
    """The output `source` of the step before, which the first step may name without the prefix
    `output.`; zeros of the shape `empty` before the first step."""
    PROMPT = "prompt"
    """What the user passes as `source`, the same at each step."""
    RESULT = "result"
    """The output `source` of the part `encode`."""
    CONSTANT = "constant"
    """The number `start`, at the shape of the tokens."""
    OTHER = "other"
    """None of these: `generate` cannot run the part."""


class GenerationInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One input of a part, and where its value comes from."""

    role: InputRole
    source: str | None = None
    """The name of an output, or of what the user passes."""
    start: int = 0
    """The first position; or the number of a constant."""
    empty: tuple[int, ...] = ()
    """The shape of a state for one text without tokens; 0 along the axis that grows."""
    window: int = 0
    """How many tokens a mask shows from the second step on; 0 for all. The model's own cache keeps
    no more in PyTorch, but the files keep all."""


class GenerationPart(msgspec.Struct, frozen=True):
    """One ONNX file of a model."""

    onnx: str
    """The name of the file, beside this one."""
    inputs: dict[str, GenerationInput]
    outputs: tuple[str, ...]
    logits: str | None
    """The output with the scores of the next token; null for a part that has none."""
    class_: str = msgspec.field(name="class")
    """The qualified class of the module that the part computes."""

    @property
    def unknown_inputs(self) -> list[str]:
        """The inputs that `generate` has no value for."""
        return [name for name, one in self.inputs.items() if one.role is InputRole.OTHER]


class TokenIds(msgspec.Struct, frozen=True):
    """The special tokens of the model; null for one that it does not have."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Each ends the text."""
    pad: int | None = None
    decoder_start: tuple[int, ...] = ()
    """What generation begins with, where the prompt goes to the part `encode`."""


class GenerationFile(msgspec.Struct, frozen=True):
    """`<stem>_generation.json`: what it takes to generate text with the parts of a model."""

    format: str
    """`modelexport-generation/1`. A reader should refuse another."""
    source: str
    """The name of the model's source."""
    parts: dict[str, GenerationPart]
    """In the order in which they run: `encode` if there is one, `prefill`, then `decode` for each
    further step. A multimodal model has other parts, and `decode`."""
    cache: tuple[TensorInfo, ...]
    """The inputs of `decode` that are outputs of the step before."""
    max_cache_length: int | None
    """How many tokens the cache holds; null for a cache that grows."""
    tokens: TokenIds
    tokenizer: str | None
    """The folder of the tokenizer, relative to this file, or its name on the hub."""
    data: tuple[str, ...]
    """The files that hold the weights of all parts."""


def generation_path(stem: Path) -> Path:
    """Return the path of the generation file of an output without its suffix."""
    return stem.with_name(f"{stem.name}_generation.json")


def part_path(stem: Path, part: str) -> Path:
    """Return the path of the ONNX file of a part."""
    return stem.with_name(f"{stem.name}_{part}.onnx")


def data_path(stem: Path) -> Path:
    """Return the path of the data file of all parts; that of `<stem>.onnx` is another."""
    return stem.with_name(f"{stem.name}_generation.onnx.data")


def encode_generation(record: GenerationFile) -> bytes:
    """Encode a generation file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_generation(path: Path) -> GenerationFile:
    """Read a generation file.

    Raises:
        FileError: It cannot be read.
        FormatError: It is not a generation file, or one of another version.
    """
    hint = "modelexport export MODEL OUT --generation writes OUT_generation.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=GenerationFile)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except UNREADABLE as error:
        reason = str(error)
        if path.suffix == ".onnx":
            reason, hint = "it is a model", "pass the JSON file that was written with its parts"
        raise FormatError(f"{path} is not a generation file: {reason}", hint=hint) from error
    if record.format != FORMAT:
        raise FormatError(f"{path} has the format {record.format!r}, not {FORMAT!r}", hint=hint)
    flaw = _find_flaw(record)
    if flaw is not None:
        raise FormatError(f"{path} is not a generation file: {flaw}", hint=hint)
    return record


def _find_flaw(record: GenerationFile) -> str | None:
    """Describe what no export writes; None if there is nothing."""
    if DECODE not in record.parts:
        return f"it has no part {DECODE!r}"
    if record.max_cache_length is not None and record.max_cache_length < 1:
        return f"its cache holds {record.max_cache_length} tokens"
    for name, part in record.parts.items():
        if not is_inside(part.onnx) or Path(part.onnx).name != part.onnx:
            return f"the file of the part {name!r} is not beside it"
        for given, one in part.inputs.items():
            flaw = _find_input_flaw(one, record.parts[DECODE].outputs)
            if flaw is not None:
                return f"the input {given!r} of the part {name!r} {flaw}"
    return None


def _find_input_flaw(one: GenerationInput, outputs: Sequence[str]) -> str | None:
    """Describe what no export writes of an input; None if there is nothing."""
    # A size may be 0 beside one that no array can have.
    size = math.prod(max(size, 1) for size in one.empty)
    if len(one.empty) > _MOST_AXES:
        return f"has {len(one.empty)} axes"
    if min(one.empty, default=0) < 0 or size > _LARGEST_STATE:
        return f"has the shape {list(one.empty)}"
    if abs(one.start) > _LARGEST_NUMBER:
        return f"has the number {one.start}"
    if one.window < 0:
        return f"has a window of {one.window} tokens"
    if one.role is InputRole.STATE and one.source not in outputs:
        return f"is the output {one.source!r}, which the part {DECODE!r} does not have"
    if one.role in (InputRole.PROMPT, InputRole.RESULT) and one.source is None:
        return "has no source"
    return None
