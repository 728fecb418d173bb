"""Types and shapes of values, inferred without initializer data."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.numpy_helper import from_array

from modelexport.errors import FormatError
from modelexport.graph.flat import nested_graphs
from modelexport.graph.nested import Subgraph, SubgraphValue, is_repeatable, no_tags

_LARGE = 1 << 10
_WHOLE = {TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}


class TypeInference:
    """Finds the types of tensors; inference runs only if one is asked for that the file does not tell whole."""

    def __init__(self, proto: onnx.ModelProto, main: Subgraph) -> None:
        self._proto = proto
        self._main = main
        self._inferred: dict[str, dict[str, onnx.TypeProto]] = {}
        self._tried: set[SubgraphValue] = set()
        self._whole: onnx.ModelProto | None = None
        dims = (dim for value in proto.graph.input for dim in value.type.tensor_type.shape.dim)
        self._symbols = {dim.dim_param for dim in dims if dim.dim_param}

    def of(self, wanted: Iterable[SubgraphValue], end: int) -> list[onnx.ValueInfoProto]:
        """Each tensor with its type; all are made before the node `end` of the main graph."""
        wanted = list(wanted)
        missing = [
            border
            for border in wanted
            if border not in self._tried and not self._is_settled(border)
        ]
        if missing:
            self._tried.update(missing)
            self._infer(missing, end)
        return [
            onnx.ValueInfoProto(name=border.name, type=self._known(border)) for border in wanted
        ]

    def _is_settled(self, border: SubgraphValue) -> bool:
        """Whether a shape is told by the file, or inferred whole: numbers, and names that the inputs have."""
        found = self._find(border)
        if found is None or not _has_shape(found):
            return False
        if _has_shape(self._told_by_file(border.level, border.name)):
            return True
        dims = found.tensor_type.shape.dim
        return all(dim.HasField("dim_value") or dim.dim_param in self._symbols for dim in dims)

    def fixed_values(self, wanted: Iterable[SubgraphValue], end: int) -> dict[str, Value]:
        """The values of those tensors of the main graph that follow from fixed shapes, though inputs stand behind."""
        sizes = [border for border in wanted if self._may_be_sizes(border)]
        if not sizes:
            return {}
        graph = self._main.graph if self._whole is None else self._whole.graph
        types = dict(_declared_type(graph))
        nodes = self._main.nodes[:end]
        values = known_values(nodes, self._main.graph.initializer, types, self._proto.opset_import)
        return {border.name: values[border.name] for border in sizes if border.name in values}

    def _may_be_sizes(self, border: SubgraphValue) -> bool:
        """Whether a tensor is a whole number or a list of those, and not an input of the model."""
        if border.level is not self._main or any(
            value.name == border.name for value in self._main.graph.input
        ):
            return False
        kind = self._known(border).tensor_type
        return kind.elem_type in _WHOLE and kind.HasField("shape") and len(kind.shape.dim) < 2

    def _known(self, border: SubgraphValue) -> onnx.TypeProto:
        found = self._find(border)
        if found is None:
            raise FormatError(
                f"the file does not say of what type {border.name!r} is, and it cannot be inferred",
                hint="an operator that ONNX does not know makes it; add its value_info to the file",
            )
        return found

    def _find(self, border: SubgraphValue) -> onnx.TypeProto | None:
        level: Subgraph | None = border.level
        while level is not None:
            told = self._told_by_file(level, border.name)
            if not _has_shape(told):
                told = self._inferred.get(level.prefix, {}).get(border.name, told)
            if told is not None:
                return told
            level = level.outer
        return None

    def _told_by_file(self, level: Subgraph, name: str) -> onnx.TypeProto | None:
        value = level.declared.get(name)
        return value.type if value is not None and _is_whole(value.type) else None

    def _infer(self, missing: list[SubgraphValue], end: int) -> None:
        """Infer types up to a node; where ONNX gives up on a shape, work out sizes."""
        bare = self._bare(end)
        while True:
            try:
                done = onnx.shape_inference.infer_shapes(bare, data_prop=True)
            except Exception as error:  # inference and its checks raise several unrelated kinds
                raise FormatError(f"shape inference fails on this file: {error}") from error
            self._note(done, {border.name for border in missing})
            if all(self._is_settled(border) for border in missing) or not self._fold(bare):
                return

    def _note(self, done: onnx.ModelProto, wanted: set[str]) -> None:
        """Keep what was inferred of these tensors, in the main graph and those inside it."""
        self._whole = done
        levels = Subgraph(done.graph, no_tags) if self._main.bodies else ()
        for prefix, graph in (("", done.graph), *((level.prefix, level.graph) for level in levels)):
            found = self._inferred.setdefault(prefix, {})
            for name, kind in _declared_type(graph, wanted):
                self._unname(kind)
                if _has_shape(kind) or name not in found:
                    found[name] = kind

    def _unname(self, kind: onnx.TypeProto) -> None:
        """Take away the names that inference makes up for sizes which it does not know."""
        for dim in (
            kind.tensor_type.shape.dim if _has_shape(kind) and kind.HasField("tensor_type") else ()
        ):
            if dim.dim_param and dim.dim_param not in self._symbols:
                dim.ClearField("dim_param")

    def _bare(self, end: int) -> onnx.ModelProto:
        """The model up to a node, without what inference does not look at."""
        bare = onnx.ModelProto(ir_version=self._proto.ir_version)
        bare.opset_import.extend(self._proto.opset_import)
        bare.functions.extend(self._proto.functions)
        graph, main = bare.graph, self._main.graph
        graph.name = main.name
        graph.input.extend(main.input)
        graph.initializer.extend(_without_large_values(main.initializer))
        graph.sparse_initializer.extend(main.sparse_initializer)
        graph.value_info.extend(main.value_info)
        graph.node.extend(self._main.nodes[:end])
        for node in graph.node:
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
        return bare

    def _fold(self, bare: onnx.ModelProto) -> bool:
        """Put values in the place of nodes that follow from constants and fixed shapes; whether there were any new."""
        graph = bare.graph
        types = {} if self._whole is None else dict(_declared_type(self._whole.graph))
        values = known_values(graph.node, graph.initializer, types, bare.opset_import)
        left = [
            node for node in graph.node if not all(name in values for name in node.output if name)
        ]
        if len(left) == len(graph.node):
            return False
        stored = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(
            from_array(v, name) for name, v in values.items() if name not in stored
        )
        kept = onnx.GraphProto()
        kept.node.extend(left)
        del graph.node[:]
        graph.node.extend(kept.node)
        return True


def _without_large_values(weights: Iterable[TensorProto]) -> Iterator[TensorProto]:
    for weight in weights:
        large = len(weight.raw_data) > _LARGE
        yield (
            TensorProto(name=weight.name, dims=weight.dims, data_type=weight.data_type)
            if large
            else weight
        )


def _declared_type(
    graph: onnx.GraphProto, wanted: Container[str] | None = None
) -> Iterator[tuple[str, onnx.TypeProto]]:
    for values in (graph.value_info, graph.input, graph.output):
        for value in values:
            name = value.name
            if (wanted is None or name in wanted) and _is_whole(value.type):
                yield name, value.type


def _has_shape(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and (
        kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.HasField("shape")
    )


def _is_whole(kind: onnx.TypeProto) -> bool:
    """Whether a type says what it has to; one that is left empty says nothing."""
    which = kind.WhichOneof("value")
    return which is not None and (which != "tensor_type" or bool(kind.tensor_type.elem_type))


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
    return None if math.prod(weight.dims) > _SMALL else tensor_array(weight)


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
    from onnx.reference import ReferenceEvaluator  # slow to import, and most files need none

    names = [name for name in node.output if name]
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [onnx.ValueInfoProto(name=name) for name in given],
        [onnx.ValueInfoProto(name=name) for name in names],
    )
    try:
        model = onnx.helper.make_model(graph, opset_imports=list(opsets))
        with np.errstate(
            all="ignore"
        ):  # log(0) of a position table is the model's business, not the user's
            results = ReferenceEvaluator(model).run(None, dict(given))
    except Exception:  # an operator or a case that the reference implementation does not have
        return {}
    found = dict(zip(names, results, strict=True))
    small = all(
        isinstance(value, np.ndarray | np.generic) and value.size <= _SMALL
        for value in found.values()
    )
    return {name: np.asarray(value) for name, value in found.items()} if small else {}


def tensor_array(tensor: TensorProto) -> np.ndarray[Any, Any] | None:
    """The values that lie in a tensor; None where they do not fit its shape, or are of a type that nobody knows."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, MemoryError):  # the last one for sizes below zero
        return None
