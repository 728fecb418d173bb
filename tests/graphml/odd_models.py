"""Models with unusual types, names, metadata and constants."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from graphml.building import LONG, F, model, sparse, value


def odd_types() -> onnx.ModelProto:
    """Weights of every element type, stored in every way."""
    weights = [
        numpy_helper.from_array(np.array([1.5, -2], ml_dtypes.bfloat16), "bfloat16"),
        numpy_helper.from_array(np.array([1.5, -2], ml_dtypes.float8_e4m3fn), "float8"),
        numpy_helper.from_array(np.array([1, -2, 3], ml_dtypes.int4), "int4"),
        numpy_helper.from_array(np.array([1, 2, 3], ml_dtypes.uint4), "uint4"),
        numpy_helper.from_array(np.array([1.5, -2], np.float16), "float16"),
        numpy_helper.from_array(np.array(["a", "é", ""], object), "strings"),
        numpy_helper.from_array(np.zeros((0, 3), np.float32), "empty"),
        numpy_helper.from_array(np.array(7.0), "scalar"),
        helper.make_tensor("float_data", F, [3], [0.1, float("nan"), -0.0]),
        helper.make_tensor("double_data", TensorProto.DOUBLE, [2], [0.1, float("inf")]),
        helper.make_tensor("int32_data", TensorProto.INT8, [3], [-1, 0, 127]),
        helper.make_tensor("int64_data", LONG, [2], [-(2**63), 2**63 - 1]),
        helper.make_tensor("uint64_data", TensorProto.UINT64, [2], [0, 2**64 - 1]),
        helper.make_tensor("half_data", TensorProto.FLOAT16, [2], [1.5, 2.5]),
        helper.make_tensor("complex", TensorProto.COMPLEX64, [1], [1 + 2j]),
        helper.make_tensor("bools", TensorProto.BOOL, [2], [True, False]),
    ]
    weights[-1].doc_string = "of a tensor"
    weights[-1].segment.begin = 1
    weights[-1].segment.end = 2
    weights[0].metadata_props.add(key="k", value="v")
    nodes = [
        helper.make_node("Identity", [weight.name], [f"{weight.name}_out"]) for weight in weights
    ]
    made = model(nodes, [value("x")], [value("scalar_out", TensorProto.DOUBLE, [])], weights)
    made.graph.sparse_initializer.append(sparse("sparse"))
    return made


def odd_names() -> onnx.ModelProto:
    """Names that XML and editors stumble over; empty ones; one name in different roles."""
    names = [
        "a b",
        "<&>\"'",
        "é漢😀",
        "tab\tline\nend\r",
        "\x01\x1f\x7f\x85",
        "]]>",
        "n0::n1",
        "-",
        " lead",
        " ",
        "\u00a0",
        "\ufffe\u2028",
    ]
    nodes = [
        helper.make_node("Relu", [first], [second], name=second)
        for first, second in pairwise(names)
    ]
    nodes.append(helper.make_node("Relu", [names[-1]], ["y"], name=""))
    nodes.append(helper.make_node("Relu", [names[0]], ["dead end"], name="y"))
    return model(nodes, [value(names[0])], [value("y")])


def metadata_everywhere() -> onnx.ModelProto:
    """Everything that can be said beside the graph, at every level."""
    node = helper.make_node(
        "Gemm", ["x", "w"], ["y"], name="g", doc_string="of a node\nwith two lines", alpha=0.1
    )
    node.metadata_props.add(key="node", value="\x02 odd")
    node.overload = "over"
    weight = numpy_helper.from_array(np.ones((3, 4), np.float32), "w")
    weight.metadata_props.add(key="tensor", value="t")
    made = model([node], [value("x", F, ["batch", 3])], [value("y", F, [None, 4])], [weight])
    made.producer_name, made.producer_version, made.domain = "someone", "1.2", "a.domain"
    made.model_version, made.doc_string = 42, "of the model"
    made.metadata_props.add(key="model", value="")
    made.metadata_props.add(key="model", value="again")
    made.graph.doc_string = "of the graph"
    made.graph.metadata_props.add(key="graph", value="g")
    made.graph.input[0].doc_string = "of an input"
    made.graph.input[0].metadata_props.add(key="input", value="i")
    made.graph.input[0].type.denotation = "IMAGE"
    made.graph.input[0].type.tensor_type.shape.dim[1].denotation = "DATA_CHANNEL"
    annotation = made.graph.quantization_annotation.add(tensor_name="x")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    training = made.training_info.add()
    training.initialization.name = "first"
    training.algorithm.node.append(helper.make_node("Neg", ["g"], ["h"]))
    training.update_binding.add(key="w", value="h")
    made.opset_import.add(domain="unused.domain", version=3)
    return made


def like_labels() -> onnx.ModelProto:
    """Subgraphs whose labels are alike: one name twice, a list beside one graph, odd names."""

    def body(name: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node("Relu", ["x"], [name])], name, [], [value(name)])

    node = helper.make_node("Own", ["x"], ["y"], domain="own", name="own")
    for name in ("g.0", "g", "g", "g\x01", "g\\x01"):
        node.attribute.append(helper.make_attribute(name, body("b")))
    node.attribute.append(helper.make_attribute("g", [body("c"), body("d")]))
    made = model(
        [node],
        [value("x")],
        [value("y")],
        opsets=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )
    for name in ("S\x01", "S\\x01", "0/else"):
        relu = [helper.make_node("Relu", ["a"], ["b"])]
        made.functions.append(
            helper.make_function("own", name, ["a"], ["b"], relu, made.opset_import[:1])
        )
    return made


def odd_constants() -> onnx.ModelProto:
    """Constants whose values do not fit their shapes, large ones, and attributes without a type."""
    nodes = []
    for number, dims in enumerate(([0], [-1], [0, 5], [2, -1], [1024], [16])):
        tensor = TensorProto(data_type=F, dims=dims, raw_data=bytes(4096))
        nodes.append(helper.make_node("Constant", [], [f"c{number}"], value=tensor))
    floats = TensorProto(data_type=F, dims=[0], float_data=[0.5] * 1000)
    nodes.append(helper.make_node("Constant", [], ["f"], value=floats))
    nodes[-1].attribute[0].type = AttributeProto.UNDEFINED
    return model([*nodes, helper.make_node("Relu", ["x"], ["y"])], [value("x")], [value("y")])


def many_outputs() -> onnx.ModelProto:
    """A node with many outputs, some left out; one without inputs and one without outputs."""
    names = ["" if number % 7 == 3 else f"o{number}" for number in range(40)]
    nodes = [
        helper.make_node("Many", ["x"], names, domain="own"),
        helper.make_node("Sum", [name for name in names if name], ["y"]),
        helper.make_node("Source", [], ["z"], domain="own"),
        helper.make_node("Sink", ["z", "", "y"], [], domain="own"),
    ]
    return model(
        nodes,
        [value("x")],
        [value("y")],
        opsets=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )
