"""Guess inputs from the signature of forward and the configuration, if nothing better is known.

Argument names and configuration fields are the conventions of transformers. Only what a name says
about the values is used, never which model it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from modelexport.capture.module_tree import named_args
from modelexport.source.input_specs import InputSpec

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


def guess_inputs(model: nn.Module) -> Iterator[dict[str, InputSpec]]:
    """Guess sets of inputs: first all that can be described, then fewer, last only the required.

    Args:
        model: A model, with a configuration if it has one.

    Yields:
        Specs by argument name, each set once.
    """
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
    """Suggest specs to start a specs file from.

    Args:
        model: A model.

    Returns:
        The likeliest guess, with a placeholder for each required argument that it lacks.
    """
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
    """Walk a configuration and those nested in it.

    Args:
        config: A configuration of transformers, or anything else.

    Yields:
        The configuration, if it is one, then those in its fields.
    """
    if hasattr(config, "to_dict"):
        yield config
        for value in list(vars(config).values()):
            yield from configurations(value)
