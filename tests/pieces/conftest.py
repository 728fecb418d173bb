"""Exports to cut pieces from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def export(name: str, strategy: str, folder: Path, **options: Any) -> tuple[Path, Any, Any]:
    """A tagged file of an animal or an architecture, with the model and its inputs."""
    model, inputs = (ZOO.get(name) or ARCHITECTURES[name])()
    if name in ZOO:
        distinct(model)
    else:
        model.config.use_cache = strategy == "htp" and name in NEEDS_CACHE
    path = folder / "model.onnx"
    modelexport.export_model(model, inputs, path, strategy=strategy, **options)
    return path, model, inputs


@pytest.fixture(params=["fx", "htp"])
def bert(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return export("bert", request.param, tmp_path)[0]
