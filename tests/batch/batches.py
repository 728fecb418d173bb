"""Jobs to run: models that are good, and models that are bad in every way that a process can notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GOOD = """
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),)


def wide():
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten()), (torch.ones(1, 2, 8),)


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
    "hang": {"timeout": 15},
    "crash": {},
    "hungry": {"memory": "2 GiB"},
    "error": {},
}
STATUS = {"hang": "timed-out", "crash": "crashed", "hungry": "out-of-memory", "error": "failed"}
DEFAULTS = {"strategy": "htp", "timeout": 300}


def write_jobs(folder: Path, jobs: list[dict[str, Any]], **settings: Any) -> Path:
    """A jobs file with the models that its jobs name."""
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    path = folder / "jobs.json"
    path.write_text(
        json.dumps({"output_dir": "out", "defaults": DEFAULTS, "jobs": jobs, **settings})
    )
    return path


def good_job(name: str, factory: str = "small") -> dict[str, Any]:
    return {"name": name, "model": f"good.py:{factory}"}


def bad_jobs() -> list[dict[str, Any]]:
    return [
        {"name": name, "model": f"bad.py:{name}", **limits} for name, limits in BAD_JOBS.items()
    ]


def command(*arguments: object) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from modelexport.cli.main import main; main()",
        "batch",
        *map(str, arguments),
    ]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`modelexport batch` as a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=900)


def results(process: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The lines on stdout, by job."""
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert len({line["name"] for line in lines}) == len(lines), process.stderr
    return {line["name"]: line for line in lines}


def processes_in(folder: Path) -> list[int]:
    """The processes of this machine that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                here = os.readlink(entry / "cwd") == str(folder)
            except OSError:
                continue
            if here and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone(folder: Path, seconds: float = 20) -> bool:
    """Whether all processes that work in a folder are gone within some seconds."""
    end = time.monotonic() + seconds
    while processes_in(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes_in(folder)
