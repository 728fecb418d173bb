"""Input specs: descriptions of inputs, read from a file or guessed from the model.

Guesses go by argument names of forward and fields of the configuration, which are the conventions
of transformers. Only what a name says about the values is used, never which model it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from modelexport.capture.module_tree import named_args
from modelexport.errors import FileError, FormatError, SourceError, first_line
from modelexport.tagged.records import UNREADABLE
from modelexport.verification.feeds import read_arrays

_FORM = (
    'write it as {"NAME": {"shape": [1, 8], "dtype": "int64", "range": [0, 100]}}, '
    "or save an .npz of arrays"
)
_MAX_MESSAGE = 300

_LENGTH = 8
_SAMPLES = 4000
_FRAMES = 2
_GRID = 4

_MODALITIES = ("input_ids", "pixel_values", "input_values", "input_features")
_IMAGE_SIZES = ("image_size", "img_size", "input_size", "crop_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans", "num_input_channels")
_BINS = (
    "num_mel_bins",
    "n_mels",
    "feature_size",
    "input_feat_per_channel",
    "feature_dim",
    "input_dim",
)
_STEPS = ("max_source_positions", "max_length", "context_length")
_VOCABULARY = ("vocab_size", "text_vocab_size", "src_vocab_size")
_WIDTHS = ("hidden_size", "d_model", "dim")


class InputSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input; `range` is its lowest and its highest value, which integers do not reach."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    range: tuple[float, float] | None = None


def read_specs(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    """Read a specs file: JSON with specs, or an `.npz` with arrays."""
    try:
        if path.suffix == ".npz":
            return _read_arrays(path)
        specs = msgspec.json.decode(path.read_bytes(), type=dict[str, InputSpec])
    except msgspec.ValidationError as error:
        raise SourceError(f"{path} does not describe inputs: {error}", hint=_FORM) from error
    except UNREADABLE as error:
        raise SourceError(f"{path} is not JSON: {error}", hint=_FORM) from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}", hint=_FORM) from error
    for name, spec in specs.items():
        _check(f"{path}: {name!r}", spec)
    return dict(specs)


def _read_arrays(path: Path) -> dict[str, InputSpec | torch.Tensor]:
    """Read the arrays of an .npz file as tensors."""
    try:
        arrays = read_arrays(path)
        return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays}
    except (FileError, FormatError) as error:
        raise SourceError(error.message, hint=error.hint) from error
    except (TypeError, ValueError) as error:  # torch has fewer types and byte orders than numpy
        raise SourceError(
            f"{path} is not an .npz file of numbers: {first_line(error)}",
            hint="save it with numpy.savez",
        ) from error


def _check(label: str, spec: InputSpec) -> None:
    """Raise for a spec that no tensor can be made from."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not _holds_numbers(dtype):
        raise SourceError(
            f"{label} has the unknown dtype {spec.dtype!r}",
            hint="for example float32, int64 or bool",
        )
    if any(size < 0 for size in spec.shape):
        raise SourceError(
            f"{label} has a negative size in its shape {list(spec.shape)}", hint=_FORM
        )
    if spec.range is None:
        return
    low, high = spec.range
    if not low < high:
        raise SourceError(
            f"{label} has the empty range {list(spec.range)}", hint="give the lowest value first"
        )
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return
    limits = torch.iinfo(dtype)
    if int(low) >= int(high) or low < limits.min or high > limits.max + 1:
        raise SourceError(
            f"{label} has the range {list(spec.range)}, which {spec.dtype} cannot represent",
            hint="give the lowest value, and one more than the highest",
        )


def _holds_numbers(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be made from ordinary numbers."""
    try:
        return bool(torch.zeros(1).to(dtype).numel())
    except RuntimeError:
        return False


def make_tensor(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """Make a random tensor.

    Without a range, floats are drawn from a normal distribution, integers are 0 or 1, and bools are
    True.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        if dtype == torch.bool:
            return torch.ones(spec.shape, dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            low, high = spec.range or (0, 2)
            return torch.randint(int(low), int(high), spec.shape, generator=generator).to(dtype)
        if spec.range is None:
            return torch.randn(spec.shape, generator=generator).to(dtype)
        low, high = spec.range
        return (torch.rand(spec.shape, generator=generator) * (high - low) + low).to(dtype)
    except (RuntimeError, MemoryError, TypeError, ValueError) as error:
        # torch raises TypeError and ValueError for numbers beyond 64 bits.
        raise input_error(spec.shape, spec.dtype, error) from error


def input_error(shape: Sequence[int], dtype: str, error: BaseException) -> SourceError:
    """Build the error for an input that torch cannot make."""
    message = f"cannot make an input of shape {shape_text(shape)} and dtype {dtype}"
    return SourceError(
        f"{message}: {first_line(error)}"[:_MAX_MESSAGE],
        hint="choose a smaller shape, another range or another dtype",
    )


def format_specs(specs: Mapping[str, InputSpec]) -> str:
    """Format specs as the text of a specs file, one input a line."""
    fields = {
        name: msgspec.to_builtins(spec) | {"dtype": spec.dtype} for name, spec in specs.items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(spec)}" for name, spec in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape as the command line takes it."""
    return ",".join(map(str, shape))


def guess_inputs(model: nn.Module) -> Iterator[dict[str, InputSpec]]:
    """Guess sets of inputs: first all that can be described, then fewer, last only the required."""
    arguments = named_args(model)
    main = getattr(model, "main_input_name", None)
    mains = [main] if isinstance(main, str) else list(main or ())
    config = getattr(model, "config", None)
    choices = {name: specs for name in arguments if (specs := _choices(name, config))}
    required = {name for name in choices if arguments[name] or name in mains}
    # Most models that take these run only if they get them beside the main input.
    companions = {"decoder_input_ids"}
    if "input_ids" in arguments:
        companions.add("attention_mask")
    narrow = required | (companions & choices.keys())
    seen: list[dict[str, InputSpec]] = []
    for chosen in (narrow | (choices.keys() & set(_MODALITIES)), narrow, required):
        names = [name for name in choices if name in chosen]
        for turn in range(max((len(choices[name]) for name in names), default=0)):
            guess = {name: choices[name][min(turn, len(choices[name]) - 1)] for name in names}
            if guess not in seen:
                seen.append(guess)
                yield guess


def suggest_specs(model: nn.Module) -> dict[str, InputSpec]:
    """Suggest a specs file: the likeliest guess, with a placeholder for each input it lacks."""
    guess = next(guess_inputs(model), {})
    unknown = [
        name for name, required in named_args(model).items() if required and name not in guess
    ]
    return {**guess, **dict.fromkeys(unknown, InputSpec((1, _LENGTH)))}


def _choices(name: str, config: Any) -> list[InputSpec]:
    """List what an input of this name may look like, the likeliest first."""
    channels = _first(config, _CHANNELS, 3)
    size = _first(config, _IMAGE_SIZES, 224)
    patch = _first(config, ("patch_size",), 16)
    depth = _first(config, ("temporal_patch_size",), 1)
    patches = InputSpec((_GRID**3, channels * depth * patch**2))
    bins = _first(config, _BINS, 80)
    steps = _first(config, _STEPS, 32)
    if name.endswith("input_ids"):
        length = _LENGTH if name == "input_ids" else _LENGTH // 2
        return [InputSpec((1, length), "int64", (0, max(2, _first(config, _VOCABULARY, 2))))]
    if name.endswith("_mask"):
        return [InputSpec((1, _LENGTH), "int64", (1, 2))]
    if name in ("pixel_values", "images"):
        counts = (_FRAMES, _first(config, ("num_frames",), _FRAMES))
        videos = [InputSpec((1, count, channels, size, size)) for count in counts]
        return [InputSpec((1, channels, size, size)), *videos, patches]
    if name == "pixel_values_videos":
        count = _first(config, ("num_frames", "frames_per_clip"), _FRAMES)
        return [InputSpec((1, count, channels, size, size))]
    if name == "input_values":
        return [InputSpec((1, _SAMPLES)), InputSpec((1, steps, bins)), InputSpec((1, 1, _SAMPLES))]
    if name == "input_features":
        shapes = ((1, bins, 2 * steps), (1, 2 * steps, bins), (1, 1, 2 * steps, bins))
        return [InputSpec(shape) for shape in shapes]
    if name in ("hidden_states", "inputs_embeds", "inputs"):
        width = _first(config, _WIDTHS, 16)
        return [InputSpec((1, _LENGTH, width)), InputSpec((_LENGTH, width)), patches]
    if name.endswith("grid_thw"):
        return [InputSpec((1, 3), "int64", (_GRID, _GRID + 1))]
    if name == "past_values":
        length = _first(config, ("context_length",), 32)
        return [InputSpec((1, length, channels)), InputSpec((1, length))]
    return []


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first positive integer under one of these names, also in nested configurations."""
    for part in configurations(config):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def configurations(config: Any) -> Iterator[Any]:
    """Walk a configuration and those nested in it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in list(vars(config).values()):
            yield from configurations(value)
