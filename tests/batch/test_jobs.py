"""Lists of jobs: what they may say, and one clear line for what they may not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modelexport.batch.jobs import as_bytes, given_jobs, read_jobs
from modelexport.batch.results import JobResult, ResultsFile, job_digest
from modelexport.batch.run import choose_workers, make_executor
from modelexport.cli.main import main
from modelexport.errors import (
    ArgumentError,
    FileError,
    FormatError,
    MissingPackageError,
    ModelExportError,
)

pytestmark = pytest.mark.sanity

TOML = """
output_dir = "out"
[defaults]
strategy = "htp"
memory = "1 GiB"
[[jobs]]
model = "a"
output = "sub/a.onnx"
input_shape = [2, 64]
dynamic_axes = {input_ids = {0 = "batch"}}
[[jobs]]
name = "b"
model = "package.module:make"
strategy = "fx"
torch_nn = ["Linear"]
timeout = 5
"""


def test_a_file_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(TOML)
    batch = read_jobs(path)
    first, second = batch.jobs
    assert (first.name, first.strategy, first.memory_bytes) == ("sub/a", "htp", 1 << 30)
    assert first.input_shapes == {"": (2, 64)}
    assert first.dynamic_axes == {"input_ids": {0: "batch"}}
    assert first.output == str(tmp_path / "out" / "sub" / "a.onnx")
    assert (second.strategy, second.torch_nn_exceptions, second.timeout) == ("fx", ("Linear",), 5)
    assert second.output == str(tmp_path / "out" / "b.onnx")
    assert batch.folder == tmp_path


def test_the_command_line_goes_before_the_defaults_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(TOML)
    first, second = read_jobs(path, tmp_path / "elsewhere", {"timeout": 60, "memory": "2 GiB"}).jobs
    assert (first.timeout, first.memory_bytes) == (60, 2 << 30)
    assert second.timeout == 5
    assert first.output == str(tmp_path / "elsewhere" / "sub" / "a.onnx")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "not a list of jobs"),
        ('{"jobs": []}', "has no jobs"),
        ('{"jobs": [{"model": "a"}]}', "job 1 has neither a name nor an output"),
        ('{"jobs": [{"output": "a.onnx"}]}', "job 1: model is missing"),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "stratgy": "fx"}]}',
            "no option 'stratgy' .did you mean strategy",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "dynamic": 3}]}',
            "job 1: dynamic must be True or False, got 3",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "timeout": 0}]}',
            "timeout must be a positive number of seconds, got 0",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "memory": "much"}]}',
            "memory must be a size, got 'much'",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "input-shape": [1]}]}',
            "did you mean input_shape",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.txt"}]}',
            "job 1: the output 'a.txt' does not end in .onnx",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "strategy": "fxx"}]}',
            "job 1: there is no strategy 'fxx'",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "max_depth": "x"}]}',
            "job 1: max_depth must be a whole number, got 'x'",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "timeout": "long"}]}',
            "job 1: timeout must be a number, got 'long'",
        ),
        ('{"jobs": [{"model": "a.py:f", "output": "a.onnx"}]}', "job 1: there is no file a.py"),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "timeout": 1e300}]}',
            "positive number of seconds",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "memory": "99999999999 TiB"}]}',
            "memory must be positive and below 4 EiB",
        ),
        (
            f'{{"jobs": [{{"model": "a", "output": "a", "strategy": {"[" * 600}{"]" * 600}}}]}}',
            "strategy must be a string",
        ),
        (
            f'{{"jobs": [{{"model": "a", "output": "a.onnx", "memory": "{"9" * 310}"}}]}}',
            "memory must be a size",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx", "scrub": true, "fx_graph": "a.txt"}]}',
            "scrubbing leaves out",
        ),
        (
            '{"jobs": [{"model": "a", "name": "x"}, {"model": "b", "name": "x"}]}',
            "two jobs have the name x",
        ),
        (
            '{"jobs": [{"model": "a", "output": "x.onnx", "name": "1"},'
            ' {"model": "b", "output": "sub/../x.onnx"}]}',
            "two jobs have the output",
        ),
        (
            '{"jobs": [{"model": "a", "output": "x.onnx"}, {"model": "b", "output": "x.onnx"}]}',
            "two jobs have the output",
        ),
        (
            '{"jobs": [{"model": "a", "output": "a.onnx"}], "defaults": {"output": "b.onnx"}}',
            "output is for one job",
        ),
        ('{"jobs": [{"model": "a", "output": "a.onnx"}], "default": {}}', "`default`"),
        (
            '{"jobs": [{"model": "a", "name": "b"}], "defaults": {"memroy": 1}}',
            "defaults: there is no .*'memroy'",
        ),
        (
            '{"jobs": [{"model": "a", "name": "b"}], "defaults": {"dynamic": 3}}',
            "json, defaults: dynamic must be True or False, got 3",
        ),
        (
            '{"jobs": [{"model": "a", "name": "b"}], "defaults": {"timeout": 0}}',
            "json, defaults: timeout must be .*, got 0",
        ),
        (
            '{"jobs": [{"model": "a", "name": "../../b"}]}',
            "no file can have the name .*an output of its own",
        ),
        ('{"jobs": 3}', "not a list of jobs"),
        ("[" * 100_000, "is not JSON"),
        ('{"jobs": [{"model": "\xff"}]}', "is not JSON"),
    ],
)
def test_bad_lists_of_jobs(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(FormatError, match=says) as caught:
        read_jobs(path)
    assert caught.value.hint
    shown = CliRunner().invoke(main, ["batch", str(path)])
    assert shown.exit_code == 2
    assert len(shown.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", ["a", "x = " + "9" * 5000, "\xff = 1", '[[jobs]]\nmodel = "\\ud800"']
)
def test_bad_toml(content: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(FormatError, match="is not TOML"):
        read_jobs(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.toml"],
        ["jobs.yaml"],
        ["jobs.toml", "--workers", "0"],
        ["jobs.toml", "--memory", "lots"],
        ["jobs.toml", "--memory", "0"],
        ["jobs.toml", "--timeout", "0"],
        ["jobs.toml", "--ray-address", "auto"],
        ["jobs.toml", "--executor", "slurm"],
    ],
)
def test_bad_command_lines(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.toml").write_text('[[jobs]]\nmodel = "some/model"\nname = "a"\n')
    Path("jobs.yaml").write_text("jobs: []")
    shown = CliRunner().invoke(main, ["batch", *arguments])
    assert shown.exit_code == 2, shown.output
    assert "Traceback" not in shown.stderr
    assert "job 1" not in shown.stderr


@pytest.mark.parametrize(
    ("told", "size"),
    [
        (5, 5),
        ("512", 512),
        ("4 GiB", 4 << 30),
        ("1.5g", 3 << 29),
        ("10 MB", 10 << 20),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(told: int | str, size: int) -> None:
    assert as_bytes(told) == size


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'modelexport\[ray\]'"):
        make_executor("ray", tmp_path, 1, None)


def test_jobs_given_as_what_they_are_not() -> None:
    wrong: Any = [3]
    with pytest.raises(ModelExportError, match="job 1 is an int"):
        given_jobs(wrong)


def test_names_that_are_no_text() -> None:
    with pytest.raises(FormatError, match="not valid in a file name"):
        given_jobs([{"model": "a", "name": "\udcff"}])


def test_every_option_counts_in_the_digest_of_a_job(tmp_path: Path) -> None:
    plain = {"model": "some/model", "output": "m.onnx"}
    others: list[dict[str, Any]] = [
        {},
        {"dynamic_axes": {"input_ids": {0: "batch"}}},
        {"dynamic_axes": {"input_ids": {1: "batch"}}},
        {"input_shape": [2, 3]},
        {"input_shape": {"x": [2, 3]}},
        {"torch_nn": ["Linear"]},
        {"scrub": True},
        {"opset_version": 18},
    ]
    jobs = [given_jobs([{**plain, **other}], tmp_path).jobs[0] for other in others]
    assert len({job_digest(job, tmp_path) for job in jobs}) == len(jobs)
    same = given_jobs([{**plain, "timeout": 5, "memory": "1 GiB", "name": "other"}], tmp_path).jobs[
        0
    ]
    assert job_digest(same, tmp_path) == job_digest(jobs[0], tmp_path)


def test_a_model_in_the_folder_of_its_outputs(tmp_path: Path) -> None:
    job = given_jobs([{"model": str(tmp_path), "output": "m.onnx"}], tmp_path).jobs[0]
    (tmp_path / "config.json").write_text("{}")
    before = job_digest(job, tmp_path)
    (tmp_path / "m.onnx").write_text("an output")
    (tmp_path / "jobs_results.jsonl").write_text("results")
    assert job_digest(job, tmp_path) == before
    (tmp_path / "config.json").write_text("[]")
    assert job_digest(job, tmp_path) != before


def test_the_results_file_is_no_way_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    file = ResultsFile(tmp_path / "results.jsonl")
    file.path.symlink_to(tmp_path / "precious")
    file.start([])
    assert (tmp_path / "precious").read_text() == "kept"
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(FileError, match="not a regular file"):
        file.start([])


def test_workers() -> None:
    assert choose_workers(3, 2) == 2
    assert choose_workers(3, 10) == 3
    assert 1 <= choose_workers(None, 100) <= 8
    with pytest.raises(ArgumentError, match="got 0"):
        choose_workers(0, 1)


def test_lines_that_are_no_results_are_passed_over(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    assert file.read() == {}
    file.start([JobResult(name="a", status="done", output="a.onnx")])
    with file.path.open("ab") as out:
        out.write(b'[]\n{"name": 3}\n' + b"[" * 5000 + b"\n\xff\n")
    file.add(JobResult(name="b", status="failed", output="b.onnx"))
    file.path.write_bytes(file.path.read_bytes() + json.dumps({"name": "c"}).encode()[:-3])
    assert {name: result.status for name, result in file.read().items()} == {
        "a": "done",
        "b": "failed",
    }
