"""Modules of models made by hand: functions, overloads, constants, branches and annotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import modelexport
from extraction.running import run, session
from modelexport.modules.record import NodeTag
from modelexport.tagged.records import encode_tag


def hand_made(
    body: list[onnx.NodeProto], functions: list[onnx.FunctionProto] | None = None
) -> onnx.ModelProto:
    for number, node in enumerate(body):
        path, node.name = node.name, f"{node.name}_{number}"
        tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", path)
        node.doc_string = encode_tag(tag).decode()
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    graph = helper.make_graph(body, "main", [x], [y], [weight])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=functions or [], ir_version=10)


def test_a_protobuf_with_nothing_but_tags(tmp_path: Path) -> None:
    model = hand_made(
        [
            helper.make_node("Add", ["x", "w"], ["a"], name="first"),
            helper.make_node("Relu", ["a"], ["b"], name="second"),
            helper.make_node("Mul", ["b", "w"], ["y"], name="second"),
        ]
    )
    extracted = modelexport.extract(model, "second", tmp_path / "second.onnx")
    assert [value.name for value in extracted.record.inputs] == ["a"]
    assert [value.shape for value in extracted.record.inputs] == [(2, 3)]
    onnx.checker.check_model(str(tmp_path / "second.onnx"), full_check=True)
    session(tmp_path / "second.onnx")


def test_functions_that_nodes_call_are_copied() -> None:
    twice = helper.make_function(
        "own",
        "Twice",
        ["v"],
        ["r"],
        [helper.make_node("Add", ["v", "v"], ["r"])],
        [helper.make_opsetid("", 18)],
    )
    other = helper.make_function(
        "own",
        "Other",
        ["v"],
        ["r"],
        [helper.make_node("Neg", ["v"], ["r"])],
        [helper.make_opsetid("", 18)],
    )
    model = hand_made(
        [
            helper.make_node("Other", ["x"], ["a"], domain="own", name="first"),
            helper.make_node("Twice", ["a"], ["y"], domain="own", name="second"),
        ],
        [twice, other],
    )
    extracted = modelexport.extract(model, "second").model
    assert [function.name for function in extracted.functions] == ["Twice"]
    onnx.checker.check_model(extracted, full_check=True)
    assert np.allclose(run(extracted, {"a": np.ones((2, 3), np.float32)})["y"], 2)


@pytest.mark.regression
def test_both_overloads_of_a_function_are_copied() -> None:
    imports = [helper.make_opsetid("", 18)]
    twice = helper.make_function(
        "own",
        "Act",
        ["v"],
        ["r"],
        [helper.make_node("Add", ["v", "v"], ["r"])],
        imports,
        overload="twice",
    )
    minus = helper.make_function(
        "own",
        "Act",
        ["v"],
        ["r"],
        [helper.make_node("Neg", ["v"], ["r"])],
        imports,
        overload="minus",
    )
    model = hand_made(
        [
            helper.make_node("Relu", ["x"], ["a"], name="first"),
            helper.make_node("Act", ["a"], ["b"], domain="own", overload="twice", name="second"),
            helper.make_node("Act", ["b"], ["c"], domain="own", overload="minus", name="second"),
            helper.make_node("Act", ["c"], ["y"], domain="own", overload="minus", name="third"),
        ],
        [twice, minus],
    )
    extracted = modelexport.extract(model, "second").model
    assert [function.overload for function in extracted.functions] == ["twice", "minus"]
    onnx.checker.check_model(extracted, full_check=True)
    assert np.allclose(run(extracted, {"a": np.ones((2, 3), np.float32)})["c"], -2)
    only = modelexport.extract(model, "third").model
    assert [function.overload for function in only.functions] == ["minus"]
    assert np.allclose(run(only, {"c": np.ones((2, 3), np.float32)})["y"], -1)


def test_a_random_value_is_not_copied_as_a_constant() -> None:
    model = hand_made(
        [
            helper.make_node("RandomUniform", [], ["r"], shape=[2, 3], name="noise"),
            helper.make_node("Constant", [], ["c"], value_float=2.0, name="other"),
            helper.make_node("Mul", ["r", "c"], ["s"], name="part"),
            helper.make_node("Add", ["s", "x"], ["y"], name="part"),
        ]
    )
    record = modelexport.extract(model, "part").record
    assert [value.name for value in record.inputs] == ["x", "r"] or [
        v.name for v in record.inputs
    ] == ["r", "x"]
    assert record.pulled_in == ("c",)


def test_sizes_at_fixed_shapes_become_constants() -> None:
    model = hand_made(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0], name="other"),
            helper.make_node("Shape", ["t"], ["s"], name="other"),
            helper.make_node("Reshape", ["x", "s"], ["r"], name="part"),
            helper.make_node("Transpose", ["r"], ["y"], perm=[1, 0], name="part"),
        ]
    )
    extracted = modelexport.extract(model, "part")
    assert [value.name for value in extracted.record.inputs] == ["x"]
    assert extracted.record.pulled_in == ("s",)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(run(extracted.model, {"x": x})["y"], x.reshape(3, 2).T)


def branch(weight: float) -> onnx.GraphProto:
    """Build a branch with a nested If, with the same names as the other branch."""
    out = helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 3])
    end = helper.make_tensor_value_info("q", TensorProto.FLOAT, [2, 3])
    inner = [
        helper.make_graph([helper.make_node(op, ["t"], ["q"])], op, [], [end])
        for op in ("Abs", "Neg")
    ]
    nodes = [
        helper.make_node("Mul", ["a", "s"], ["t"]),
        helper.make_node("If", ["c"], ["v"], then_branch=inner[0], else_branch=inner[1]),
    ]
    scale = numpy_helper.from_array(np.array(weight, np.float32), "s")
    return helper.make_graph(nodes, "branch", [], [out], [scale])


def test_names_that_repeat_in_both_branches_and_inside_them() -> None:
    body = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("ReduceSum", ["a"], ["r"], keepdims=0, name="other"),
        helper.make_node("Cast", ["r"], ["c"], to=TensorProto.BOOL, name="other"),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(5), name="other"
        ),
    ]
    model = hand_made(body)
    for attribute in model.graph.node[3].attribute:
        for node in attribute.g.node:
            inner = [node for held in node.attribute for node in held.g.node]
            for number, found in enumerate((node, *inner)):
                module = "part.scale" if node.op_type == "Mul" else "part.end" if number else ""
                tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", module)
                found.doc_string = encode_tag(tag).decode()
    extracted = modelexport.extract(model, "part")
    onnx.checker.check_model(extracted.model, full_check=True)
    x = np.ones((2, 3), np.float32)
    given = sorted({float(value.flat[0]) for value in run(extracted.model, {"a": x}).values()})
    assert given == [-5, -2, 2, 5], "a branch reads what is in the other"


def annotate(graph: onnx.GraphProto, tensor: str, scale: str) -> None:
    note = graph.quantization_annotation.add(tensor_name=tensor)
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)


def annotations(graph: onnx.GraphProto) -> dict[str, str]:
    return {
        note.tensor_name: note.quant_parameter_tensor_names[0].value
        for note in graph.quantization_annotation
    }


@pytest.mark.regression
def test_quantization_annotations_name_tensors_of_the_extracted_model() -> None:
    """Values of both branches have equal names; those of one are renamed with their scales."""
    body = [
        helper.make_node("ReduceSum", ["x"], ["r"], keepdims=0, name="other"),
        helper.make_node("Cast", ["r"], ["c"], to=TensorProto.BOOL, name="other"),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(5), name="other"
        ),
    ]
    model = hand_made(body)
    model.graph.input[0].name = "a"
    model.graph.node[0].input[0] = "a"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(7), "unread"))
    annotate(model.graph, "a", "unread")
    annotate(model.graph, "r", "w")
    for attribute in model.graph.node[2].attribute:
        weight = numpy_helper.to_array(attribute.g.initializer[0])
        attribute.g.initializer.append(numpy_helper.from_array(np.float32(10 * weight), "t_scale"))
        annotate(attribute.g, "t", "t_scale")
        tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", "part")
        attribute.g.node[0].doc_string = encode_tag(tag).decode()
    extracted = modelexport.extract(model, "part").model
    onnx.checker.check_model(extracted, full_check=True)
    found = annotations(extracted.graph)
    scales = {
        tensor.name: float(numpy_helper.to_array(tensor)) for tensor in extracted.graph.initializer
    }
    made = {node.output[0]: scales[node.input[1]] for node in extracted.graph.node}
    assert set(found) == {"a", *made}  # `r` is not in it
    assert found["a"] == "unread"
    assert {made[name]: scales[scale] for name, scale in found.items() if name != "a"} == {
        2: 20,
        5: 50,
    }
    run(extracted, {"a": np.ones((2, 3), np.float32)})
