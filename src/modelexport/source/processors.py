"""Makes inputs with a model's own processor: from text, a generated image and a generated sound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from modelexport.source.hub import Hub, import_transformers

DEFAULT_TEXT = "every node of this graph belongs to a module"
_LONGER_TEXT = f"{DEFAULT_TEXT}, and every module that ran is accounted for"
_SIDE = 96
_SECONDS = 1.0


class Processors(NamedTuple):
    """What a model's folder has to make inputs with."""

    combined: Any | None
    tokenizer: Any | None
    image: Any | None
    sound: Any | None


def _has_words(hub: Hub, tokenizer: Any) -> bool:
    """transformers makes up a tokenizer of special tokens alone for a folder that has no files of one."""
    folder = Path(hub.name)
    names = ("tokenizer.json", "tokenizer_config.json", *tokenizer.vocab_files_names.values())
    return not hub.is_folder or any((folder / name).is_file() for name in names)


class Made(NamedTuple):
    """What one processor made; its first tensor is the one that the others describe."""

    by: str
    tensors: dict[str, torch.Tensor]


def find_processors(hub: Hub) -> Processors:
    """Each class is asked in turn; one that finds nothing is left out."""
    transformers = import_transformers()

    def ask(kind: Any) -> Any | None:
        try:
            return kind.from_pretrained(hub.name, **hub.options)
        except Exception:  # a folder of any age may hold anything: what cannot be loaded is not there
            return None

    combined = ask(transformers.AutoProcessor)
    if not isinstance(combined, transformers.ProcessorMixin):
        combined = None
    tokenizer = getattr(combined, "tokenizer", None) or ask(transformers.AutoTokenizer)
    image = getattr(combined, "image_processor", None) or ask(transformers.AutoImageProcessor)
    sound = getattr(combined, "feature_extractor", None) or ask(transformers.AutoFeatureExtractor)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase) or not _has_words(hub, tokenizer):
        tokenizer = None
    if not hasattr(sound, "sampling_rate"):  # of old, image processors were feature extractors too
        sound = None
    return Processors(combined, tokenizer, image, sound)


def processed(processors: Processors, text: str | None, batch: int = 1, longer: bool = False) -> list[Made]:
    """Everything the processors make of a text, an image and a sound; longer ones for the second size."""
    words = text or (_LONGER_TEXT if longer else DEFAULT_TEXT)
    if text is not None and longer:
        words = f"{text} {text}"
    together = _call_combined(processors, words, batch, longer) if processors.combined is not None else {}
    if together:
        return [Made("processor", together)]
    parts = (
        Made("tokenizer", _call(processors.tokenizer, [words] * batch, padding=True)),
        Made("image processor", _call(processors.image, [_image()] * batch)),
        Made("feature extractor", _call_sound(processors.sound, batch, longer)),
    )
    return [part for part in parts if part.tensors]


def _call_combined(processors: Processors, words: str, batch: int, longer: bool) -> dict[str, torch.Tensor]:
    """Text, image and sound together, with the marks in the text that stand for the other two."""
    combined: Any = processors.combined
    takes = inspect.signature(combined.__call__).parameters
    marks = [str(mark) for name in ("image_token", "audio_token") if (mark := getattr(combined, name, None))]
    for prefix in ((" ".join(marks) + " ") if marks else "", ""):
        options: dict[str, Any] = {}
        if processors.tokenizer is not None and "text" in takes:
            options |= {"text": [prefix + words] * batch, "padding": True}
        if processors.image is not None and "images" in takes:
            options["images"] = [_image()] * batch
        if processors.sound is not None and "audio" in takes:
            options |= {"audio": [_sound(processors.sound, longer)] * batch}
        found = _call(combined, **options)
        if found:
            return found
    return {}


def _call_sound(extractor: Any | None, batch: int, longer: bool) -> dict[str, torch.Tensor]:
    if extractor is None:
        return {}
    rate = int(extractor.sampling_rate)
    return _call(extractor, [_sound(extractor, longer)] * batch, sampling_rate=rate)


def _call(processor: Any | None, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
    """What a processor makes, tensors only; nothing if it cannot."""
    if processor is None:
        return {}
    if options.get("padding") and getattr(processor, "pad_token", "") is None:
        options.pop("padding")  # all texts are the same, so they need none
    for attempt in (options, {name: value for name, value in options.items() if name != "padding"}):
        try:
            made: Mapping[str, Any] = processor(*args, return_tensors="pt", **attempt)
        except Exception:
            continue
        found = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        return found if all(value.numel() for value in found.values()) else {}
    return {}


def _image() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A small picture with a gradient in each colour."""
    across = np.linspace(0, 255, _SIDE, dtype=np.uint8)
    return np.stack(
        [np.tile(across, (_SIDE, 1)), np.tile(across[:, None], (1, _SIDE)), np.full((_SIDE, _SIDE), 128)], -1
    ).astype(np.uint8)


def _sound(extractor: Any, longer: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A second of a steady tone, or a second and a half."""
    rate = int(extractor.sampling_rate)
    moments = np.arange(int(rate * _SECONDS * (1.5 if longer else 1.0))) / rate
    return (0.5 * np.sin(2 * np.pi * 440 * moments)).astype(np.float32)
