"""Exports of the zoo and the architectures for many tests: each is made once a run, by whichever test comes first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import modelexport
from architectures import ARCHITECTURES
from zoo import TORCH_CANNOT, ZOO, distinct

EXPORTER = {"fx": "dynamo", "htp": "torchscript"}
CASES = [
    pytest.param(name, strategy, id=f"{name}-{strategy}")
    for name in (*ZOO, *ARCHITECTURES)
    for strategy in EXPORTER
    if name not in TORCH_CANNOT[EXPORTER[strategy]]
]
NEEDS_CACHE = {"gpt2", "llama", "whisper"}


class Shared:
    """The folder that all processes of one test run share; tests/conftest.py sets it."""

    folder: Path


def build(name: str, strategy: str) -> tuple[Any, Any]:
    """An animal or an architecture with its inputs; the same weights every time."""
    model, inputs = (ZOO.get(name) or ARCHITECTURES[name])()
    if name in ZOO:
        distinct(model)
    else:
        model.config.use_cache = strategy == "htp" and name in NEEDS_CACHE
    return model, inputs


def export(name: str, strategy: str, folder: Path, **options: Any) -> tuple[Path, Any, Any]:
    """A tagged file of an animal or an architecture in a folder, with the model and its inputs."""
    model, inputs = build(name, strategy)
    path = folder / "model.onnx"
    if options:
        modelexport.export_model(model, inputs, path, strategy=strategy, **options)
        return path, model, inputs
    made = Shared.folder / f"{name}-{strategy}"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            fresh = made.with_name(f"{made.name}.part")
            fresh.mkdir()
            modelexport.export_model(model, inputs, fresh / path.name, strategy=strategy)
            fresh.rename(made)
            model, inputs = build(name, strategy)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return path, model, inputs
