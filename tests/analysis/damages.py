"""Damage to a tagged file or its sidecar, by the code of its finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx

from damage import Damage
from modelexport.analysis.findings import Code
from modelexport.analysis.validate import validate


def edit_tag(index: int, **values: object) -> Damage:
    def damage(model: onnx.ModelProto) -> None:
        node = model.graph.node[index]
        node.doc_string = json.dumps({**json.loads(node.doc_string), **values})

    return damage


def codes(path: Path) -> set[str]:
    return {found.code for found in validate(path, check_consistency=True).findings}


def cut_short(model: onnx.ModelProto) -> None:
    node = model.graph.node[3]
    node.doc_string = node.doc_string[: len(node.doc_string) // 2]


def lose(model: onnx.ModelProto) -> None:
    model.graph.node[3].ClearField("doc_string")


def wear_anothers_tag(model: onnx.ModelProto) -> None:
    """Copy the tag of a node of another module."""
    mine = json.loads(model.graph.node[3].doc_string)
    for node in model.graph.node:
        if json.loads(node.doc_string)["hierarchy_module"] != mine["hierarchy_module"]:
            model.graph.node[3].doc_string = node.doc_string
            return
    raise AssertionError("all nodes are of one module")


def add_a_node(model: onnx.ModelProto) -> None:
    source = model.graph.node[3].output[0]
    model.graph.node.insert(4, onnx.helper.make_node("Identity", [source], ["added_by_hand"]))


def remove_a_node(model: onnx.ModelProto) -> None:
    node = model.graph.node[-1]
    node.output[0], model.graph.output[0].name = "renamed_by_hand", "renamed_by_hand"


def move_an_edge(model: onnx.ModelProto) -> None:
    """Let a node with two computed inputs consume one of them twice."""
    made = {name for node in model.graph.node for name in node.output}
    node = next(
        n
        for n in model.graph.node
        if len([name for name in n.input if name in made]) == 2 and n.op_type == "Add"
    )
    node.input[1] = node.input[0]


def change_an_attribute(model: onnx.ModelProto) -> None:
    next(a for node in model.graph.node for a in node.attribute if a.name == "epsilon").f *= 2


def change_an_operator(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if n.op_type == "Add").op_type = "Sub"


DAMAGES: dict[Code, Damage] = {
    Code.DOC_MALFORMED: cut_short,
    Code.DOC_MISSING: lose,
    Code.TAG_WRONG: wear_anothers_tag,
    Code.TAG_UNKNOWN: edit_tag(
        3, hierarchy_path="/No/Such", hierarchy_tags=["/No/Such"], hierarchy_count=1
    ),
    Code.TAG_FORMAT: edit_tag(
        3, hierarchy_path="no slash", hierarchy_tags=["no slash"], hierarchy_count=1
    ),
    Code.COUNT_WRONG: edit_tag(3, hierarchy_count=7),
    Code.NODE_ADDED: add_a_node,
    Code.NODE_REMOVED: remove_a_node,
    Code.EDGE_MOVED: move_an_edge,
    Code.ATTRIBUTE_CHANGED: change_an_attribute,
    Code.OPERATOR_CHANGED: change_an_operator,
    Code.METADATA_MISSING: lambda model: model.ClearField("metadata_props"),
    Code.METADATA_UNREADABLE: lambda model: setattr(model.metadata_props[0], "value", "{"),
}


def another_model(content: dict) -> None:
    content["model"]["class"] = "some.other.Model"


def with_module(change: Callable[[dict], object]) -> Callable[[dict], None]:
    return lambda content: change(content["modules"])


SIDECAR_DAMAGES: dict[Code, Callable[[dict], object]] = {
    Code.SIDECAR_FOREIGN: another_model,
    Code.SIDECAR_WRONG: lambda content: content["statistics"].update(nodes=1),
    Code.TENSOR_WRONG: lambda content: next(iter(content["tensors"].values())).update(
        consumers=["/No/Such"]
    ),
    Code.HIERARCHY_UNMET: lambda content: content["expected_hierarchy"].reverse(),
    Code.METADATA_DISAGREES: with_module(lambda modules: modules[""].update(calls=5)),
    Code.NODE_ADDED: lambda content: content["nodes"].pop(next(iter(content["nodes"]))),
}
