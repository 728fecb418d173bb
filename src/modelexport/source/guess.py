"""Guesses inputs from a model's forward signature and its configuration, where nothing better is at hand.

The argument names and configuration fields are the conventions of transformers; what a name
says about the values is all that is used, never which model it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import nn

from modelexport.capture.module_tree import named_args
from modelexport.source.input_specs import InputSpec

_LENGTH = 8
_SAMPLES = 4000
_FRAMES = 2
_GRID = 4

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


def guesses(model: nn.Module) -> Iterator[dict[str, InputSpec]]:
    """Sets of inputs to try in order: everything that can be described, then only what is needed."""
    arguments = named_args(model)
    main = getattr(model, "main_input_name", None)
    mains = [main] if isinstance(main, str) else list(main or ())
    needed = [name for name, required in arguments.items() if required or name in mains]
    config = getattr(model, "config", None)
    choices = {name: options for name in arguments if (options := _choices(name, config))}
    companions = [name for name in choices if _accompanies(name, arguments)]
    wide = [name for name in choices if name in needed or name in companions or _is_modality(name)]
    narrow = [name for name in choices if name in needed or name in companions]
    seen: list[dict[str, InputSpec]] = []
    for names in (wide, narrow, [name for name in choices if name in needed]):
        for turn in range(max((len(choices[name]) for name in names), default=0)):
            picked = {name: choices[name][min(turn, len(choices[name]) - 1)] for name in names}
            if picked not in seen:
                seen.append(picked)
                yield picked


def suggestion(model: nn.Module) -> dict[str, InputSpec]:
    """One set of inputs to start a specs file from: the likeliest guess, and a placeholder for what is unknown."""
    guessed = next(guesses(model), {})
    unknown = [
        name for name, required in named_args(model).items() if required and name not in guessed
    ]
    return {**guessed, **dict.fromkeys(unknown, InputSpec((1, _LENGTH)))}


def _is_modality(name: str) -> bool:
    return name in ("input_ids", "pixel_values", "input_values", "input_features")


def _accompanies(name: str, arguments: Container[str]) -> bool:
    """What a model that takes it usually needs beside its main input."""
    return name == "decoder_input_ids" or (name == "attention_mask" and "input_ids" in arguments)


def _choices(name: str, config: Any) -> list[InputSpec]:
    """How an input of this name may look, likeliest first."""
    channels = _first(config, _CHANNELS, 3)
    size = _first(config, _IMAGE_SIZES, 224)
    patch = _first(config, ("patch_size",), 16)
    patches = InputSpec(
        (_GRID**3, channels * _first(config, ("temporal_patch_size",), 1) * patch**2)
    )
    bins = _first(config, _BINS, 80)
    if name.endswith("input_ids"):
        length = _LENGTH if name == "input_ids" else _LENGTH // 2
        return [InputSpec((1, length), "int64", (0, _vocabulary(config)))]
    if name.endswith("_mask"):
        return [InputSpec((1, _LENGTH), "int64", (1, 2))]
    if name in ("pixel_values", "images"):
        video = InputSpec((1, _FRAMES, channels, size, size))
        frames = InputSpec((1, _first(config, ("num_frames",), _FRAMES), channels, size, size))
        return [InputSpec((1, channels, size, size)), video, frames, patches]
    if name == "pixel_values_videos":
        return [
            InputSpec(
                (
                    1,
                    _first(config, ("num_frames", "frames_per_clip"), _FRAMES),
                    channels,
                    size,
                    size,
                )
            )
        ]
    if name == "input_values":
        steps = _first(config, _STEPS, 32)
        return [InputSpec((1, _SAMPLES)), InputSpec((1, steps, bins)), InputSpec((1, 1, _SAMPLES))]
    if name == "input_features":
        steps = 2 * _first(config, _STEPS, 32)
        return [
            InputSpec((1, bins, steps)),
            InputSpec((1, steps, bins)),
            InputSpec((1, 1, steps, bins)),
        ]
    if name in ("hidden_states", "inputs_embeds", "inputs"):
        width = _first(config, ("hidden_size", "d_model", "dim"), 16)
        return [InputSpec((1, _LENGTH, width)), InputSpec((_LENGTH, width)), patches]
    if name.endswith("grid_thw"):
        return [InputSpec((1, 3), "int64", (_GRID, _GRID + 1))]
    if name == "past_values":
        steps = _first(config, ("context_length",), 32)
        return [InputSpec((1, steps, channels)), InputSpec((1, steps))]
    return []


def _vocabulary(config: Any) -> int:
    return max(2, _first(config, ("vocab_size", "text_vocab_size", "src_vocab_size"), 2))


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first whole number under one of these names in the configuration or one inside it."""
    for part in configurations(config):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def configurations(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in list(vars(config).values()):
            if hasattr(value, "to_dict"):
                yield from configurations(value)
