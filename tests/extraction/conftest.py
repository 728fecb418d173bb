"""Exports to extract from."""

from __future__ import annotations

from pathlib import Path

import pytest

from exports import export


@pytest.fixture(params=["fx", "htp"])
def bert(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return export("bert", request.param, tmp_path)[0]
