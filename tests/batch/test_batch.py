"""A batch: a failure leaves other jobs alone, resuming skips what is done, each end is reported."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

import modelexport
from batch.batches import (
    BAD_JOBS,
    DEADLINE,
    DEFAULTS,
    STATUS,
    bad_jobs,
    command,
    good_job,
    processes_in,
    results,
    run,
    wait_for_end,
    wait_until,
    write_jobs,
)
from modelexport.batch.jobs import read_jobs
from modelexport.batch.supervisor import run_job
from modelexport.onnx_file.atomic_write import recover_killed_runs

pytestmark = pytest.mark.integration

GOOD_JOBS = [good_job("a"), good_job("b", "wide"), good_job("c", "chatty"), good_job("d")]


@pytest.mark.must
@pytest.mark.parametrize("executor", ["process", "ray"])
def test_eight_jobs_of_which_four_fail(executor: str, tmp_path: Path) -> None:
    jobs = [*GOOD_JOBS[:1], *bad_jobs()[:2], *GOOD_JOBS[1:3], *bad_jobs()[2:], *GOOD_JOBS[3:]]
    path = write_jobs(tmp_path, jobs)
    options = ("--executor", executor, "--workers", 2)
    first = run(path, *options)
    assert first.returncode == 3, first.stderr
    ended = results(first)
    assert len(ended) == 8
    for job in GOOD_JOBS:
        result = ended[job["name"]]
        assert result["status"] == "done", result
        assert result["coverage"] == 1.0
        assert modelexport.validate(result["output"], check_consistency=True).valid
    for name in BAD_JOBS:
        result = ended[name]
        assert result["status"] == STATUS[name], result
        assert result["message"]
        assert result["hint"]
        assert f"{name}: {STATUS[name]}, {result['message']}" in first.stderr
        assert "Traceback" not in first.stderr
    assert "the weights are of another model" in ended["error"]["message"]
    assert "8 s" in ended["hang"]["message"]
    assert "SIGABRT" in ended["crash"]["message"]
    assert "2 GiB" in ended["hungry"]["message"]
    written = {name for result in ended.values() for name in result.get("files", ())}
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == written | {
        "jobs_results.jsonl"
    }
    wait_for_end(tmp_path)

    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written}
    again = results(run(path, *options, "--resume"))
    assert {name for name, result in again.items() if result["status"] != "skipped"} == set(
        BAD_JOBS
    )
    assert {name: result["status"] for name, result in again.items() if name in BAD_JOBS} == STATUS
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == times


def test_resuming_runs_changed_jobs_again(tmp_path: Path) -> None:
    jobs = [good_job(name) for name in ("kept", "damaged", "lost", "other options", "other inputs")]
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
        "other options": "done",
        "other inputs": "done",
    }
    (tmp_path / "good.py").write_text((tmp_path / "good.py").read_text() + "\n# another version\n")
    assert {result["status"] for result in results(run(path, "--resume")).values()} == {"done"}


def test_resuming_after_a_killed_batch(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [good_job("a"), good_job("b")])
    assert run(path).returncode == 0
    lines = tmp_path / "out" / "jobs_results.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])  # killed while it wrote its last line
    ended = results(run(path, "--resume"))
    assert sorted(result["status"] for result in ended.values()) == ["done", "skipped"]


def _started(path: Path, folder: Path, *options: object) -> subprocess.Popen[str]:
    """Start a batch, and wait until its good job is done and its other job runs."""
    process = subprocess.Popen(
        command(path, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines = folder / "out" / "jobs_results.jsonl"
    wait_until(lambda: lines.exists() and b"quick" in lines.read_bytes(), process)
    wait_until(lambda: bool(processes_in(folder)), process)
    return process


@pytest.mark.must
def test_ctrl_c_stops_cleanly_and_prints_how_to_resume(tmp_path: Path) -> None:
    hanging = {"name": "hang", "model": "bad.py:hang", "timeout": 600}
    path = write_jobs(tmp_path, [good_job("quick"), hanging])
    process = _started(path, tmp_path)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert "stopped: 1 job ended, 1 to do" in stderr
    assert f"modelexport batch {path} --resume" in stderr
    assert "Traceback" not in stderr
    wait_for_end(tmp_path)
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
    wait_for_end(tmp_path)
    wait_until(lambda: _is_recovered(tmp_path / "out"))


def _is_recovered(folder: Path) -> bool:
    """Settle dead runs as the next run in the folder does; return whether none is left."""
    recover_killed_runs(folder)
    return not list(folder.glob(".*"))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_processes_of_ray_jobs_end_with_the_batch(end: signal.Signals, tmp_path: Path) -> None:
    jobs = [good_job("quick"), {"name": "parent", "model": "bad.py:parent", "timeout": 600}]
    process = _started(write_jobs(tmp_path, jobs), tmp_path, "--executor", "ray", "--workers", 1)
    wait_until(lambda: len(processes_in(tmp_path)) >= 2, process)
    process.send_signal(end)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == (130 if end == signal.SIGINT else -end)
    wait_for_end(tmp_path)


def test_a_batch_that_cannot_start_keeps_the_results(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, [good_job("a")])
    lines = tmp_path / "out" / "jobs_results.jsonl"
    lines.parent.mkdir()
    lines.write_text('{"name": "a"}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert run(path, "--ray-address", nobody).returncode == 2
    shown = run(path, "--executor", "ray", "--ray-address", nobody)
    assert shown.returncode == 2
    # refused at once, not after Ray's own timeout
    refused = f"[Errno {errno.ECONNREFUSED}]"
    assert shown.stderr.startswith(f"Error: cannot reach the Ray cluster at {nobody}: {refused}")
    assert "RAY_AUTH_MODE=token" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert lines.read_text() == '{"name": "a"}\n'


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_waiting_for_a_cluster_that_does_not_answer_can_be_stopped(
    end: signal.Signals, code: int, tmp_path: Path
) -> None:
    path = write_jobs(tmp_path, [good_job("a")])
    # on all interfaces: Ray replaces the loopback address by that of the machine
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(command(path, "--executor", "ray", "--ray-address", address))
        silent.settimeout(DEADLINE)
        silent.accept()[0].close()  # the probe whether anybody listens
        connection, _ = silent.accept()  # Ray, which gets no answer
        assert process.poll() is None
        process.send_signal(end)
        assert process.wait(timeout=DEADLINE) == code
        connection.close()


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jobs(tmp_path, [good_job("unused")])
    monkeypatch.chdir(tmp_path)
    reported: list[modelexport.JobResult] = []
    ended = modelexport.export_batch(
        [
            {"model": "good.py:small", "output": "deep/er/a.onnx", "with_report": True},
            {"model": "bad.py:error", "output": "b.onnx"},
        ],
        defaults=DEFAULTS,
        output_dir="results",
        on_result=reported.append,
    )
    assert [result.name for result in ended] == ["deep/er/a", "b"]
    assert [result.status for result in ended] == ["done", "failed"]
    assert sorted(reported, key=lambda result: result.status) == ended
    assert sorted(ended[0].files) == ["a.onnx", "a_hierarchy.json", "a_report.md"]
    assert (tmp_path / "results" / "deep" / "er" / "a.onnx").is_file()
    assert ended[1].exit_code == 2
    assert len((tmp_path / "results" / "jobs_results.jsonl").read_text().splitlines()) == 2


def test_a_job_may_print_and_leave_processes_running(tmp_path: Path) -> None:
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
    ended = results(run(write_jobs(tmp_path, jobs)))
    assert ended["ends"]["status"] == "done"
    assert ended["fails"]["status"] == "crashed"
    assert "exit code 7" in ended["fails"]["message"]
    assert "loud and clear" in ended["fails"]["log"]
    wait_for_end(tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (
            "for fd in range(3, 64):\n"
            "        try: os.write(fd, b'garbage\\n')\n"
            "        except OSError: pass",
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


def test_files_beside_the_list_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "types.py").write_text("raise SystemExit('the wrong one')")
    assert run(write_jobs(tmp_path, [good_job("a")])).returncode == 0


def test_a_batch_goes_on_when_stdout_is_closed(tmp_path: Path) -> None:
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


def test_the_summary_has_80_columns(tmp_path: Path) -> None:
    jobs = [good_job("a\x1b[31mb"), {"name": "error", "model": "bad.py:error"}]
    shown = run(write_jobs(tmp_path, jobs), "--output-format", "text")
    assert shown.returncode == 3
    assert "1 of 2 jobs done, 1 failed" in shown.stdout
    lines = (line for line in shown.stdout.splitlines() if str(tmp_path) not in line)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "--resume" in shown.stderr


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    shown = run(write_jobs(tmp_path, [good_job("a")]))
    assert shown.returncode == 0
    assert shown.stdout == (tmp_path / "out" / "jobs_results.jsonl").read_text()
    record = json.loads(shown.stdout)
    assert os.path.isabs(record["output"])
    assert record["peak_memory"] > 1 << 20
