"""Load models and processors of Hugging Face transformers."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from modelexport.errors import SourceError, first_line

_MOST_MISSING = 4


class Hub(NamedTuple):
    """Where a model and its processor are, and how far it is trusted."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.name)  # False too for a name that no file could have

    @property
    def options(self) -> dict[str, Any]:
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


class Head(NamedTuple):
    """Which class to load, and whether to leave its weights where they are."""

    task: str | None = None
    model_class: str | None = None
    random_weights: bool = False


def import_transformers() -> Any:
    """transformers, with its own progress bars and notes turned off."""
    try:
        import transformers
    except ImportError as error:
        raise SourceError(
            "transformers is not installed",
            hint="pip install 'modelexport[hf]', or name a package.module:factory",
        ) from error
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    return transformers


def load_model(hub: Hub, head: Head) -> tuple[nn.Module, tuple[str, ...]]:
    """The model by task, by class, by the class its configuration names, or the bare AutoModel; and notes on it."""
    transformers = import_transformers()
    if hub.is_folder and not (Path(hub.name) / "config.json").is_file():
        raise SourceError(
            f"the folder {hub.name} has no config.json",
            hint="save a model there with save_pretrained",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(hub.name, **hub.options)
    except Exception as error:
        raise _cannot_load(hub, error) from error
    failures: list[SourceError] = []
    for chosen in _classes(transformers, config, head):
        try:
            model, missing = _load(chosen, config, hub, head)
        except Exception as error:
            failures.append(_cannot_load(hub, error, f" as {chosen.__name__}"))
            failures[-1].__cause__ = error
            continue
        if not isinstance(model, nn.Module):
            raise SourceError(
                f"{chosen.__name__} loads no torch.nn.Module", hint="name another --model-class"
            )
        shown = ", ".join(missing[:_MOST_MISSING]) + (
            " ..." if len(missing) > _MOST_MISSING else ""
        )
        notes = (f"weights that {hub.name} does not have are random: {shown}",) if missing else ()
        return use_exportable_experts(model.eval()), notes
    raise failures[0]


def _load(chosen: Any, config: Any, hub: Hub, head: Head) -> tuple[Any, list[str]]:
    """The model, and the names of the weights that were nowhere to be found."""
    if head.random_weights:
        return _without_weights(chosen, config, hub), []
    model, told = chosen.from_pretrained(
        hub.name, config=config, output_loading_info=True, **hub.options
    )
    return model, sorted(told.get("missing_keys") or ())


def use_exportable_experts(model: nn.Module) -> nn.Module:
    """Mixtures of experts in the form that transformers has for export: the same results without its own operator."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def _without_weights(chosen: Any, config: Any, hub: Hub) -> Any:
    if hasattr(chosen, "from_config"):
        return chosen.from_config(config, trust_remote_code=hub.trust_remote_code)
    return chosen._from_config(config)


def _classes(transformers: Any, config: Any, head: Head) -> list[Any]:
    """The classes to try, in order."""
    if head.task is not None and head.model_class is not None:
        raise SourceError("--task and --model-class both choose the class", hint="give one of them")
    if head.task is not None:
        return _task_classes(transformers, head.task)
    if head.model_class is not None:
        found = getattr(transformers, head.model_class, None)
        if not hasattr(found, "from_pretrained"):
            raise SourceError(
                f"transformers has no model class {head.model_class!r}",
                hint="name it as transformers does, or choose by --task",
            )
        return [found]
    bare = transformers.AutoModel.__name__
    own = [name for name in getattr(config, "auto_map", None) or () if name.startswith(bare)]
    if own and bare not in own:  # the folder's own code has no bare model
        return [getattr(transformers, own[0])]
    named = [
        getattr(transformers, name, None) for name in ([] if own else config.architectures or ())
    ]
    return [
        next(
            (found for found in named if hasattr(found, "from_pretrained")), transformers.AutoModel
        )
    ]


def _task_classes(transformers: Any, task: str) -> list[Any]:
    known: dict[str, Any] = transformers.pipelines.SUPPORTED_TASKS
    entry = known.get(transformers.pipelines.TASK_ALIASES.get(task, task))
    if entry is None:
        raise SourceError(f"there is no task {task!r}", hint=f"known: {', '.join(sorted(known))}")
    return list(entry["pt"]) or [transformers.AutoModel]


def _cannot_load(hub: Hub, error: BaseException, how: str = "") -> SourceError:
    said = first_line(error)[:300]
    if isinstance(error, pickle.UnpicklingError):
        said = "its weights are a pickle that holds more than tensors, and opening it would run its code"
        hint = "save the model again with save_pretrained, which writes safetensors"
    elif "trust_remote_code" in str(error):
        hint = "--trust-remote-code runs the code that comes with the model; read it first"
    elif hub.is_folder:
        hint = "the folder has to hold a config.json and weights, as save_pretrained writes them"
    else:
        hint = "it is no local folder, and no model of that name can be had from the hub"
    return SourceError(f"cannot load {hub.name!r}{how}: {said}", hint=hint)


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


class ProcessorOutput(NamedTuple):
    """What one processor made; its first tensor is the one that the others describe."""

    by: str
    tensors: dict[str, torch.Tensor]


def find_processors(hub: Hub) -> Processors:
    """Each class is asked in turn; one that finds nothing is left out."""
    transformers = import_transformers()

    def ask(kind: Any) -> Any | None:
        try:
            return kind.from_pretrained(hub.name, **hub.options)
        except (
            Exception
        ):  # a folder of any age may hold anything: what cannot be loaded is not there
            return None

    combined = ask(transformers.AutoProcessor)
    if not isinstance(combined, transformers.ProcessorMixin):
        combined = None
    tokenizer = getattr(combined, "tokenizer", None) or ask(transformers.AutoTokenizer)
    image = getattr(combined, "image_processor", None) or ask(transformers.AutoImageProcessor)
    sound = getattr(combined, "feature_extractor", None) or ask(transformers.AutoFeatureExtractor)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase) or not _has_words(
        hub, tokenizer
    ):
        tokenizer = None
    if not hasattr(sound, "sampling_rate"):  # of old, image processors were feature extractors too
        sound = None
    return Processors(combined, tokenizer, image, sound)


def process_examples(
    processors: Processors, text: str | None, batch: int = 1, longer: bool = False
) -> list[ProcessorOutput]:
    """Everything the processors make of a text, an image and a sound; longer ones for the second size."""
    words = text or (_LONGER_TEXT if longer else DEFAULT_TEXT)
    if text is not None and longer:
        words = f"{text} {text}"
    together = (
        _call_combined(processors, words, batch, longer) if processors.combined is not None else {}
    )
    if together:
        return [ProcessorOutput("processor", together)]
    parts = (
        ProcessorOutput("tokenizer", _call(processors.tokenizer, [words] * batch, padding=True)),
        ProcessorOutput("image processor", _call(processors.image, [_image()] * batch)),
        ProcessorOutput("feature extractor", _call_sound(processors.sound, batch, longer)),
    )
    return [part for part in parts if part.tensors]


def _call_combined(
    processors: Processors, words: str, batch: int, longer: bool
) -> dict[str, torch.Tensor]:
    """Text, image and sound together, with the marks in the text that stand for the other two."""
    combined: Any = processors.combined
    takes = inspect.signature(combined.__call__).parameters
    marks = [
        str(mark)
        for name in ("image_token", "audio_token")
        if (mark := getattr(combined, name, None))
    ]
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
        [
            np.tile(across, (_SIDE, 1)),
            np.tile(across[:, None], (1, _SIDE)),
            np.full((_SIDE, _SIDE), 128),
        ],
        -1,
    ).astype(np.uint8)


def _sound(extractor: Any, longer: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A second of a steady tone, or a second and a half."""
    rate = int(extractor.sampling_rate)
    moments = np.arange(int(rate * _SECONDS * (1.5 if longer else 1.0))) / rate
    return (0.5 * np.sin(2 * np.pi * 440 * moments)).astype(np.float32)
