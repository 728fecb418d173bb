"""Shared by all tests: quiet, seeded, one thread a process."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("busy")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _shared_exports(tmp_path_factory: pytest.TempPathFactory) -> None:
    from exports import Shared

    own = tmp_path_factory.getbasetemp()
    parent = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    Shared.folder = parent / "exports"
    Shared.folder.mkdir(exist_ok=True)
