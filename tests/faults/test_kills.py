"""Whenever a run is killed, the earlier output is intact or the new one complete.

The hidden work folder that a killed run leaves is removed by the next run in the folder.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from modelexport.onnx_file.atomic_write import write_file

DEADLINE = 300
"""Seconds after which a test that waits for a lock fails."""

pytestmark = [pytest.mark.must, pytest.mark.integration]


def kill(scenario: str, mode: str, kills: int, folder: Path) -> dict[str, Any]:
    driver = Path(__file__).with_name("driver.py")
    paths = os.pathsep.join([str(driver.parent.parent), os.environ.get("PYTHONPATH", "")])
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(driver), scenario, mode, str(kills), str(folder)],
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
    record = kill(scenario, "injected", 1000, tmp_path)
    assert record["kills"] > 20
    assert record["before"]
    assert record["after"]
    assert record["left"]  # so that the next run had something to remove


@pytest.mark.parametrize(
    ("scenario", "kills"), [("export", 20), ("repair", 8), ("import", 8), ("export-fx", 4)]
)
def test_kills_at_random_points(scenario: str, kills: int, tmp_path: Path) -> None:
    assert kill(scenario, "killed", kills, tmp_path)["kills"] == kills


@pytest.mark.parametrize("scenario", ["export", "import"])
def test_ctrl_c_at_random_points(scenario: str, tmp_path: Path) -> None:
    record = kill(scenario, "interrupted", 10, tmp_path)
    assert record["left"] == 0  # it removes its own work folder


def test_two_exports_to_one_output_of_which_one_is_killed(tmp_path: Path) -> None:
    record = kill("export", "rivals", 10, tmp_path)
    assert record["before"]


@pytest.fixture
def _no_endless_wait() -> Iterator[None]:
    """Fail a test that waits for a lock which it holds itself."""

    def fail(*_: object) -> None:
        pytest.fail("it waits for a lock")  # no Exception, so that nothing suppresses it

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_no_endless_wait")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Exception ignored")
def test_ctrl_c_at_every_point_of_a_write(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    for point in itertools.count():
        target.write_bytes(b"old")
        hook = Interruption(point)
        sys.setprofile(hook)
        try:
            write_file(target, b"new")
        except (KeyboardInterrupt, OSError):
            pass  # OSError: shutil.rmtree closes a handle again, if Ctrl-C comes after it is closed
        finally:
            sys.setprofile(None)
        assert list(tmp_path.iterdir()) == [target]
        if hook.left >= 0:  # it ended before
            break
        assert target.read_bytes() in (b"old", b"new")
    assert target.read_bytes() == b"new"
    assert point > 100


class Interruption:
    """A profile function that raises KeyboardInterrupt where CPython 3.11 handles signals.

    That is at the start of a function and after a call of a C function.
    """

    def __init__(self, point: int) -> None:
        self.left = point

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt
