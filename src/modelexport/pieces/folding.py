"""Values that follow from constants and fixed shapes alone, worked out with ONNX's own reference implementation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from modelexport.fingerprint import array_of
from modelexport.graph import nested_graphs
from modelexport.pieces.levels import is_repeatable

Value = np.ndarray[Any, Any]
_SMALL = 4096
"""Values that have to do with shapes have few elements."""


def known_values(
    nodes: Iterable[onnx.NodeProto],
    weights: Iterable[onnx.TensorProto],
    types: Mapping[str, onnx.TypeProto],
    opsets: Iterable[onnx.OperatorSetIdProto],
) -> dict[str, Value]:
    """The small values among these that do not depend on what a model is given, but at most on its shapes."""
    values: dict[str, Value] = {}
    for weight in weights:
        value = _stored(weight)
        if value is not None:
            values[weight.name] = value
    for node in nodes:
        names = [name for name in node.input if name]
        if nested_graphs(node.attribute) or not is_repeatable(node.domain, node.op_type):
            continue
        if all(name in values for name in names):
            found = _evaluated(node, {name: values[name] for name in names}, opsets)
        elif len(names) == 1 and _reads_only_the_shape(node.domain, node.op_type):
            stand_in = _stand_in(types.get(names[0]))
            found = {} if stand_in is None else _evaluated(node, {names[0]: stand_in}, opsets)
        else:
            continue
        values.update(found)
    return values


@functools.cache
def _reads_only_the_shape(domain: str, op_type: str) -> bool:
    """Whether an operator makes sizes of a tensor of any type: then its values do not matter."""
    schema = onnx.defs.get_schema(op_type, "" if domain == "ai.onnx" else domain)
    return (
        schema.has_data_propagation_function
        and len(schema.inputs) == len(schema.outputs) == 1
        and set(schema.outputs[0].types) == {"tensor(int64)"}
    )


def _stored(weight: onnx.TensorProto) -> Value | None:
    """The values of a small initializer, where they are at hand."""
    return None if math.prod(weight.dims) > _SMALL else array_of(weight)


def _stand_in(kind: onnx.TypeProto | None) -> Value | None:
    """A tensor of this shape, if the shape is fixed; it takes no memory."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return None
    try:
        return np.broadcast_to(np.zeros((), np.float32), [dim.dim_value for dim in dims])
    except ValueError:  # a size below zero, or more than an array can have
        return None


def _evaluated(
    node: onnx.NodeProto, given: Mapping[str, Value], opsets: Iterable[onnx.OperatorSetIdProto]
) -> dict[str, Value]:
    names = [name for name in node.output if name]
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [onnx.ValueInfoProto(name=name) for name in given],
        [onnx.ValueInfoProto(name=name) for name in names],
    )
    try:
        model = onnx.helper.make_model(graph, opset_imports=list(opsets))
        with np.errstate(all="ignore"):  # log(0) of a position table is the model's business, not the user's
            results = ReferenceEvaluator(model).run(None, dict(given))
    except Exception:  # an operator or a case that the reference implementation does not have
        return {}
    found = dict(zip(names, results, strict=True))
    small = all(isinstance(value, np.ndarray | np.generic) and value.size <= _SMALL for value in found.values())
    return {name: np.asarray(value) for name, value in found.items()} if small else {}
