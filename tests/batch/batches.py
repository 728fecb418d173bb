"""Jobs for the batch tests: models that export, and models that fail in every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GOOD = """
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),)


def wide():
    layers = nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten()
    return nn.Sequential(*layers), (torch.ones(1, 2, 8),)


def chatty():
    for number in range(20000):
        print("a line of no interest", number)
    return small()
"""
BAD = """
import os
import subprocess
import time

import torch
from torch import nn


class Bad(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = act

    def forward(self, x):
        self.act()
        return self.fc(x)


def eat():
    kept = []
    while True:
        kept.append(torch.ones(64, 1024, 1024))


def sleep():
    time.sleep(3600)


def refuse():
    raise ValueError("the weights are of another model")


def stop():
    os.kill(os.getpid(), 19)


def block():
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


def stopped():
    return Bad(stop), (torch.ones(2, 4),)


def busy():
    return Bad(block), (torch.ones(2, 4),)


def hang():
    return Bad(sleep), (torch.ones(2, 4),)


def parent():
    subprocess.Popen(["sleep", "600"])
    return hang()


def crash():
    return Bad(os.abort), (torch.ones(2, 4),)


def hungry():
    return Bad(eat), (torch.ones(2, 4),)


def error():
    return Bad(refuse), (torch.ones(2, 4),)
"""
BAD_JOBS = {
    "hang": {"timeout": 8},
    "crash": {},
    "hungry": {"memory": "2 GiB"},
    "error": {},
}
STATUS = {"hang": "timed-out", "crash": "crashed", "hungry": "out-of-memory", "error": "failed"}
DEFAULTS = {"strategy": "htp", "timeout": 300}
DEADLINE = 300
"""Seconds after which a test that waits for a condition fails."""


def write_jobs(folder: Path, jobs: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a jobs file, and beside it the models that its jobs name."""
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    path = folder / "jobs.json"
    path.write_text(
        json.dumps({"output_dir": "out", "defaults": DEFAULTS, "jobs": jobs, **settings})
    )
    return path


def good_job(name: str, factory: str = "small") -> dict[str, Any]:
    """Make a job that succeeds."""
    return {"name": name, "model": f"good.py:{factory}"}


def bad_jobs() -> list[dict[str, Any]]:
    """Make the jobs that do not succeed."""
    return [
        {"name": name, "model": f"bad.py:{name}", **limits} for name, limits in BAD_JOBS.items()
    ]


def command(*arguments: object) -> list[str]:
    """Return the command line of `modelexport batch`."""
    return [
        sys.executable,
        "-c",
        "from modelexport.cli.main import main; main()",
        "batch",
        *map(str, arguments),
    ]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `modelexport batch` as a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=900)


def results(process: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Read the results on stdout, by job."""
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert len({line["name"] for line in lines}) == len(lines), process.stderr
    return {line["name"]: line for line in lines}


def processes_in(folder: Path) -> list[int]:
    """List the processes of this machine that work in a folder."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if os.readlink(entry / "cwd") == str(folder):
                    processes.append(int(entry.name))
    return processes


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for a condition; fail if it does not come, or if the process ends before it."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come about"
        assert process is None or process.poll() is None, "the process ended"
        time.sleep(0.05)


def wait_for_end(folder: Path) -> None:
    """Wait until no process works in a folder any more."""
    wait_until(lambda: not processes_in(folder))
