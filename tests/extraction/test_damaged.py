"""Extract from files without records, of another graph or damaged, and to unusable paths."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import onnx
import pytest

import modelexport
from exports import export
from modelexport.errors import ArgumentError, FileError, FormatError, ModelExportError

LAYER = "encoder.layer.0"


def test_tags_only_in_the_sidecar(tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path, clean=True)
    extracted = modelexport.extract(path, LAYER, tmp_path / "layer.onnx")
    assert extracted.record.nodes == modelexport.load(path).modules[LAYER].nodes
    assert modelexport.validate(tmp_path / "layer.onnx", check_consistency=True).findings == ()
    path.with_name("model_hierarchy.json").unlink()
    with pytest.raises(FormatError, match="no tags"):
        modelexport.extract(path, LAYER)


def test_a_file_without_records(bert: Path) -> None:
    """Tags alone are enough to extract."""
    expected = modelexport.extract(bert, LAYER)
    bert.with_name("model_hierarchy.json").unlink()
    proto = onnx.load(bert, load_external_data=False)
    del proto.metadata_props[:]
    bert.write_bytes(proto.SerializeToString())
    extracted = modelexport.extract(bert, LAYER, bert.with_name("layer.onnx"))
    assert {n.output[0] for n in extracted.model.graph.node} == {
        n.output[0] for n in expected.model.graph.node
    }
    assert not bert.with_name("layer_hierarchy.json").exists()
    with pytest.raises(ArgumentError, match="near it"):
        modelexport.extract(bert, "encoder.layer.9")


def test_the_source_is_never_overwritten(bert: Path) -> None:
    before = bert.read_bytes()
    with pytest.raises(ArgumentError, match="overwrite"):
        modelexport.extract(bert, LAYER, bert)
    assert bert.read_bytes() == before


def test_bad_files_and_folders(bert: Path, tmp_path: Path) -> None:
    for output in (tmp_path / "missing" / "p.onnx", tmp_path / "p.txt", tmp_path):
        with pytest.raises(ModelExportError):
            modelexport.extract(bert, LAYER, output)
    (tmp_path / "cut.onnx").write_bytes(bert.read_bytes()[:-100])
    with pytest.raises(FormatError):
        modelexport.extract(tmp_path / "cut.onnx", LAYER)
    with pytest.raises(FileError):
        modelexport.extract(tmp_path / "none.onnx", LAYER)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_data_file_that_is_not_whole(harm: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    data = path.with_name("model.onnx.data")
    if harm == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
    before = sorted(tmp_path.iterdir())
    with pytest.raises((FileError, FormatError), match=r"model\.onnx\.data"):
        modelexport.extract(path, "encoder.layer.1", tmp_path / "layer.onnx")
    assert sorted(tmp_path.iterdir()) == before


def test_calls_without_records(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "htp", tmp_path)
    proto = onnx.load(path)
    del proto.metadata_props[:]
    assert [
        modelexport.extract(proto, "block.fc", call=call).record.nodes for call in range(3)
    ] == [1, 1, 1]
    with pytest.raises(ArgumentError, match="records of the export are lost"):
        modelexport.extract(proto, "block", call=0)


def test_a_sidecar_of_another_graph_is_not_used(tmp_path: Path) -> None:
    export("bert", "htp", tmp_path, clean=True)
    other, _, _ = export(
        "distilbert", "htp", tmp_path.joinpath("other").mkdir() or tmp_path / "other", clean=True
    )
    shutil.copy(other, tmp_path / "model.onnx")
    with pytest.raises(FormatError, match="it is of another graph"):
        modelexport.extract(tmp_path / "model.onnx", LAYER)


def test_tags_that_another_tool_dropped_are_in_the_sidecar(bert: Path) -> None:
    nodes = modelexport.extract(bert, LAYER).record.nodes
    proto = onnx.load(bert, load_external_data=False)
    for node in proto.graph.node:
        node.ClearField("doc_string")
    bert.write_bytes(proto.SerializeToString())
    assert modelexport.extract(bert, LAYER).record.nodes == nodes


def test_a_file_whose_nodes_are_not_sorted(bert: Path) -> None:
    expected = modelexport.extract(bert, LAYER)
    proto = onnx.load(bert, load_external_data=False)
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    bert.write_bytes(proto.SerializeToString())
    extracted = modelexport.extract(bert, LAYER)
    assert {v.name for v in extracted.record.inputs} == {v.name for v in expected.record.inputs}
    onnx.checker.check_model(extracted.model, full_check=True)


def test_files_of_an_earlier_extracted_model_are_removed(bert: Path, tmp_path: Path) -> None:
    target = tmp_path / "piece.onnx"
    modelexport.extract(bert, LAYER, target)
    target.with_name("piece.onnx.data").write_bytes(b"old")
    modelexport.extract(bert, "encoder.layer.0.intermediate.intermediate_act_fn", target)
    assert not target.with_name("piece.onnx.data").exists()


@pytest.mark.regression
@pytest.mark.parametrize("size", [-2, (1 << 63) - 1])
def test_impossible_sizes(size: int, bert: Path) -> None:
    """Nothing is inferred from them, and nothing of that size is allocated."""
    model = onnx.load(bert)
    for value in (*model.graph.input, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = size
    for weight in model.graph.initializer:
        weight.data_type, weight.dims[:] = -(1 << 31), [size, 0]
    with contextlib.suppress(FormatError):
        modelexport.extract(model, LAYER)


@pytest.mark.regression
def test_a_value_with_two_producers(bert: Path) -> None:
    model = onnx.load(bert)
    model.graph.node.add().CopyFrom(model.graph.node[-1])
    extracted, record = modelexport.extract(model, "")
    assert record.nodes == len(extracted.graph.node) == len(model.graph.node)


@pytest.mark.regression
def test_an_unknown_status(bert: Path) -> None:
    model = onnx.load(bert)
    entry = next(entry for entry in model.metadata_props if entry.key == "modelexport.hierarchy")
    entry.value = entry.value.replace('"status":"absorbed"', '"status":"gone"').replace(
        '"unused"', '"gone"'
    )
    gone = next(
        path
        for path, record in json.loads(entry.value)["modules"].items()
        if record["status"] == "gone"
    )
    with pytest.raises(ArgumentError, match="has no nodes: its nodes are not in the file"):
        modelexport.extract(model, gone)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path, _, _ = export("one_leaf_root", "htp", tmp_path)
    data = bytearray(path.read_bytes())
    for place in range(40, len(data) - 40, 11):
        broken = bytearray(data)
        broken[place] = 0xFF
        path.write_bytes(broken)
        try:
            modelexport.extract(path, "")
        except ModelExportError:
            continue
