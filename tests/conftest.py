"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from quick import is_quick

settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("busy")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is imported: the models are small, and threads of several processes that wait for
# each other take twice the time.
os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background like this. Tests interrupt their processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped, and why."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    lines = [f"{reason} ({count})" for reason, count in sorted(reasons.items())]
    terminalreporter.write_line(f"skipped {len(reports)}: {'; '.join(lines) or 'nothing'}")


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
