"""Loads Hugging Face models: the right class for a folder or hub name, with its weights or without."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

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
            "transformers is not installed", hint="pip install 'modelexport[hf]', or name a package.module:factory"
        ) from error
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    return transformers


def load_model(hub: Hub, head: Head) -> tuple[nn.Module, tuple[str, ...]]:
    """The model by task, by class, by the class its configuration names, or the bare AutoModel; and notes on it."""
    transformers = import_transformers()
    if hub.is_folder and not (Path(hub.name) / "config.json").is_file():
        raise SourceError(f"the folder {hub.name} has no config.json", hint="save a model there with save_pretrained")
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
            raise SourceError(f"{chosen.__name__} loads no torch.nn.Module", hint="name another --model-class")
        shown = ", ".join(missing[:_MOST_MISSING]) + (" ..." if len(missing) > _MOST_MISSING else "")
        notes = (f"weights that {hub.name} does not have are random: {shown}",) if missing else ()
        return exportable(model.eval()), notes
    raise failures[0]


def _load(chosen: Any, config: Any, hub: Hub, head: Head) -> tuple[Any, list[str]]:
    """The model, and the names of the weights that were nowhere to be found."""
    if head.random_weights:
        return _without_weights(chosen, config, hub), []
    model, told = chosen.from_pretrained(hub.name, config=config, output_loading_info=True, **hub.options)
    return model, sorted(told.get("missing_keys") or ())


def exportable(model: nn.Module) -> nn.Module:
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
    named = [getattr(transformers, name, None) for name in ([] if own else config.architectures or ())]
    return [next((found for found in named if hasattr(found, "from_pretrained")), transformers.AutoModel)]


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
