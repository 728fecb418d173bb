"""Models built by hand, with tags: modules that exporters rarely write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from modelexport.modules.record import NodeTag
from modelexport.tagged.records import encode_tag

OPSET = helper.make_opsetid("", 18)


def node(
    module: str, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object
) -> onnx.NodeProto:
    """Make a node with the tag of a module, whose segments are the names in its path."""
    made = helper.make_node(op_type, inputs, outputs, **attributes)
    tag = "/".join(["/Net", *filter(None, module.split("."))])
    made.doc_string = encode_tag(NodeTag((tag,), tag, 1, "scope", module)).decode()
    return made


def write(
    path: Path,
    nodes: Iterable[onnx.NodeProto],
    outputs: Sequence[str] = ("y",),
    functions: Sequence[onnx.FunctionProto] = (),
    ir_version: int = 8,
) -> Path:
    """Write a model with the input `x` and an initializer `w`, both of two elements."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in outputs]
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        values,
        [helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, 4.0])],
    )
    domains = dict.fromkeys(function.domain for function in functions)
    model = helper.make_model(
        graph,
        opset_imports=[OPSET, *(helper.make_opsetid(domain, 1) for domain in domains)],
        functions=functions,
        ir_version=ir_version,
    )
    path.write_bytes(model.SerializeToString())
    return path
