"""Load models of Hugging Face transformers, and make inputs with their processors."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from modelexport.errors import SourceError, causes, first_line, suggest_name
from modelexport.option_values import spell_option
from modelexport.packages import import_package

_MAX_MISSING = 4
_MAX_REASON = 300
_TEXT = "every node of this graph belongs to a module"
_LONGER_TEXT = f"{_TEXT}, and every module that ran is accounted for"
_IMAGE_SIDE = 96
_TONE_HERTZ = 440

Tensors = dict[str, torch.Tensor]


class Hub(NamedTuple):
    """Where a model and its processor are, and whether its code may run."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether the name is that of a local folder."""
        return os.path.isdir(self.name)  # False also for text that cannot be a file name

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` that say the same."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


class Head(NamedTuple):
    """Which class to load, and whether to give it random weights."""

    task: str | None = None
    model_class: str | None = None
    random_weights: bool = False


def import_transformers() -> Any:
    """Import transformers, with its progress bars and log messages turned off.

    Raises:
        MissingPackageError: It is not installed or cannot be loaded.
    """
    transformers = import_package("transformers", otherwise="name a package.module:factory")
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for each retry
    return transformers


def load_model(hub: Hub, head: Head) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a model by task, by class, by the class of its configuration, or as AutoModel.

    Returns the model in evaluation mode, and notes for the user.
    """
    transformers = import_transformers()
    if hub.is_folder and not (Path(hub.name) / "config.json").is_file():
        raise SourceError(
            f"the folder {hub.name} has no config.json",
            hint="save a model there with save_pretrained",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(hub.name, **hub.options)
    except Exception as error:  # transformers and the hub raise many unrelated types
        raise _load_error(hub, error) from error
    failures: list[SourceError] = []
    for chosen in _candidate_classes(transformers, config, head):
        try:
            model, missing = _load(chosen, config, hub, head)
        except Exception as error:  # as above; the next class may load
            failures.append(_load_error(hub, error, f" as {chosen.__name__}"))
            failures[-1].__cause__ = error
            continue
        if not isinstance(model, nn.Module):
            raise SourceError(
                f"{chosen.__name__} loads no torch.nn.Module",
                hint=f"name another {spell_option('model_class')}",
            )
        return use_exportable_experts(model.eval()), _notes(hub, missing)
    raise failures[0]


def _load(chosen: Any, config: Any, hub: Hub, head: Head) -> tuple[Any, list[str]]:
    """Load or build a model, and list the parameters that its files do not have."""
    if not head.random_weights:
        model, info = chosen.from_pretrained(
            hub.name, config=config, output_loading_info=True, **hub.options
        )
        return model, sorted(info.get("missing_keys") or ())
    if hasattr(chosen, "from_config"):
        return chosen.from_config(config, trust_remote_code=hub.trust_remote_code), []
    # Only the Auto classes have a public from_config.
    return chosen._from_config(config), []


def _notes(hub: Hub, missing: list[str]) -> tuple[str, ...]:
    """Tell the user which parameters are random, a new head for example."""
    if not missing:
        return ()
    more = " ..." if len(missing) > _MAX_MISSING else ""
    names = ", ".join(missing[:_MAX_MISSING])
    return (f"weights that {hub.name} does not have are random: {names}{more}",)


def use_exportable_experts(model: nn.Module) -> nn.Module:
    """Switch mixtures of experts to the form that transformers has for export.

    It computes the same results, without an operator that ONNX does not have.
    """
    # Private, but the only way to ask: models without experts lack the public method.
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def _candidate_classes(transformers: Any, config: Any, head: Head) -> list[Any]:
    """List the classes to try, in order."""
    if head.task is not None and head.model_class is not None:
        raise SourceError(
            f"{spell_option('task')} and {spell_option('model_class')} both choose the class",
            hint="give one of them",
        )
    if head.task is not None:
        return _task_classes(transformers, head.task)
    if head.model_class is not None:
        model_class = getattr(transformers, head.model_class, None)
        if not hasattr(model_class, "from_pretrained"):
            raise SourceError(
                f"transformers has no model class {head.model_class!r}",
                hint=f"name it as transformers does, or choose by {spell_option('task')}",
            )
        return [model_class]
    bare = transformers.AutoModel
    remote = [n for n in getattr(config, "auto_map", None) or () if n.startswith(bare.__name__)]
    if remote and bare.__name__ not in remote:  # the code in the folder has no bare model
        return [getattr(transformers, remote[0])]
    names = () if remote else config.architectures or ()
    classes = (getattr(transformers, name, None) for name in names)
    return [next((found for found in classes if hasattr(found, "from_pretrained")), bare)]


def _task_classes(transformers: Any, task: str) -> list[Any]:
    """List the classes for a task of transformers' pipelines."""
    tasks: dict[str, Any] = transformers.pipelines.SUPPORTED_TASKS
    entry = tasks.get(transformers.pipelines.TASK_ALIASES.get(task, task))
    if entry is None:
        raise SourceError(f"there is no task {task!r}", hint=suggest_name(task, sorted(tasks)))
    return list(entry["pt"]) or [transformers.AutoModel]


def _load_error(hub: Hub, error: BaseException, as_class: str = "") -> SourceError:
    """Build the error for a model that transformers cannot load."""
    reason = first_line(error)[:_MAX_REASON]
    if isinstance(error, pickle.UnpicklingError):
        reason = (
            "its weights are a pickle that holds more than tensors, "
            "and opening it would run its code"
        )
        hint = "save the model again with save_pretrained, which writes safetensors"
    elif "trust_remote_code" in str(error):
        option = spell_option("trust_remote_code")
        hint = f"{option} runs the code that comes with the model; read it first"
    elif hub.is_folder:
        hint = "the folder has to hold a config.json and weights, as save_pretrained writes them"
    else:
        near = _near_folder(Path(hub.name))
        hint = "" if near is None else f"did you mean the folder {near}? "
        if _is_offline(error):
            hint += "check the network, or name a local folder; there is none of that name"
        else:
            hint += "there is no local folder of that name, and the hub has no model of that name"
    return SourceError(f"cannot load {hub.name!r}{as_class}: {reason}", hint=hint)


def save_random_weights(folder: Path, seed: int) -> None:
    """Complete a folder that has a configuration and a tokenizer with seeded random weights."""
    transformers = import_transformers()
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _near_folder(path: Path) -> Path | None:
    """Return the folder of a model whose name is nearest to a misspelt one."""
    try:
        names = [config.parent.name for config in path.parent.glob("*/config.json")]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, 1)
    return path.with_name(near[0]) if near else None


def _is_offline(error: BaseException) -> bool:
    """Return whether loading failed because the hub could not be reached."""
    return any(
        # By its name: it is in a package that only transformers depends on.
        type(cause).__name__ == "LocalEntryNotFoundError"
        or isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
        for cause in causes(error)
    )


class Processors(NamedTuple):
    """The processors that come with a model."""

    combined: Any | None
    tokenizer: Any | None
    image: Any | None
    audio: Any | None


class ProcessorOutput(NamedTuple):
    """The tensors of one processor; the others describe the first one."""

    processor: str
    tensors: Tensors


def find_processors(hub: Hub) -> Processors:
    """Load the processors that come with a model; those that cannot be loaded are None."""
    transformers = import_transformers()

    def load(auto_class: Any) -> Any | None:
        try:
            return auto_class.from_pretrained(hub.name, **hub.options)
        except Exception:  # folders of other versions fail in many ways
            return None

    combined = load(transformers.AutoProcessor)
    if not isinstance(combined, transformers.ProcessorMixin):
        combined = None
    tokenizer = getattr(combined, "tokenizer", None) or load(transformers.AutoTokenizer)
    image = getattr(combined, "image_processor", None) or load(transformers.AutoImageProcessor)
    audio = getattr(combined, "feature_extractor", None) or load(transformers.AutoFeatureExtractor)
    is_tokenizer = isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    return Processors(
        combined,
        tokenizer if is_tokenizer and _has_vocabulary(hub, tokenizer) else None,
        image,
        # Image processors used to be feature extractors as well.
        audio if hasattr(audio, "sampling_rate") else None,
    )


def _has_vocabulary(hub: Hub, tokenizer: Any) -> bool:
    """Return whether a tokenizer was loaded from files.

    For a folder without any, transformers makes a tokenizer of special tokens alone.
    """
    folder = Path(hub.name)
    names = ("tokenizer.json", "tokenizer_config.json", *tokenizer.vocab_files_names.values())
    return not hub.is_folder or any((folder / name).is_file() for name in names)


def process_examples(
    processors: Processors, text: str | None, batch: int = 1, longer: bool = False
) -> list[ProcessorOutput]:
    """Process an example text, image and sound, with the combined processor if that works."""
    if not text:
        text = _LONGER_TEXT if longer else _TEXT
    elif longer:
        text = f"{text} {text}"
    together = _process_together(processors, text, batch, longer)
    if together:
        return [ProcessorOutput("processor", together)]
    outputs = [
        ProcessorOutput("tokenizer", _process(processors.tokenizer, [text] * batch, padding=True)),
        ProcessorOutput("image processor", _process(processors.image, [_make_image()] * batch)),
    ]
    if processors.audio is not None:
        sounds = [_make_sound(processors.audio, longer)] * batch
        rate = int(processors.audio.sampling_rate)
        tensors = _process(processors.audio, sounds, sampling_rate=rate)
        outputs.append(ProcessorOutput("feature extractor", tensors))
    return [output for output in outputs if output.tensors]


def _process_together(processors: Processors, text: str, batch: int, longer: bool) -> Tensors:
    """Process text, image and sound with the combined processor, if there is one."""
    combined: Any = processors.combined
    if combined is None:
        return {}
    parameters = inspect.signature(combined.__call__).parameters
    options: dict[str, Any] = {}
    if processors.image is not None and "images" in parameters:
        options["images"] = [_make_image()] * batch
    if processors.audio is not None and "audio" in parameters:
        options["audio"] = [_make_sound(processors.audio, longer)] * batch
    if processors.tokenizer is None or "text" not in parameters:
        return _process(combined, **options)
    # Some processors need a token in the text for each image and sound, others reject it.
    tokens = [getattr(combined, name, None) for name in ("image_token", "audio_token")]
    with_tokens = " ".join([*(str(token) for token in tokens if token), text])
    for words in dict.fromkeys((with_tokens, text)):
        tensors = _process(combined, text=[words] * batch, padding=True, **options)
        if tensors:
            return tensors
    return {}


def _process(processor: Any | None, *args: Any, **options: Any) -> Tensors:
    """Call a processor and keep its tensors; nothing if it fails or returns an empty one."""
    if processor is None:
        return {}
    # Not every processor can pad, and all examples have the same length anyway.
    unpadded = {name: value for name, value in options.items() if name != "padding"}
    pads = "padding" in options and getattr(processor, "pad_token", "") is not None
    for attempt in (options, unpadded) if pads else (unpadded,):
        try:
            result: Mapping[str, Any] = processor(*args, return_tensors="pt", **attempt)
        except Exception:  # whatever it raises, it has no inputs for us
            continue
        tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
        return tensors if all(value.numel() for value in tensors.values()) else {}
    return {}


def _make_image() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Make a small image with a gradient in two of its colours."""
    gradient = np.linspace(0, 255, _IMAGE_SIDE, dtype=np.uint8)
    across, down = np.meshgrid(gradient, gradient)
    return np.stack([across, down, np.full_like(across, 128)], axis=-1)


def _make_sound(extractor: Any, longer: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Make one second of a steady tone, or one and a half."""
    rate = int(extractor.sampling_rate)
    seconds = np.arange(int(rate * (1.5 if longer else 1.0))) / rate
    return (0.5 * np.sin(2 * np.pi * _TONE_HERTZ * seconds)).astype(np.float32)
