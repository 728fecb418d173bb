"""Whenever a run is killed, the earlier output is as it was or the new one is complete, and nothing else is there."""

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
    places = os.pathsep.join([str(driver.parent.parent), os.environ.get("PYTHONPATH", "")])
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(driver), scenario, way, str(kills), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places, "TMPDIR": str(temporary)},
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


def test_200_kills_at_random_points(tmp_path: Path) -> None:
    assert killed("export", "timed", 200, tmp_path)["kills"] == 200


@pytest.mark.parametrize("scenario", ["repair", "import"])
def test_random_points_of_a_repair_and_of_an_import(scenario: str, tmp_path: Path) -> None:
    assert killed(scenario, "timed", 60, tmp_path)["kills"] == 60


def test_random_points_of_an_export_with_dynamo(tmp_path: Path) -> None:
    assert killed("export-fx", "timed", 15, tmp_path)["kills"] == 15


@pytest.mark.parametrize("scenario", ["export", "import"])
def test_ctrl_c_at_random_points(scenario: str, tmp_path: Path) -> None:
    record = killed(scenario, "interrupted", 40, tmp_path)
    assert record["slowest"] < 0.5  # it clears up by itself


def test_two_exports_to_one_output_of_which_one_is_killed(tmp_path: Path) -> None:
    record = killed("export", "rivals", 40, tmp_path)
    assert record["before"]
