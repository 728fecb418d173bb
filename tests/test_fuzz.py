"""Every reader on a few damaged files, and the harness, which must detect each kind of flaw."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from fuzz import mutate_toml
from fuzz.__main__ import main
from fuzz.limits import Flaw, Limits, Reader, Verdict, _try_reader, judge
from fuzz.search import search
from fuzz.seeds import Files, Seed
from fuzz.targets import TARGETS, Target

from modelexport.errors import FormatError

pytestmark = [pytest.mark.sanity, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

ROOT = Path(__file__).parents[1]
CASES = 60


@pytest.mark.parametrize("name", TARGETS)
def test_only_our_own_errors_come_out(name: str, tmp_path: Path) -> None:
    """In a process without torch, from which cases are forked much sooner."""
    options = f"--cases {CASES} --seed 11 --jobs 1".split()
    command = [sys.executable, "-m", "fuzz", name, *options, "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{name} +│ {CASES}\d? +│ [1-9]", done.stdout), "some are read"


def value_error() -> None:
    raise ValueError("not ours")


@pytest.mark.parametrize(
    ("harm", "name", "seconds"),
    [
        (value_error, "ValueError in tests/test_fuzz.py", 600),
        (signal.pause, "took more than 2 s", 2),
        (lambda: ctypes.string_at(0), "died with status -11", 600),
        (lambda: os._exit(3), "died with status 3", 600),
        (lambda: bytearray(os.urandom(1 << 20) * 80), "took more than 64 MiB", 600),
        (lambda: bytes(1 << 40), "MemoryError in tests/test_fuzz.py", 600),
    ],
    ids=["error", "hang", "crash", "exit", "memory", "too-much"],
)
def test_each_kind_of_flaw_is_detected(
    harm: Callable[[], object], name: str, seconds: int, tmp_path: Path
) -> None:
    readers = {"good": lambda folder, out: None, "bad": lambda folder, out: harm()}
    verdict = judge(readers, tmp_path, Limits(seconds, memory=64 << 20))
    assert verdict.flaw is not None
    assert name in verdict.flaw.name
    assert verdict.accepted >= 1


def test_an_error_of_ours_is_no_flaw(tmp_path: Path) -> None:
    def refuse(folder: Path, out: Path) -> None:
        raise FormatError("bad file")

    verdict = judge({"refuse": refuse}, tmp_path, Limits())
    assert (verdict.flaw, verdict.accepted) == (None, 0)


def make_target(read: Callable[[bytes], object]) -> Target:
    """Return a target whose reader gets twenty bytes, mutated."""
    seed = Seed(Files({"file": bytes(range(20))}), "file")
    return Target(
        "made up",
        lambda: [seed],
        (),
        {"read": lambda folder, out: read((folder / "file").read_bytes())},
    )


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run cases in this process, which has imported torch and is slow to fork."""

    def judge_here(readers: dict[str, Reader], folder: Path, limits: Limits) -> Verdict:
        results = [_try_reader(name, reader, folder, folder) for name, reader in readers.items()]
        flaws = [Flaw(result.flaw, result.detail) for result in results if result.flaw]
        accepted = sum(result.accepted for result in results)
        return Verdict(flaws[0] if flaws else None, accepted, 0, 0)

    monkeypatch.setattr("fuzz.search.judge", judge_here)


def fail_on_large_bytes(data: bytes) -> None:
    """Fail in two ways, at bytes that only a mutation can write."""
    if data[:1] > b"\x0a":
        raise ValueError("not ours")
    if data[1:2] > b"\x0a":
        raise KeyError("not ours")


@pytest.mark.usefixtures("in_process")
def test_flaws_are_shrunk_and_the_search_continues() -> None:
    outcome = search(make_target(fail_on_large_bytes), 80, start=1)
    assert {flaw.name.split()[0] for flaw in outcome.flaws} == {"ValueError", "KeyError"}
    assert outcome.cases >= 80
    assert min(len(flaw.files["file"]) for flaw in outcome.flaws) <= 20


def test_the_same_seed_gives_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cases(start: int) -> list[bytes]:
        files: list[bytes] = []

        def note(readers: object, folder: Path, limits: Limits) -> Verdict:
            files.append((folder / "file").read_bytes())
            return Verdict(None, 1, 0, 0)

        monkeypatch.setattr("fuzz.search.judge", note)
        search(make_target(len), 50, start)
        return files

    assert run_cases(3) == run_cases(3)
    assert run_cases(3) != run_cases(4)


@pytest.mark.usefixtures("in_process")
def test_files_that_show_a_flaw_are_kept_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "specs", make_target(fail_on_large_bytes)._replace(name="specs"))
    page = tmp_path / "page.md"
    earlier = "| onnx | 10,000 | of an earlier run |"
    page.write_text(f"{earlier}\n")
    command = ["specs", "--cases", "40", "--seed", "1", "--jobs", "1", "--keep", str(tmp_path)]
    result = CliRunner().invoke(main, [*command, "--page", str(page)])
    assert result.exit_code == 1, result.output
    *_, kept_row, row = page.read_text().splitlines()
    assert kept_row == earlier
    assert re.fullmatch(r"\| specs \| 4\d \| .* \| [1-9] \| `read` \|", row)
    kept = tmp_path / "specs-0"
    assert f"to repeat: python -m fuzz specs --repeat {kept}" in result.output
    again = CliRunner().invoke(main, ["specs", "--repeat", str(kept)])
    assert again.exit_code == 1
    assert "Error: " in again.output
    assert "not ours" in again.output
    (kept / "file").write_bytes(b"")
    assert CliRunner().invoke(main, ["specs", "--repeat", str(kept)]).exit_code == 0


def test_a_repeated_file_gives_the_same_result(tmp_path: Path) -> None:
    """Modules that a reader imports do not count as memory, as in a search."""
    (tmp_path / "specs.json").write_text('{"x": {"shape": [2]}}')
    command = [sys.executable, "-m", "fuzz", "specs", "--repeat", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("in_process")
def test_a_target_is_a_small_entry() -> None:
    """A target for TOML files needs a seed, a mutation and a reader."""

    def read(folder: Path, out: Path) -> None:
        try:
            tomllib.loads((folder / "jobs.toml").read_bytes().decode())
        except (ValueError, RecursionError) as error:
            raise FormatError("no TOML") from error

    text = b'[defaults]\nopset = 18\n\n[[job]]\nmodel = "a"\nout = "a.onnx"\n'
    seed = Seed(Files({"jobs.toml": text}), "jobs.toml")
    outcome = search(
        Target("jobs", lambda: [seed], (mutate_toml.mutate,), {"jobs": read}), 50, start=0
    )
    assert not outcome.flaws
    assert 5 < outcome.accepted < 50
