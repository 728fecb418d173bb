"""Exports with each strategy, copied for each test that may damage them."""

from __future__ import annotations

from pathlib import Path

import pytest

import modelexport
from damage import copied, net
from modelexport.attribution import strategies
from zoo import distinct


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
        modelexport.register_strategy(
            modelexport.Strategy("by_weights", "torchscript", (strategies.PARAMETER,))
        )
        for strategy in ("fx", "htp", "by_weights"):
            model, inputs = net()
            (folder / strategy).mkdir()
            found[strategy] = folder / strategy / "m.onnx"
            modelexport.export_model(distinct(model), inputs, found[strategy], strategy=strategy)
    return found


@pytest.fixture(params=["fx", "htp"])
def exported(request: pytest.FixtureRequest, exports: dict[str, Path], tmp_path: Path) -> Path:
    """Copy a tagged file with its sidecar and data file."""
    return copied(exports[request.param], tmp_path / "copy")


@pytest.fixture
def traced(exports: dict[str, Path], tmp_path: Path) -> Path:
    """Copy a file of the torchscript exporter."""
    return copied(exports["htp"], tmp_path / "copy")
