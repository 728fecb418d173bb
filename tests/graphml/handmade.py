"""Models made by hand, to have everything that ONNX can say at least once."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

F, LONG = TensorProto.FLOAT, TensorProto.INT64


def value(
    name: str, kind: int = F, shape: list[int | str | None] | None = None
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [2, 3] if shape is None else shape)


def model(
    nodes: list[onnx.NodeProto], inputs: list, outputs: list, weights: list = (), **more: object
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "main", inputs, outputs, list(weights))
    opsets = more.pop("opsets", [helper.make_opsetid("", 21)])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def sparse(name: str) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1.5, -2.5], np.float32), name)
    indices = numpy_helper.from_array(np.array([1, 5], np.int64), "")
    return helper.make_sparse_tensor(values, indices, [2, 3])


def every_attribute() -> onnx.ModelProto:
    """All kinds of attributes on operators of a domain that nobody knows."""
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "t")
    large = numpy_helper.from_array(np.arange(4096, dtype=np.float32), "large")
    nested = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["inner"])], "nested", [], [value("inner")]
    )
    attributes = {
        "f": 0.1,
        "i": -(2**63),
        "s": b"plain",
        "bad": b"\xff\xfe\x00",
        "control": "a\x01\r\n\tb",
        "t": tensor,
        "large": large,
        "g": nested,
        "sp": sparse("sp"),
        "tp": helper.make_tensor_type_proto(F, [1, "n", None]),
        "floats": [0.1, float("inf"), float("-inf"), float("nan"), -0.0],
        "ints": [1, -1, 2**62],
        "strings": ["a", "", "é", "<&>\"'"],
        "tensors": [tensor, large],
        "graphs": [nested, nested],
        "sparses": [sparse("a"), sparse("b")],
        "types": [helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, None))],
    }
    node = helper.make_node(
        "Everything", ["x"], ["y"], name="all", domain="nobody.knows", **attributes
    )
    empty = [
        helper.make_attribute("no_ints", [], attr_type=AttributeProto.INTS),
        helper.make_attribute("no_strings", [], attr_type=AttributeProto.STRINGS),
        AttributeProto(name="undefined"),
        AttributeProto(
            name="documented", i=3, type=AttributeProto.INT, doc_string="of an attribute"
        ),
    ]
    node.attribute.extend(empty)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("nobody.knows", 7)]
    return model([node], [value("x")], [value("y")], opsets=opsets)


def bodies() -> onnx.ModelProto:
    """If in If, Loop and Scan: initializers in subgraphs, outer names used, names that repeat."""
    weight = numpy_helper.from_array(np.full((2, 3), 2, np.float32), "w")
    inner = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["z"], name="m")], "inner", [], [value("z")], [weight]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"], name="m")], "other", [], [value("z")]
    )
    deep = helper.make_graph(
        [helper.make_node("If", ["c"], ["d"], name="deep", then_branch=inner, else_branch=other)],
        "deep",
        [],
        [value("d")],
    )
    flat = helper.make_graph([helper.make_node("Abs", ["x"], ["d"])], "flat", [], [value("d")])
    step = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "big"], ["next"]),
            helper.make_node("Identity", ["go"], ["go_on"]),
        ],
        "step",
        [value("i", LONG, []), value("go", TensorProto.BOOL, []), value("carried")],
        [value("go_on", TensorProto.BOOL, []), value("next")],
        [numpy_helper.from_array(np.ones((2, 3), np.float32), "big")],
    )
    row = helper.make_graph(
        [
            helper.make_node("Add", ["state", "part"], ["sum"]),
            helper.make_node("Identity", ["sum"], ["out"]),
        ],
        "row",
        [value("state", F, [3]), value("part", F, [3])],
        [value("sum", F, [3]), value("out", F, [3])],
    )
    nodes = [
        helper.make_node("If", ["c"], ["branch"], name="outer", then_branch=deep, else_branch=flat),
        helper.make_node("Loop", ["n", "", "branch"], ["looped"], name="loop", body=step),
        helper.make_node(
            "Scan", ["start", "looped"], ["last", "y"], name="scan", body=row, num_scan_inputs=1
        ),
    ]
    weights = [
        numpy_helper.from_array(np.array(3, np.int64), "n"),
        numpy_helper.from_array(np.zeros(3, np.float32), "start"),
    ]
    return model(
        nodes,
        [value("x"), value("c", TensorProto.BOOL, [])],
        [value("y"), value("last", F, [3])],
        weights,
    )


def functions() -> onnx.ModelProto:
    """Local functions with attributes, defaults, overloads and value_info."""
    opset = [helper.make_opsetid("", 21)]
    scale = helper.make_function(
        "own",
        "Scale",
        ["a"],
        ["b"],
        [
            _referring("Constant", [], ["k"], "value_float", "by"),
            helper.make_node("Mul", ["a", "k"], ["b"], name="mul"),
        ],
        opset,
        attributes=["by"],
    )
    twice = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["c"],
        [
            helper.make_node("Scale", ["a"], ["h"], domain="own", by=2.0),
            helper.make_node("Add", ["h", "a"], ["c"]),
        ],
        [*opset, helper.make_opsetid("own", 1)],
        attribute_protos=[helper.make_attribute("alpha", 0.5)],
        value_info=[value("h")],
    )
    twice.doc_string = "of a function"
    twice.metadata_props.add(key="k", value="v")
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="own", name="call")]
    made = model(nodes, [value("x")], [value("y")], opsets=[*opset, helper.make_opsetid("own", 1)])
    other = onnx.FunctionProto()
    other.CopyFrom(scale)
    other.overload = "other"
    made.functions.extend([scale, twice, other])
    return made


def _referring(
    op_type: str, inputs: list[str], outputs: list[str], name: str, reference: str
) -> onnx.NodeProto:
    node = helper.make_node(op_type, inputs, outputs)
    node.attribute.add(name=name, ref_attr_name=reference, type=AttributeProto.FLOAT)
    return node


def sequences() -> onnx.ModelProto:
    """Sequence, optional and map types, and outputs that are sequences."""
    tensor = helper.make_tensor_type_proto(F, [2, 3])
    sequence = helper.make_sequence_type_proto(tensor)
    optional = helper.make_optional_type_proto(tensor)
    mapping = onnx.TypeProto()
    mapping.map_type.key_type = LONG
    mapping.map_type.value_type.CopyFrom(tensor)
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"], name="make"),
        helper.make_node("SequenceAt", ["s", "zero"], ["y"]),
    ]
    made = model(
        nodes,
        [value("x")],
        [value("y"), helper.make_value_info("s", sequence)],
        [numpy_helper.from_array(np.array(0, np.int64), "zero")],
    )
    made.graph.value_info.append(helper.make_value_info("m", mapping))
    made.graph.value_info.append(helper.make_value_info("o", optional))
    made.graph.value_info.append(
        helper.make_value_info("sp", helper.make_sparse_tensor_type_proto(F, [1]))
    )
    return made


def optional_inputs() -> onnx.ModelProto:
    """Optional types that ONNX Runtime runs, inputs and outputs left out, no node names."""
    nodes = [
        helper.make_node("Clip", ["x", "", "high"], ["clipped"]),
        helper.make_node("Dropout", ["clipped"], ["y", ""]),
        helper.make_node("Optional", ["y"], ["o"]),
        helper.make_node("OptionalGetElement", ["o"], ["z"]),
    ]
    return model(
        nodes,
        [value("x")],
        [value("z")],
        [numpy_helper.from_array(np.array(0.5, np.float32), "high")],
    )


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


def weights_as_inputs() -> onnx.ModelProto:
    """As files of IR version 3 have it: every weight is also an input."""
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Add", ["w", "w"], ["z"])]
    made = model(nodes, [value("x"), value("w")], [value("y"), value("z")], [weight])
    made.ir_version = 3
    made.opset_import[0].version = 8
    return made


def passes_through() -> onnx.ModelProto:
    """Inputs and initializers that are outputs, and a value that one node consumes twice."""
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"])]
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    return model(
        nodes, [value("x"), value("unused")], [value("y"), value("x"), value("w")], [weight]
    )


def nothing() -> onnx.ModelProto:
    """A graph without nodes."""
    return model([], [value("x")], [value("x")])


def deep() -> onnx.ModelProto:
    """Bodies twenty levels deep."""
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y20"])], "g20", [], [value("y20")])
    for level in range(19, 0, -1):
        node = helper.make_node("If", ["c"], [f"y{level}"], then_branch=graph, else_branch=graph)
        node.attribute[1].g.CopyFrom(
            helper.make_graph(
                [helper.make_node("Abs", ["x"], [f"e{level}"])], "e", [], [value(f"e{level}")]
            )
        )
        graph = helper.make_graph([node], f"g{level}", [], [value(f"y{level}")])
    return model(list(graph.node), [value("x"), value("c", TensorProto.BOOL, [])], [value("y1")])


def refers_to_bodies() -> onnx.ModelProto:
    """A function whose operator takes its bodies from the call."""
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["b"])], "b", [], [value("b")])
    inner = helper.make_node("If", ["c"], ["y"])
    for name in ("then_branch", "else_branch"):
        inner.attribute.add(name=name, ref_attr_name=f"own_{name}", type=AttributeProto.GRAPH)
    opset = [helper.make_opsetid("", 21)]
    names = ["own_then_branch", "own_else_branch"]
    function = helper.make_function("own", "Choose", ["c"], ["y"], [inner], opset, attributes=names)
    call = helper.make_node("Choose", ["c"], ["y"], domain="own", **dict.fromkeys(names, branch))
    inputs = [value("x"), value("c", TensorProto.BOOL, [])]
    made = model([call], inputs, [value("y")], opsets=[*opset, helper.make_opsetid("own", 1)])
    made.functions.append(function)
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


HANDMADE = {
    made.__name__: made
    for made in (
        every_attribute,
        bodies,
        functions,
        sequences,
        optional_inputs,
        odd_types,
        odd_names,
        metadata_everywhere,
        weights_as_inputs,
        passes_through,
        nothing,
        deep,
        refers_to_bodies,
        like_labels,
        odd_constants,
        many_outputs,
    )
}
