"""Exports of the zoo and the architectures that many tests share.

One export of a model serves a whole test run: the first test that needs it makes it, in a folder
that all processes of the run share. What only the export itself can show is checked there, and what
torch recorded during it is kept beside it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

import modelexport
from architectures import ARCHITECTURES
from proof import Verdict, model_unchanged, prove_file
from scopes import RecordedScopes, recorded_scopes
from zoo import TORCH_CANNOT, ZOO, distinct

EXPORTER = {"fx": "dynamo", "htp": "torchscript"}
NEEDS_CACHE = {"gpt2", "llama", "whisper"}
"""Without a cache these use an operator that the torchscript exporter does not have."""


def cases(*names: str) -> list[Any]:
    """Return the parameters (name, strategy) of models, with each exporter that can export them."""
    return [
        pytest.param(name, strategy, id=f"{name}-{strategy}")
        for name in names
        for strategy, exporter in EXPORTER.items()
        if name not in TORCH_CANNOT[exporter]
    ]


NAMES = (*ZOO, *ARCHITECTURES)
CASES = cases(*NAMES)


class Shared:
    """The folder that all processes of one test run share; tests/conftest.py sets it."""

    folder: Path


def shared_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder of this test run that must not be changed; `fill` is called once a run."""
    folder = Shared.folder / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a test that failed here
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder


def build(name: str, strategy: str) -> tuple[nn.Module, Any]:
    """Build a model of the zoo or an architecture, always with the same weights, and its inputs."""
    torch.manual_seed(0)
    model, inputs = (ZOO.get(name) or ARCHITECTURES[name])()
    if name in ZOO:
        distinct(model)
    else:
        model.config.use_cache = strategy == "htp" and name in NEEDS_CACHE
    return model, inputs


def _shared_export(name: str, strategy: str, **options: Any) -> Path:
    """Return the folder of an export: `files`, and what torch recorded in `scopes.json`."""

    def fill(folder: Path) -> None:
        model, inputs = build(name, strategy)
        (folder / "files").mkdir()
        path = folder / "files" / "model.onnx"
        # A test that ignores warnings may be the first to need this export.
        with warnings.catch_warnings(), recorded_scopes(model) as recorded, model_unchanged(model):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".torch.jit.(trace|script). is deprecated")
            modelexport.export_model(model, inputs, path, strategy=strategy, **options)
        (folder / "scopes.json").write_text(json.dumps(recorded.by_value))

    key = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]
    return shared_folder(f"{name}-{strategy}-{key}" if options else f"{name}-{strategy}", fill)


def export(name: str, strategy: str, folder: Path, **options: Any) -> tuple[Path, Any, Any]:
    """Copy the export of a model into a folder; return its path, the model and the inputs."""
    files = _shared_export(name, strategy, **options) / "files"
    shutil.copytree(files, folder, dirs_exist_ok=True)
    return folder / "model.onnx", *build(name, strategy)


def export_scopes(name: str, strategy: str, model: nn.Module) -> RecordedScopes:
    """Return what torch recorded during the export of a model."""
    scopes = _shared_export(name, strategy) / "scopes.json"
    return RecordedScopes(model, json.loads(scopes.read_text()))


def prove_export(name: str, strategy: str) -> Verdict:
    """Check every promise of the map on the shared export of a model."""
    path = _shared_export(name, strategy) / "files" / "model.onnx"
    model, inputs = build(name, strategy)
    return prove_file(path, model, inputs, export_scopes(name, strategy, model))
