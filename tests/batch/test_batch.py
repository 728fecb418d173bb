"""Many exports: none takes another down, what is done is not done again, and every end is told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

import modelexport
from batch.batches import (
    BAD_JOBS,
    DEFAULTS,
    STATUS,
    bad_jobs,
    command,
    gone,
    good_job,
    processes_in,
    results,
    run,
    write_jobs,
)
from modelexport.batch.jobs import read_jobs
from modelexport.batch.supervisor import run_job
from modelexport.onnx_file.atomic_write import settle_dead_runs

pytestmark = pytest.mark.integration

GOOD_JOBS = [
    good_job(f"job{number}", ("small", "wide", "chatty")[number % 3]) for number in range(36)
]


@pytest.mark.must
@pytest.mark.parametrize("executor", ["process", "ray"])
def test_forty_jobs_of_which_four_are_bad(executor: str, tmp_path: Path) -> None:
    jobs = [*GOOD_JOBS[:10], *bad_jobs()[:2], *GOOD_JOBS[10:30], *bad_jobs()[2:], *GOOD_JOBS[30:]]
    path = write_jobs(tmp_path, jobs)
    options = ("--executor", executor, "--workers", 2)
    first = run(path, *options)
    assert first.returncode == 3, first.stderr
    found = results(first)
    assert len(found) == 40
    for job in GOOD_JOBS:
        result = found[job["name"]]
        assert result["status"] == "done", result
        assert result["coverage"] == 1.0
        assert modelexport.validate(result["output"], check_consistency=True).valid
    for name in BAD_JOBS:
        result = found[name]
        assert result["status"] == STATUS[name], result
        assert result["message"]
        assert result["hint"]
        assert f"{name}: {STATUS[name]}, {result['message']}" in first.stderr
        assert "Traceback" not in first.stderr
    assert "the weights are of another model" in found["error"]["message"]
    assert "15 s" in found["hang"]["message"]
    assert "SIGABRT" in found["crash"]["message"]
    assert "2 GiB" in found["hungry"]["message"]
    written = {name for result in found.values() for name in result.get("files", ())}
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == written | {
        "jobs_results.jsonl"
    }
    assert gone(tmp_path)

    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written}
    again = results(run(path, *options, "--resume"))
    assert {name for name, result in again.items() if result["status"] != "skipped"} == set(
        BAD_JOBS
    )
    assert {name: result["status"] for name, result in again.items() if name in BAD_JOBS} == STATUS
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == times


def test_what_has_changed_is_done_again(tmp_path: Path) -> None:
    jobs = [
        good_job(name) for name in ("kept", "damaged", "lost", "told otherwise", "other inputs")
    ]
    jobs[4]["input_specs"] = "inputs.json"
    specs = tmp_path / "inputs.json"
    specs.write_text('{"input": {"shape": [2, 4]}}')
    path = write_jobs(tmp_path, jobs)
    assert run(path).returncode == 0
    out = tmp_path / "out"
    with (out / "damaged.onnx").open("r+b") as file:
        file.seek(40)
        file.write(b"\0")
    (out / "lost_hierarchy.json").unlink()
    jobs[3]["max_depth"] = 1
    specs.write_text('{"input": {"shape": [3, 4]}}')
    write_jobs(tmp_path, jobs)
    again = run(path, "--resume")
    assert again.returncode == 0
    assert {name: result["status"] for name, result in results(again).items()} == {
        "kept": "skipped",
        "damaged": "done",
        "lost": "done",
        "told otherwise": "done",
        "other inputs": "done",
    }
    (tmp_path / "good.py").write_text((tmp_path / "good.py").read_text() + "\n# another version\n")
    assert {result["status"] for result in results(run(path, "--resume")).values()} == {"done"}


def test_a_batch_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [good_job("a"), good_job("b")])
    assert run(path).returncode == 0
    lines = tmp_path / "out" / "jobs_results.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])  # killed while it wrote its last line
    found = results(run(path, "--resume"))
    assert sorted(result["status"] for result in found.values()) == ["done", "skipped"]


def _started(path: Path, folder: Path, *options: object) -> subprocess.Popen[str]:
    """A batch whose good job is done and whose other job hangs."""
    process = subprocess.Popen(
        command(path, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    lines = folder / "out" / "jobs_results.jsonl"
    while not (lines.exists() and b"quick" in lines.read_bytes()):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    while not processes_in(folder):
        time.sleep(0.1)
    return process


@pytest.mark.must
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    hanging = {"name": "hang", "model": "bad.py:hang", "timeout": 600}
    path = write_jobs(tmp_path, [good_job("quick"), hanging])
    process = _started(path, tmp_path)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped: 1 job ended, 1 to do" in stderr
    assert f"modelexport batch {path} --resume" in stderr
    assert "Traceback" not in stderr
    assert gone(tmp_path)
    assert not [entry for entry in (tmp_path / "out").iterdir() if entry.name.startswith(".")]
    hanging["model"] = "good.py:small"
    write_jobs(tmp_path, [good_job("quick"), hanging])
    again = run(path, "--resume")
    assert {name: result["status"] for name, result in results(again).items()} == {
        "quick": "skipped",
        "hang": "done",
    }


@pytest.mark.parametrize("bad", ["hang", "stopped", "busy"])
def test_jobs_end_with_a_batch_that_is_killed(bad: str, tmp_path: Path) -> None:
    path = write_jobs(
        tmp_path, [good_job("quick"), {"name": bad, "model": f"bad.py:{bad}", "timeout": 600}]
    )
    process = _started(path, tmp_path)
    process.kill()
    process.communicate()
    assert gone(tmp_path)
    settle_dead_runs(tmp_path / "out")  # as the next run in the folder does
    assert not [entry for entry in (tmp_path / "out").iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_what_jobs_on_ray_have_started_ends_with_them(end: signal.Signals, tmp_path: Path) -> None:
    jobs = [good_job("quick"), {"name": "parent", "model": "bad.py:parent", "timeout": 600}]
    process = _started(write_jobs(tmp_path, jobs), tmp_path, "--executor", "ray", "--workers", 1)
    while len(processes_in(tmp_path)) < 2:
        time.sleep(0.1)
    process.send_signal(end)
    process.communicate(timeout=60)
    assert process.returncode == (130 if end == signal.SIGINT else -end)
    assert gone(tmp_path)


def test_a_batch_that_cannot_start_keeps_the_results(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [good_job("a")])
    lines = tmp_path / "out" / "jobs_results.jsonl"
    lines.parent.mkdir()
    lines.write_text('{"name": "a"}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert run(path, "--ray-address", nobody).returncode == 2
    start = time.monotonic()
    shown = run(path, "--executor", "ray", "--ray-address", nobody)
    assert time.monotonic() - start < 30
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"Error: cannot reach the Ray cluster at {nobody}: ")
    assert "RAY_AUTH_MODE=token" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert lines.read_text() == '{"name": "a"}\n'


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_waiting_for_a_cluster_that_does_not_answer_can_be_stopped(
    end: signal.Signals, code: int, tmp_path: Path
) -> None:
    path = write_jobs(tmp_path, [good_job("a")])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(command(path, "--executor", "ray", "--ray-address", address))
        silent.settimeout(120)
        silent.accept()[0].close()
        time.sleep(2)  # the connection only said that somebody is there; Ray is at it now
        assert process.poll() is None
        process.send_signal(end)
        assert process.wait(timeout=20) == code


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jobs(tmp_path, [good_job("unused")])
    monkeypatch.chdir(tmp_path)
    told: list[modelexport.JobResult] = []
    found = modelexport.export_batch(
        [
            {"model": "good.py:small", "output": "deep/er/a.onnx", "with_report": True},
            {"model": "bad.py:error", "output": "b.onnx"},
        ],
        defaults=DEFAULTS,
        output_dir="results",
        on_result=told.append,
    )
    assert [result.name for result in found] == ["deep/er/a", "b"]
    assert [result.status for result in found] == ["done", "failed"]
    assert sorted(told, key=lambda result: result.status) == found
    assert sorted(found[0].files) == ["a.onnx", "a_hierarchy.json", "a_report.md"]
    assert (tmp_path / "results" / "deep" / "er" / "a.onnx").is_file()
    assert found[1].exit_code == 2
    assert len((tmp_path / "results" / "jobs_results.jsonl").read_text().splitlines()) == 2


def test_what_a_job_prints_and_leaves_running(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import os, subprocess, sys, threading, time\n"
        "from good import small\n"
        "def make():\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    os.write(1, b'{\"result\": null}\\n')\n"
        "    print('loud and clear', file=sys.stderr)\n"
        "    return small()\n"
        "def fail():\n"
        "    make()\n"
        "    os._exit(7)\n"
    )
    jobs = [{"name": "ends", "model": "loud.py:make"}, {"name": "fails", "model": "loud.py:fail"}]
    found = results(run(write_jobs(tmp_path, jobs)))
    assert found["ends"]["status"] == "done"
    assert found["fails"]["status"] == "crashed"
    assert "exit code 7" in found["fails"]["message"]
    assert "loud and clear" in found["fails"]["log"]
    assert gone(tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (
            "for fd in range(3, 64):\n        try: os.write(fd, b'garbage\\n')\n        except OSError: pass",
            "done",
            "",
        ),
        ("sys.exit(5)", "failed", "SystemExit"),
        ("raise KeyboardInterrupt", "failed", "odd.py:make raised KeyboardInterrupt"),
        ("raise ValueError('bad \\ud800' + 'x' * 10**6)", "failed", "ValueError"),
        (
            "class Mute(Exception):\n        def __str__(self): raise TypeError\n    raise Mute",
            "failed",
            "TypeError",
        ),
        ("import shutil; shutil.rmtree(os.getcwd())", "done", ""),
    ],
    ids=["writes anywhere", "exits", "interrupts", "unsendable", "mute", "removes its folder"],
)
def test_a_job_that_misbehaves_has_a_result(
    code: str, status: str, says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "list"
    folder.mkdir()
    write_jobs(folder, [good_job("unused")])
    (folder / "odd.py").write_text(
        f"import os, sys\nfrom good import small\ndef make():\n    {code}\n    return small()\n"
    )
    batch = read_jobs(
        write_jobs(folder, [{"name": "odd", "model": "odd.py:make"}]), tmp_path / "out"
    )
    result = run_job(batch.jobs[0], batch.folder, share=2)
    assert result.status == status
    assert says in result.message
    assert len(result.message) < 5000
    assert "KeyboardInterrupt" not in "".join(result.details)


def test_files_beside_the_list_are_not_taken_for_modules(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "types.py").write_text("raise SystemExit('the wrong one')")
    assert run(write_jobs(tmp_path, [good_job("a")])).returncode == 0


def test_a_batch_goes_on_when_nobody_reads_its_lines(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [good_job("a"), good_job("b"), good_job("c")])
    line = f"{shlex.join(command(path, '--workers', 1))} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[3/3] c: done" in done.stderr
    assert "no more results on stdout" in done.stderr


def test_a_name_with_markup_on_a_terminal(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [{**good_job("v[/2]"), "output": "v.onnx"}, good_job("[bold]x")])
    shown = subprocess.run(
        ["script", "-qec", shlex.join(command(path)), "/dev/null"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert shown.returncode == 0, shown.stdout
    assert "v[/2]: done" in shown.stdout
    assert "[bold]x: done" in shown.stdout


def test_people_see_a_table_of_80_columns(tmp_path: Path) -> None:
    jobs = [good_job("a\x1b[31mb"), {"name": "error", "model": "bad.py:error"}]
    shown = run(write_jobs(tmp_path, jobs), "--output-format", "text")
    assert shown.returncode == 3
    assert "1 of 2 jobs done, 1 failed" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "--resume" in shown.stderr


def test_results_are_lines_for_programs(tmp_path: Path) -> None:
    shown = run(write_jobs(tmp_path, [good_job("a")]))
    assert shown.returncode == 0
    assert shown.stdout == (tmp_path / "out" / "jobs_results.jsonl").read_text()
    record = json.loads(shown.stdout)
    assert os.path.isabs(record["output"])
    assert record["peak_memory"] > 1 << 20
