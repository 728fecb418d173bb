"""A browser, and pages that several files of tests open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import modelexport
from exports import export
from viewing.browser import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a model with repeated layers."""
    folder = tmp_path_factory.mktemp("bert")
    path, _, _ = export("bert", "fx", folder)
    return modelexport.view(path, folder / "bert.html").path


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    path = folder / "tower.onnx"
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(12)))
    model = nn.Sequential(layers, nn.Dropout(), nn.Linear(8, 3)).eval()
    modelexport.export_model(model, torch.rand(2, 8), path)
    return modelexport.view(path).path
