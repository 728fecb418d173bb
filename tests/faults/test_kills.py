"""Whenever a run is killed, the earlier output is intact or the new one complete.

The hidden work folder that a killed run leaves is removed by the next run in the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.must, pytest.mark.integration]


def killed(scenario: str, way: str, kills: int, folder: Path) -> dict[str, Any]:
    driver = Path(__file__).with_name("driver.py")
    paths = os.pathsep.join([str(driver.parent.parent), os.environ.get("PYTHONPATH", "")])
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(driver), scenario, way, str(kills), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TMPDIR": str(temporary)},
    )
    assert process.returncode == 0, process.stderr
    record: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert record["wrong"] == []
    assert record["kills"] == record["before"] + record["after"]
    assert not [
        path
        for path in temporary.iterdir()
        if path.is_file() or path.name.startswith(".modelexport")
    ]
    return record


@pytest.mark.parametrize("scenario", ["export", "repair", "import"])
def test_before_every_file_operation(scenario: str, tmp_path: Path) -> None:
    record = killed(scenario, "injected", 1000, tmp_path)
    assert record["kills"] > 20
    assert record["before"]
    assert record["after"]
    assert record["left"]  # so that the next run had something to remove


@pytest.mark.parametrize(
    ("scenario", "kills"), [("export", 20), ("repair", 8), ("import", 8), ("export-fx", 4)]
)
def test_kills_at_random_points(scenario: str, kills: int, tmp_path: Path) -> None:
    assert killed(scenario, "timed", kills, tmp_path)["kills"] == kills


@pytest.mark.parametrize("scenario", ["export", "import"])
def test_ctrl_c_at_random_points(scenario: str, tmp_path: Path) -> None:
    record = killed(scenario, "interrupted", 10, tmp_path)
    assert record["left"] == 0  # it removes its own work folder


def test_two_exports_to_one_output_of_which_one_is_killed(tmp_path: Path) -> None:
    record = killed("export", "rivals", 10, tmp_path)
    assert record["before"]
