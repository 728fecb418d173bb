"""Models made by hand, to have everything that ONNX can say at least once."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from graphml import odd_models
from graphml.building import LONG, F, model, sparse, value


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


HANDMADE = {
    made.__name__: made
    for made in (
        every_attribute,
        bodies,
        functions,
        sequences,
        optional_inputs,
        odd_models.odd_types,
        odd_models.odd_names,
        odd_models.metadata_everywhere,
        weights_as_inputs,
        passes_through,
        nothing,
        deep,
        refers_to_bodies,
        odd_models.like_labels,
        odd_models.odd_constants,
        odd_models.many_outputs,
    )
}
