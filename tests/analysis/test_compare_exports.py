"""`compare` locates each difference of two exports: module, node and kind of change."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import modelexport
from analysis.graphs import renamed
from damage import copied, edit
from modelexport.analysis.compare import Comparison, compare
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity


@pytest.mark.smoke
def test_the_baseline_against_the_tagged_file(exported: Path) -> None:
    baseline = modelexport.strip(exported, exported.with_name("base.onnx"))
    result = compare(baseline, exported)
    assert result.same_topology
    assert result.verdict == "identical topology, tags added"
    assert (result.tags.added, result.tags.removed, result.tags.changed) == (result.b.nodes, 0, 0)
    assert result.weights.changed == result.weights.added == result.weights.removed == ()
    assert compare(exported, baseline).verdict == "identical topology, tags removed"


@pytest.mark.parametrize("name", ["conditional_bodies", "lstm", "block_three_times"])
def test_subgraphs_and_shared_parts(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    modelexport.export_model(distinct(model), inputs, tmp_path / "m.onnx", strategy="fx")
    edit(copied(tmp_path / "m.onnx", tmp_path / "copy"), lambda m: m.CopyFrom(renamed(m)))
    assert compare(tmp_path / "m.onnx", tmp_path / "copy" / "m.onnx").same_topology


def changes(a: Path, b: Path) -> dict[str | None, tuple[int, int, list[tuple[str, ...]]]]:
    result = compare(a, b)
    assert not result.same_topology
    return {
        c.module: (len(c.added), len(c.removed), [one.what for one in c.changed])
        for c in result.modules
    }


def module_of(node: onnx.NodeProto) -> str:
    return str(json.loads(node.doc_string)["hierarchy_module"])


@pytest.mark.parametrize("hidden_names", [False, True])
def test_a_change_is_reported_by_module(exported: Path, tmp_path: Path, hidden_names: bool) -> None:
    """An attribute, an operator or an edge: one module, one node and the right word."""
    proto = onnx.load(exported, load_external_data=False)
    axis = next(n for n in proto.graph.node if any(a.name == "epsilon" for a in n.attribute))
    add = [n for n in proto.graph.node if n.op_type == "Add"][-1]
    for index, (node, word) in enumerate(
        ((axis, "attributes"), (add, "operator"), (add, "inputs"))
    ):
        other = copied(exported, tmp_path / str(index))

        def damage(model: onnx.ModelProto, node: onnx.NodeProto = node, word: str = word) -> None:
            same = next(n for n in model.graph.node if n.output[0] == node.output[0])
            if word == "attributes":
                next(a for a in same.attribute if a.name == "epsilon").f *= 3
            elif word == "operator":
                same.op_type = "Mul"
            else:
                same.input[1] = same.input[0]
            if hidden_names:
                model.CopyFrom(renamed(model))

        edit(other, damage)
        assert changes(exported, other) == {module_of(node): (0, 0, [(word,)])}


def test_an_added_node_is_reported(exported: Path, tmp_path: Path) -> None:
    other = copied(exported, tmp_path / "other")

    def damage(model: onnx.ModelProto) -> None:
        node = model.graph.node[-1]
        extra = onnx.NodeProto()
        extra.CopyFrom(node)
        extra.op_type, extra.name = "Relu", "extra"
        extra.ClearField("attribute")
        del extra.input[:], extra.output[:]
        extra.input.append("before_relu")
        extra.output.append(node.output[0])
        node.output[0] = "before_relu"
        model.graph.node.append(extra)

    edit(other, damage)
    result = compare(exported, other)
    assert [(len(c.added), len(c.removed), len(c.changed)) for c in result.modules] == [(1, 0, 0)]
    assert sum(b - a for a, b in result.tags.distribution.values()) == 1


def test_a_changed_initializer_is_a_difference(traced: Path, tmp_path: Path) -> None:
    other = copied(traced, tmp_path / "other")
    name = ""

    def damage(model: onnx.ModelProto) -> None:
        nonlocal name
        tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
        name = tensor.name
        tensor.raw_data = tensor.raw_data[:-1] + bytes([tensor.raw_data[-1] ^ 1])

    edit(other, damage)
    result = compare(traced, other)
    assert not result.same_topology
    assert result.weights.changed == (name,)
    assert {one.what for c in result.modules for one in c.changed} == {("weights",)}
    assert result.tags.changed == 0


def test_opset_inputs_and_outputs_are_reported(exported: Path, tmp_path: Path) -> None:
    other = copied(exported, tmp_path / "other")

    def damage(model: onnx.ModelProto) -> None:
        model.opset_import[0].version += 1
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"

    edit(other, damage)
    result = compare(exported, other)
    assert result.same_topology
    assert (result.same_opset, result.same_inputs, result.same_outputs) == (False, True, False)


def test_the_record_reads_as_json(exported: Path) -> None:
    import msgspec

    result = compare(exported, exported)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Comparison) == result
