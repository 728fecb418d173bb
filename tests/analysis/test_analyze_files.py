"""`analyze` reads files with other sidecars, without data files, and of any type."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from torch import nn

import modelexport
from damage import edit, edit_sidecar
from modelexport.analysis.analyze import analyze
from modelexport.cli.main import main
from modelexport.errors import ArgumentError, FormatError
from modelexport.tagged.records import sidecar_path

pytestmark = pytest.mark.sanity


def clean_with_another_sidecar(folder: Path) -> Path:
    """A clean export whose sidecar is of another model of the same file name."""
    sidecars = []
    for last in (nn.Sigmoid(), nn.ReLU()):
        model = nn.Sequential(nn.Linear(4, 4), last)
        modelexport.export_model(
            model, torch.ones(1, 4), folder / "m.onnx", strategy="htp", clean=True
        )
        sidecars.append(sidecar_path(folder / "m.onnx").read_bytes())
    sidecar_path(folder / "m.onnx").write_bytes(sidecars[0])
    return folder / "m.onnx"


@pytest.mark.regression
@pytest.mark.parametrize("output_format", ["summary", "detailed", "json", "csv"])
@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([1 << 62] * 400, "has more elements than fit into any memory"),
        ([-1, *[1 << 62] * 400], "has a negative size"),
    ],
)
def test_a_shape_beyond_any_memory_is_one_line(
    output_format: str, dims: list[int], message: str, exported: Path
) -> None:
    def enlarge(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = dims

    edit(exported, enlarge)
    command = ["analyze", str(exported), "--output-format", output_format]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.regression
def test_no_reader_believes_the_sidecar_of_another_model(tmp_path: Path) -> None:
    path = clean_with_another_sidecar(tmp_path)
    result = analyze(path)
    assert not result.file.tagged
    assert result.file.map_source is None
    assert result.file.sidecar_refused == "it is of another graph"
    assert result.modules == ()
    shown = CliRunner().invoke(main, ["analyze", str(path)])
    assert "m_hierarchy.json is not used: it is of another graph" in shown.output
    assert modelexport.compare(path, path).a.tagged_nodes == 0
    drawn = CliRunner().invoke(main, ["export-graphml", str(path)])
    assert drawn.exit_code == 0
    assert "in 0 modules" in drawn.output
    assert "m_hierarchy.json is not used: it is of another graph" in drawn.output
    with pytest.raises(ArgumentError, match="no module is called '0'"):
        modelexport.extract_module_subgraph(path, None, "0")
    with pytest.raises(FormatError, match="it is of another graph"):
        modelexport.extract(path, "0")


@pytest.mark.regression
def test_every_reader_takes_the_tags_of_a_clean_file_from_its_sidecar(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, torch.ones(1, 4), path, strategy="htp", clean=True)
    nodes = analyze(path).totals.nodes
    assert modelexport.compare(path, path).a.tagged_nodes == nodes
    assert modelexport.extract_module_subgraph(path, None, "").operations
    assert len(modelexport.extract_module_subgraph(path, None, "0").operations) == 1


@pytest.mark.regression
def test_a_sidecar_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = clean_with_another_sidecar(tmp_path)
    sidecar_path(path).write_text("[]")
    result = analyze(path)
    assert result.file.map_source is None
    assert result.file.sidecar_refused is not None
    assert result.file.sidecar_refused.startswith("it cannot be read: ")


def test_a_missing_data_file_is_no_hindrance(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    report = modelexport.export_model(model, torch.ones(1, 64), tmp_path / "m.onnx", strategy="fx")
    before = analyze(report.onnx_path)
    assert [(data.name, data.present) for data in before.file.data_files] == [("m.onnx.data", True)]
    report.data_paths[0].unlink()
    after = analyze(report.onnx_path)
    assert not after.file.data_files[0].present
    assert after.modules == before.modules
    assert after.totals == before.totals


def test_weights_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file with an initializer of 4 GiB, which would take memory and time to read."""
    head = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [head], [head])
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [4], np.zeros(4, np.float32).tobytes(), raw=True
    )
    graph.initializer.append(weight)
    model = helper.make_model(graph)
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.dims[0] = 1 << 29
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with (tmp_path / "w.bin").open("wb") as file:
        os.truncate(file.fileno(), 4 << 29)
    assert analyze(tmp_path / "m.onnx").totals.bytes == 4 << 29


def test_every_dtype_has_its_size(tmp_path: Path) -> None:
    sizes = {
        TensorProto.INT4: 4,
        TensorProto.BFLOAT16: 16,
        TensorProto.FLOAT8E4M3FN: 8,
        TensorProto.BOOL: 8,
    }
    sizes |= {TensorProto.DOUBLE: 64, TensorProto.COMPLEX128: 128, TensorProto.STRING: 0}
    graph = helper.make_graph([], "g", [], [])
    for kind in sizes:
        graph.initializer.add(name=f"w{kind}", data_type=kind, dims=[3, 3])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    assert analyze(tmp_path / "m.onnx").totals.bytes == sum(
        (9 * bits + 7) // 8 for bits in sizes.values()
    )


@pytest.mark.parametrize("location", ["x" * 5000, "no such file"])
def test_an_impossible_data_file_is_a_missing_one(location: str, tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [])
    weight = graph.initializer.add(
        name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value=location)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    assert not analyze(tmp_path / "m.onnx").file.data_files[0].present


def test_a_data_file_outside_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [])
    weight = graph.initializer.add(
        name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value="../../etc/passwd")
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(FormatError, match="outside"):
        analyze(tmp_path / "m.onnx")


def test_a_lost_sidecar_or_broken_metadata_does_not_stop_it(exported: Path) -> None:
    whole = analyze(exported)
    sidecar = sidecar_path(exported).read_bytes()
    sidecar_path(exported).unlink()
    assert analyze(exported) == whole
    sidecar_path(exported).write_bytes(sidecar)
    edit(exported, lambda model: setattr(model.metadata_props[0], "value", "{"))
    assert analyze(exported).modules == whole.modules


@pytest.mark.regression
@pytest.mark.parametrize("tags", [("", "x"), ("", "/"), ("x", "x"), ("/", "//")])
def test_tags_that_are_none_make_a_tree_all_the_same(tags: tuple[str, str], exported: Path) -> None:
    """A tag without a slash has nothing above it, not even itself."""
    edit_sidecar(exported, lambda content: content["modules"][""].update(tag=tags[0]))
    edit_sidecar(
        exported, lambda content: content["modules"]["head"].update(tag=tags[1], shown=True)
    )
    edit(exported, lambda model: model.ClearField("metadata_props"))
    result = CliRunner().invoke(main, ["analyze", str(exported)])
    assert result.exit_code == 0, result.output
