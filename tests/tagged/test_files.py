"""The files that an export writes, and those that it reads again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import modelexport
from modelexport.errors import ArgumentError, ArgumentTypeError, FileError, FormatError
from modelexport.onnx_file.atomic_write import Transaction
from modelexport.tagged.records import read_sidecar
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity
BOTH = pytest.mark.parametrize("strategy", ["fx", "htp"])


def small() -> tuple[nn.Module, object]:
    model, inputs = ZOO["block_three_times"]()
    return distinct(model), inputs


@pytest.mark.regression
@pytest.mark.parametrize("read", [modelexport.load, modelexport.strip])
def test_a_name_with_a_null_character_is_refused(
    read: Callable[..., object], tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match="no file can have the name"):
        read("a\0b.onnx", *[tmp_path / "m.onnx"] * (read is modelexport.strip))
    with pytest.raises(ArgumentError, match="no file can have the name"):
        modelexport.export_model(nn.ReLU(), (torch.ones(1),), f"{tmp_path}/a\0b.onnx")


@pytest.mark.smoke
@BOTH
def test_files_and_their_content(strategy: str, tmp_path: Path) -> None:
    model, inputs = small()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    expected = {"m.onnx", "m_hierarchy.json"} | ({"m.onnx.data"} if strategy == "fx" else set())
    assert {path.name for path in tmp_path.iterdir()} == expected
    sidecar = json.loads(report.sidecar_path.read_text())
    assert sidecar["format"] == "modelexport-hierarchy/1"
    assert list(sidecar) == sorted(sidecar)
    assert str(tmp_path) not in report.sidecar_path.read_text()
    expected = {"format", "model", "export", "modules", "nodes", "tensors", "statistics"}
    assert set(sidecar) == {*expected, "expected_hierarchy"}
    assert sidecar["model"]["onnx"] == "m.onnx"
    proto = onnx.load(report.onnx_path, load_external_data=False)
    assert set(sidecar["nodes"]) == {node.output[0] for node in proto.graph.node}
    names = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    assert set(sidecar["tensors"]) == names | {
        name for node in proto.graph.node for name in node.output
    }
    assert read_sidecar(report.sidecar_path) == report.hierarchy
    embedded = modelexport.load(report.onnx_path).embedded
    assert embedded is not None
    assert embedded.modules == report.hierarchy.modules


@BOTH
def test_tags_name_the_consumers(strategy: str, tmp_path: Path) -> None:
    model, inputs = ZOO["encoder_layer"]()
    report = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    exported = modelexport.load(report.onnx_path)
    for index, (node, tag) in enumerate(exported.items()):
        assert tag is not None
        others = [exported.tags[i] for i in exported.graph.consumers_of(index)]
        consumers = {other.hierarchy_path for other in others if other is not None}
        assert set(tag.hierarchy_tags[1:]) == consumers - {tag.hierarchy_path}
        assert report.hierarchy.tensors[node.key].producer == tag.hierarchy_path


@BOTH
def test_two_exports_give_the_same_files(strategy: str, tmp_path: Path) -> None:
    model, inputs = small()
    contents = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        modelexport.export_model(model, inputs, tmp_path / folder / "m.onnx", strategy=strategy)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert contents[0] == contents[1]


@BOTH
def test_clean_writes_the_baseline_and_only_the_sidecar(strategy: str, tmp_path: Path) -> None:
    model, inputs = small()
    clean = modelexport.export_model(
        model, inputs, tmp_path / "m.onnx", strategy=strategy, clean=True
    )
    baseline, sidecar = clean.onnx_path.read_bytes(), clean.sidecar_path.read_bytes()
    assert not modelexport.load(clean.onnx_path).is_tagged
    tagged = modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy=strategy)
    assert tagged.sidecar_path.read_bytes() == sidecar
    assert modelexport.strip(tagged.onnx_path, tmp_path / "s.onnx").read_bytes() == baseline


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize("opset", [17, 18, 20])
def test_opset_keeps_the_evidence(strategy: str, opset: int, tmp_path: Path) -> None:
    """Below the dynamo exporter's native opset, a conversion drops the nodes' own metadata."""
    from proof import prove

    model, inputs = ZOO["encoder_layer"]()
    prove(distinct(model), inputs, tmp_path, strategy, opset_version=opset)
    exported = modelexport.load(tmp_path / "model.onnx")
    assert exported.sidecar is not None
    assert exported.sidecar.model.opset == opset
    methods = exported.sidecar.statistics.methods
    assert methods["scope"] >= 0.9 * exported.sidecar.statistics.nodes


@pytest.mark.parametrize("strategy", ["fx", "htp"])
@pytest.mark.parametrize("optimize", [True, False])
def test_unoptimised_graphs_are_proven_too(strategy: str, optimize: bool, tmp_path: Path) -> None:
    from proof import prove

    for name in ("conv_batch_norm", "lstm", "split_outputs"):
        model, inputs = ZOO[name]()
        prove(distinct(model), inputs, tmp_path, strategy, optimize=optimize)


@pytest.mark.parametrize("external", [True, False])
def test_external_data_by_hand(external: bool, tmp_path: Path) -> None:
    model, inputs = small()
    report = modelexport.export_model(
        model, inputs, tmp_path / "m.onnx", strategy="fx", external_data=external
    )
    assert bool(report.data_paths) == external
    onnx.checker.check_model(str(report.onnx_path), full_check=True)


def test_a_full_disk_leaves_the_earlier_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = small()
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: object, name: str, pieces: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Transaction, "write", full)
    with pytest.raises(FileError, match="No space left"):
        modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.integration
def test_a_killed_export_leaves_the_earlier_output(tmp_path: Path) -> None:
    model, inputs = small()
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "import modelexport, modelexport.onnx_file.atomic_write as s\n"
        "from zoo import ZOO\n"
        "s.Transaction.commit = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "model, inputs = ZOO['lstm']()\n"
        "modelexport.export_model(model, inputs, sys.argv[1], strategy='htp')\n"
    )
    tests = str(Path(__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.onnx"), tests], capture_output=True
    )
    assert process.returncode == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_output_moves_between_file_systems(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    elsewhere = Path("/dev/shm") / f"modelexport-{os.getpid()}-{time.monotonic_ns()}"
    elsewhere.mkdir()
    try:
        model, inputs = small()
        report = modelexport.export_model(
            model, inputs, tmp_path / "m.onnx", strategy="fx", temp_dir=elsewhere
        )
        assert {path.name for path in tmp_path.iterdir()} == {
            "m.onnx",
            "m.onnx.data",
            "m_hierarchy.json",
        }
        assert list(elsewhere.iterdir()) == []
        onnx.checker.check_model(str(report.onnx_path), full_check=True)
    finally:
        shutil.rmtree(elsewhere)


@pytest.mark.regression
@pytest.mark.parametrize("name", [b"Relu", b"node", b"out", b"in", b"weight", b"own"])
def test_names_that_are_not_utf8_are_one_line(name: bytes, tmp_path: Path) -> None:
    """Protobuf gives their bytes, which no name can be sorted with."""
    nodes = [
        onnx.helper.make_node("Relu", ["in"], ["out"], name="node", domain="own"),
        onnx.helper.make_node("Add", ["out", "weight"], ["sum"]),
    ]
    values = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in ("in", "sum")]
    weight = onnx.helper.make_tensor("weight", 1, [1], [1.0])
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString().replace(name, b"\xff" * len(name)))
    for use in (
        modelexport.load,
        modelexport.analyze,
        modelexport.validate,
        lambda path: modelexport.compare(path, path),
    ):
        with pytest.raises(FormatError, match="has names that are not UTF-8"):
            use(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (b"just some text, no model", "not an ONNX model"),
        (b"\x08\x0a", "not an ONNX model"),
    ],
)
def test_files_that_are_no_models(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    for use in (modelexport.load, lambda p: modelexport.strip(p, tmp_path / "out.onnx")):
        with pytest.raises(FormatError, match=match):
            use(path)
    with pytest.raises(FileError, match="folder"):
        modelexport.load(tmp_path)
    with pytest.raises(FileError, match="cannot read"):
        modelexport.load(tmp_path / "absent.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": "bert"}, TypeError, "not a torch.nn.Module"),
        ({"model": nn.Linear}, TypeError, "not a torch.nn.Module"),
        ({"example_inputs": "text"}, TypeError, "example_inputs is a str"),
        ({"output_path": "absent/m.onnx"}, ValueError, "does not exist"),
        ({"output_path": "m.pt"}, ValueError, "does not end in .onnx"),
        ({"output_path": 3}, TypeError, "output path"),
        ({"strategy": "guess"}, ValueError, "known: auto, fx, htp, usage_based"),
        ({"strategy": "fxx"}, ValueError, "did you mean fx. known: auto, fx"),
        ({"exporter": "abacus"}, ValueError, "known: dynamo, transformers, torchscript"),
        ({"opset_version": 3}, ValueError, "out of range"),
        ({"opset_version": 99}, ValueError, "out of range"),
        ({"opset_version": "18"}, TypeError, "whole number"),
        ({"max_depth": 0}, ValueError, "max_depth"),
        ({"input_names": "x"}, TypeError, "input_names must be a list of names.*, got 'x'"),
        ({"output_names": [1]}, TypeError, r"output_names must be .*, got \[1\]"),
        ({"clean": "no"}, TypeError, "clean must be True or False, got 'no'"),
        ({"fallback": "no"}, TypeError, "fallback must be True or False, got 'no'"),
        ({"optimize": None}, TypeError, "optimize must be True or False, got None"),
        ({"verbose": "no"}, TypeError, "verbose must be True or False, got 'no'"),
        ({"external_data": 1.5}, TypeError, "external_data must be .*, got 1.5"),
        ({"max_depth": "x"}, TypeError, "max_depth must be a whole number, got 'x'"),
        ({"include": 3}, TypeError, "include must be a name or a list of names.*, got 3"),
        ({"strategy": ["fx"]}, TypeError, "strategy must be a string, got "),
        ({"temp_dir": 3}, TypeError, "temp_dir must be a path, got 3"),
        ({"on_step": 3}, TypeError, "on_step must be a function.*, got 3"),
        ({"seed": torch.ones(3)}, TypeError, "seed must be a whole number, got a Tensor"),
        ({"temp_dir": "nowhere"}, ValueError, "does not exist"),
    ],
)
def test_bad_arguments(
    arguments: dict[str, object],
    error: type,
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "model": nn.Linear(2, 2),
        "example_inputs": (torch.ones(1, 2),),
        "output_path": "m.onnx",
        **arguments,
    }
    with pytest.raises(error, match=match) as caught:
        modelexport.export_model(**given)  # type: ignore[arg-type]
    assert isinstance(caught.value, modelexport.ModelExportError)
    assert list(tmp_path.iterdir()) == []


def test_values_of_numpy_and_torch_are_options(tmp_path: Path) -> None:
    model, inputs = small()
    report = modelexport.export_model(
        model,
        inputs,
        tmp_path / "m.onnx",
        strategy=modelexport.ExportStrategy.HTP,
        clean=np.bool_(True),  # type: ignore[typeddict-item]
        with_report=torch.tensor(True),  # type: ignore[typeddict-item]
        opset_version=np.int64(18),  # type: ignore[typeddict-item]
        include={"block": 1}.keys(),  # type: ignore[typeddict-item]
        temp_dir=tmp_path,
    )
    assert report.report_path is not None
    assert report.hierarchy.model.opset == 18
    assert not modelexport.load(report.onnx_path).is_tagged


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": "guess"}, "guess"),
        ({"opset_version": "x"}, "opset_version must be a whole number, got 'x'"),
        ({"opset_version": 3}, "opset 3 is out of range"),
        ({"clean": "no"}, "clean must be True or False"),
        ({"optimize": "no"}, "optimize must be True or False"),
        ({"verbose": "no"}, "verbose must be True or False"),
        ({"input_names": "x"}, "input_names must be a list of names"),
        ({"on_step": 3}, "on_step must be a function"),
    ],
)
def test_an_exporter_object_checks_at_once(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=match):
        modelexport.HierarchyExporter(**options)


def test_an_exporter_object_exports(tmp_path: Path) -> None:
    exporter = modelexport.HierarchyExporter(strategy="htp", torch_nn_exceptions=["Linear"])
    model, inputs = small()
    report = exporter.export(model, inputs, tmp_path / "m.onnx")
    assert report.hierarchy.modules["block.fc"].tag == "/ThreeTimes/Block/Linear"
    assert report["summary"]["success"] is True
    assert json.dumps(report.to_dict())
    assert set(report.timings) >= {"export with torch (torchscript)", "write the files"}


@pytest.mark.regression
@pytest.mark.parametrize("option", ["jit_graph", "fx_graph"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m.onnx", "would overwrite m.onnx"),
        ("./m_hierarchy.json", "would overwrite m_hierarchy.json"),
        ("m.onnx.data", "would overwrite m.onnx.data"),
        ("m_report.md", "would overwrite m_report.md"),
        ("m_hierarchical_graph.graphml", "would overwrite"),
        ("m_hierarchical_graph.onnxdata", "would overwrite"),
        ("link.onnx", "would overwrite m.onnx"),
        ("missing/graph.txt", "does not exist"),
    ],
)
def test_a_graph_file_is_checked_before_the_export(
    option: str, name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "link.onnx").symlink_to(tmp_path / "m.onnx")
    steps: list[str] = []
    with pytest.raises(ArgumentError, match=message):
        modelexport.export_model(
            *small(),
            tmp_path / "m.onnx",
            strategy={"jit_graph": "htp", "fx_graph": "fx"}[option],
            with_report=True,
            with_graphml=True,
            on_step=steps.append,
            **{option: tmp_path / name},
        )
    assert steps == []
    assert [path.name for path in tmp_path.iterdir()] == ["link.onnx"]
