"""Latency by module: every kernel has a module, times add up, and a slow module comes first."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import modelexport
from architectures import ARCHITECTURES
from damage import net
from exports import cases, export
from modelexport.cli.main import main
from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.profiling.kernel_times import (
    KernelTimes,
    Measurement,
    NodeTime,
    measure_directly,
    read_profile,
)
from modelexport.profiling.profile import OPTIMIZATIONS, module_times
from modelexport.verification.feeds import make_feeds, read_arrays
from modelexport.verification.runtime import SessionSettings
from retag.tools import apply
from zoo import distinct


class Slow(nn.Module):
    """A layer that multiplies matrices many times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(self.fc(x))
        return x


class Unbalanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.slow = Slow()
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.slow(torch.relu(self.first(x))))


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("profile") / "m.onnx"
    modelexport.export_model(
        Unbalanced().eval(), torch.rand(64, 256), path, strategy="htp", flops=True
    )
    return path


def check_sums(result: modelexport.Profile) -> None:
    """Check that the times of modules add up to the kernel time, and that to the total."""
    own = sum(module.own_ms for module in result.modules)
    root = next(module for module in result.modules if not module.path)
    assert own == pytest.approx(result.kernel_ms * result.joined, rel=1e-6)
    assert root.inclusive_ms == pytest.approx(own, rel=1e-6)
    assert result.kernel_ms + result.overhead_ms == pytest.approx(result.total_ms)
    assert 0 <= result.waiting_ms <= result.overhead_ms + 1e-9
    assert result.low_ms <= result.total_ms
    assert all(m.low_ms <= m.inclusive_ms <= m.high_ms for m in result.modules)
    assert all(module.own_ms <= module.inclusive_ms + 1e-9 for module in result.modules)
    assert all(0 <= module.shared_ms <= module.inclusive_ms + 1e-9 for module in result.modules)


@pytest.mark.parametrize(("name", "strategy"), cases(*ARCHITECTURES))
def test_every_kernel_belongs_to_a_module(name: str, strategy: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    for optimization in OPTIMIZATIONS:
        result = modelexport.profile(path, optimization=optimization, runs=2, warmup=1)
        assert result.saved
        assert result.joined == 1.0
        assert result.kernel_ms > 0
        check_sums(result)


def test_a_slow_module_comes_first(unbalanced: Path) -> None:
    for optimization in OPTIMIZATIONS:
        # the median of many runs: a busy machine disturbs some of them
        result = modelexport.profile(unbalanced, optimization=optimization, runs=31, threads=1)
        times = {module.path: module.inclusive_ms for module in result.modules}
        children = {path: time for path, time in times.items() if path and "." not in path}
        assert max(children, key=lambda path: children[path]) == "slow"
        assert result.speed_ratio is not None
    assert {module.path: module.calls for module in result.modules}["slow.fc"] == 8


def test_operations_are_those_that_torch_counts(unbalanced: Path) -> None:
    records = modelexport.load(unbalanced).modules
    linear = 2 * 64 * 256 * 256
    assert records["first"].flops == linear
    assert records["slow"].flops == records["slow.fc"].flops == 8 * linear
    assert records[""].flops == 9 * linear + 2 * 64 * 256 * 4
    facts = {module.module: module for module in modelexport.analyze(unbalanced).modules}
    assert facts["slow"].flops == 8 * linear
    result = modelexport.profile(unbalanced, runs=2)
    slow = next(module for module in result.modules if module.path == "slow")
    assert slow.flops == 8 * linear
    assert slow.gflops_per_second is not None
    inputs = {name: np.zeros(shape, np.float32) for name, shape in result.input_shapes.items()}
    again = modelexport.profile(unbalanced, runs=1, inputs=inputs)
    assert again.modules[0].flops == result.modules[0].flops
    assert slow.gflops_per_second == pytest.approx(slow.flops / slow.inclusive_ms / 1e6)


def test_without_the_option_nothing_is_counted(tmp_path: Path) -> None:
    model, inputs = net()
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    assert "flops" not in (tmp_path / "m_hierarchy.json").read_text()


def test_counting_leaves_the_bytes_of_the_baseline(tmp_path: Path) -> None:
    model, inputs = net()
    for name, flops in (("plain", False), ("counted", True)):
        path = tmp_path / f"{name}.onnx"
        modelexport.export_model(model, inputs, path, strategy="htp", flops=flops)
        modelexport.strip(path, tmp_path / f"{name}-base.onnx")
    first, second = ((tmp_path / f"{name}-base.onnx").read_bytes() for name in ("plain", "counted"))
    assert first == second


def test_a_saved_program_has_no_operations(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    with pytest.raises(ArgumentError, match="flops needs the model"):
        modelexport.export_model(program, None, tmp_path / "m.onnx", flops=True)


def test_a_conditional_does_not_count_its_subgraph_twice(tmp_path: Path) -> None:
    path, _, _ = export("conditional_bodies", "fx", tmp_path)
    result = modelexport.profile(path, optimization="off", runs=3)
    assert result.joined == 1.0
    check_sums(result)
    assert result.kernel_ms <= result.high_ms


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_model_whose_values_tell_nothing(strategy: str, tmp_path: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.max()

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    path = tmp_path / "m.onnx"
    modelexport.export_model(Largest(), torch.arange(12).reshape(3, 4), path, strategy=strategy)
    assert modelexport.profile(path, runs=2).joined == 1.0
    modelexport.export_model(Mean(), torch.rand(3, 4), path, strategy=strategy)
    assert modelexport.profile(path, runs=2).joined == 1.0
    modelexport.quantize(path, tmp_path / "half.onnx", to="float16")


def test_times_of_nested_nodes_and_runs() -> None:
    events = [
        {"cat": "Session", "name": "model_run", "ts": start, "dur": 90} for start in (0, 100, 200)
    ]
    events += [
        {"cat": "Node", "name": "7_kernel_time", "ts": ts, "dur": 5, "args": {"op_name": "Add"}}
        for ts in (10, 110, 120, 210)
    ]
    times = read_profile(events, warmup=1)
    assert times.run_ms == (0.09, 0.09)
    assert times.kernels["7"].run_ms == pytest.approx([0.01, 0.005])
    # ONNX Runtime stops recording in the middle of a run.
    events.append({**events[-1], "ts": 300})
    assert read_profile(events, warmup=1).kernels["7"].run_ms == pytest.approx([0.01, 0.005])


def test_a_busy_machine(unbalanced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node waits in each run: no node is slow, and every run is."""
    tag = modelexport.load(unbalanced).tags[0]
    nodes = [
        NodeTime(tag, "MatMul", tuple(1.0 + 20 * (i == j) for j in range(5))) for i in range(5)
    ]
    times = KernelTimes(nodes, (26.0,) * 5, 1.0, True, 1.0)
    monkeypatch.setattr("modelexport.profiling.profile.measure_kernels", lambda *_: times)
    result = modelexport.profile(unbalanced)
    check_sums(result)
    assert (result.kernel_ms, result.total_ms, result.waiting_ms) == (5.0, 26.0, 20.0)
    assert "waited 20.0 ms" in run(str(unbalanced)).stdout
    quiet = KernelTimes(nodes[:1], (1.5,) * 5, 1.0, True, 1.0)
    monkeypatch.setattr("modelexport.profiling.profile.measure_kernels", lambda *_: quiet)
    assert "busy" not in run(str(unbalanced)).stdout


def test_fused_operations_are_named(tmp_path: Path) -> None:
    path, _, _ = export("resnet", "fx", tmp_path)
    result = modelexport.profile(path, runs=1)
    fused = {module.path: module.fused_with for module in result.modules if module.fused_with}
    assert fused
    assert all(path not in others for path, others in fused.items())
    text = run(str(path), "--runs", "1").stdout
    assert "with fused operations of other modules:" in text


def test_a_provider_that_cannot_save_is_joined_by_name(unbalanced: Path) -> None:
    model = modelexport.load(unbalanced)
    feeds = make_feeds(model).values
    measurement = Measurement(SessionSettings("all", threads=1), feeds, 31, 1)
    times = measure_directly(model, measurement, lambda _: None)
    assert not times.saved
    assert times.joined > 0.5
    modules = {module.path: module.inclusive_ms for module in module_times(model.modules, times)}
    assert modules["slow"] > modules["first"]


def test_a_quantized_file_beside_the_original(unbalanced: Path, tmp_path: Path) -> None:
    changed, out = tmp_path / "int8.onnx", tmp_path / "out.onnx"
    assert apply("int8-dynamic", unbalanced, changed, {})
    modelexport.retag(unbalanced, changed, out)
    before, after = (modelexport.profile(path, runs=2) for path in (unbalanced, out))
    compared = modelexport.compare_profiles(before, after)
    slow = next(module for module in compared.modules if module.path == "slow")
    assert slow.before_ms is not None
    assert slow.after_ms is not None
    assert slow.ratio == pytest.approx(slow.after_ms / slow.before_ms)
    assert {module.path for module in compared.modules} == set(modelexport.load(unbalanced).modules)


def test_other_sizes_of_a_dynamic_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    batch = torch.export.Dim("batch")
    modelexport.export_model(
        Unbalanced().eval(),
        (torch.rand(4, 256),),
        path,
        dynamic_shapes=({0: batch},),
        flops=True,
    )
    result = modelexport.profile(path, runs=1, input_shapes={"x": (16, 256)})
    assert result.input_shapes == {"x": (16, 256)}
    assert result.modules[0].flops is None
    with pytest.raises(ArgumentError, match=r"is \[.*,256\], got \[16,5\]"):
        modelexport.profile(path, runs=1, input_shapes={"x": (16, 5)})
    with pytest.raises(ArgumentError, match="no input 'y'"):
        modelexport.profile(path, runs=1, input_shapes={"y": (16, 5)})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile", *arguments], catch_exceptions=False)


def test_the_answer_fits_on_a_screen(unbalanced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(unbalanced.parent)
    result = run("m.onnx", "--runs", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("m.onnx: ")
    assert any(line.startswith("runtime overhead") for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("slowest by own time"))
    table = lines[start + 1 : start + 4]
    own = [float(line.split()[1]) for line in table]
    assert own == sorted(own, reverse=True)
    assert {line.split()[0] for line in table} >= {"slow", "last"}
    assert "gflops" in result.stdout
    assert "run it 5 times" in result.stderr


@pytest.mark.parametrize("output_format", ["json", "csv", "md", "text"])
def test_formats(
    unbalanced: Path, output_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unbalanced.parent)
    out = tmp_path / "out"
    arguments = ("m.onnx", "--runs", "1", "--output-format", output_format, "--module", "slow")
    result = run(*arguments, "--output-file", str(out))
    assert result.exit_code == 0, result.output
    text = out.read_text()
    assert "slow" in text
    assert "first" not in text
    if output_format == "json":
        record = json.loads(text)
        keys = {"total_ms", "kernel_ms", "overhead_ms", "joined", "runs", "modules"}
        assert keys <= set(record)
        wanted = {"path", "tag", "class", "calls", "nodes", "own_ms", "inclusive_ms", "share"}
        assert wanted | {"shared_ms"} <= set(record["modules"][0])
    both = run("m.onnx", "m.onnx", "--runs", "1", "--output-format", output_format, "--top", "2")
    assert both.exit_code == 0, both.output


def test_markdown_leaves_out_what_one_file_lacks(unbalanced: Path, tmp_path: Path) -> None:
    modelexport.extract(unbalanced, "slow", tmp_path / "slow.onnx")
    result = run(
        str(unbalanced), str(tmp_path / "slow.onnx"), "--runs", "1", "--output-format", "md"
    )
    assert result.exit_code == 0, result.output
    rows = [line.strip("|").split("|") for line in result.stdout.splitlines() if "| " in line][1:]
    assert [row[0].strip() for row in rows].count("(root)") == 1
    assert all("(root)" not in cell for row in rows for cell in row[1:])
    assert any(cell.strip() == "" for row in rows for cell in row[2:])


@pytest.mark.regression
def test_no_measured_run_is_an_error() -> None:
    run_event = {"cat": "Session", "name": "model_run", "ts": 0, "dur": 5}
    with pytest.raises(FormatError, match="none of the measured runs"):
        read_profile([run_event], warmup=1)


@pytest.mark.regression
def test_an_input_without_a_declared_shape_takes_any(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(nn.ReLU(), (torch.ones(3),), path)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    (name,) = modelexport.load(path).graph.inputs
    for shape in ((), (2, 5)):
        feeds = make_feeds(modelexport.load(path), shapes={name: shape})
        assert feeds.values[name].shape == shape


@pytest.mark.regression
def test_a_damaged_npz_is_one_error(tmp_path: Path) -> None:
    numpy_file = tmp_path / "x.npz"
    np.savez_compressed(numpy_file, x=np.zeros(4096))
    whole = numpy_file.read_bytes()
    for position in range(40, len(whole), 3):
        numpy_file.write_bytes(
            whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :]
        )
        with suppress(FormatError, FileError):
            read_arrays(numpy_file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("absent.onnx",), "cannot read absent.onnx"),
        (("bare.onnx",), "bare.onnx has no tags"),
        (("m.onnx", "--module", "slwo"), "slow"),
        (("m.onnx", "--provider", "CUDA"), "this ONNX Runtime has no provider 'CUDA'"),
        (("m.onnx", "--runs", "0"), "--runs"),
        (("m.onnx", "--input-shape", "3"), "NAME=2,128"),
        (("m.onnx", "--inputs", "absent.npz"), "absent.npz"),
        (("m.onnx", "--output-file", "m.onnx"), "m.onnx has the name of a model"),
    ],
)
def test_what_people_get_wrong(
    unbalanced: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unbalanced.parent)
    modelexport.strip("m.onnx", "bare.onnx")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""


def test_a_model_that_does_not_run(tmp_path: Path) -> None:
    model, inputs = net()
    path = tmp_path / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="htp")
    (name,) = modelexport.load(path).graph.inputs
    with pytest.raises(ArgumentError, match=r"must be \[2,8\], got \[2,5\]"):
        modelexport.profile(path, inputs={name: np.zeros((2, 5), np.float32)})
    with pytest.raises(FileError, match=r"absent\.npz"):
        modelexport.profile(path, inputs="absent.npz")
    proto = onnx.load(path)
    proto.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(proto, path)
    with pytest.raises(FormatError, match="rejects the model"):
        modelexport.profile(path, runs=1)
