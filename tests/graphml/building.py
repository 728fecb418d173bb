"""Build ONNX models by hand."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

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
