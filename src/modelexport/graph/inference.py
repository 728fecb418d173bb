"""Types and shapes of values, inferred without initializer data."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from modelexport.errors import FormatError
from modelexport.graph.flat import nested_graphs
from modelexport.graph.nested import Subgraph, SubgraphValue, find_schema, is_repeatable

Value = np.ndarray[Any, Any]

_LARGE_BYTES = 1 << 10
_INTEGERS = {TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}
_MAX_ELEMENTS = 4096
"""Values that describe shapes have few elements."""


def infer_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Run ONNX's type and shape inference on a model, whose initializer data may be absent.

    Raises:
        FormatError: Inference fails on the model.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # inference and its checks raise several unrelated kinds
        raise FormatError(f"shape inference fails on this file: {error}") from error


class TypeInference:
    """The types of the values of a model: those that the file declares, else inferred ones.

    Inference runs only when a value is requested whose type the file does not declare completely.

    Args:
        proto: The model.
        main: Its main graph.
    """

    def __init__(self, proto: onnx.ModelProto, main: Subgraph) -> None:
        self._proto = proto
        self._main = main
        self._inferred: dict[str, dict[str, onnx.TypeProto]] = {}
        self._tried: set[SubgraphValue] = set()
        self._inferred_model: onnx.ModelProto | None = None
        dims = (dim for value in proto.graph.input for dim in value.type.tensor_type.shape.dim)
        self._symbols = {dim.dim_param for dim in dims if dim.dim_param}

    def of(self, wanted: Iterable[SubgraphValue], end: int) -> list[onnx.ValueInfoProto]:
        """Return values with their types.

        Args:
            wanted: The values.
            end: The number of nodes of the main graph, from the first, that produce all of them.

        Raises:
            FormatError: A type is neither declared nor can be inferred.
        """
        wanted = list(wanted)
        missing = [
            value for value in wanted if value not in self._tried and not self._is_complete(value)
        ]
        if missing:
            self._tried.update(missing)
            self._infer(missing, end)
        return [onnx.ValueInfoProto(name=value.name, type=self._require(value)) for value in wanted]

    def fixed_values(self, wanted: Iterable[SubgraphValue], end: int) -> dict[str, Value]:
        """Compute the sizes among values of the main graph that follow from fixed shapes.

        Args:
            wanted: The values; their types are known (see `of`).
            end: The number of nodes of the main graph, from the first, that produce all of them.

        Returns:
            By name, those that are sizes and do not depend on the data of the inputs.
        """
        sizes = [value.name for value in wanted if self._may_be_size(value)]
        if not sizes:
            return {}
        model = self._inferred_model
        types = dict(_complete_types(self._main.graph if model is None else model.graph))
        nodes = self._main.nodes[:end]
        known = _fold_sizes(nodes, self._main.graph.initializer, types, self._proto.opset_import)
        return {name: known[name] for name in sizes if name in known}

    def _may_be_size(self, value: SubgraphValue) -> bool:
        """Return whether a value is an integer or a list of them, and not an input of the model."""
        if value.subgraph is not self._main or any(
            entry.name == value.name for entry in self._main.graph.input
        ):
            return False
        kind = self._require(value).tensor_type
        return kind.elem_type in _INTEGERS and kind.HasField("shape") and len(kind.shape.dim) < 2

    def _is_complete(self, value: SubgraphValue) -> bool:
        """Return whether a shape is declared by the file, or has only numbers and input symbols."""
        known = self._find(value)
        if known is None or not _has_shape(known):
            return False
        if _has_shape(_declared_type(value.subgraph, value.name)):
            return True
        dims = known.tensor_type.shape.dim
        return all(dim.HasField("dim_value") or dim.dim_param in self._symbols for dim in dims)

    def _require(self, value: SubgraphValue) -> onnx.TypeProto:
        known = self._find(value)
        if known is None:
            raise FormatError(
                f"the type of {value.name!r} is not in the file and cannot be inferred",
                hint="its operator is unknown to ONNX; add the value_info of its output",
            )
        return known

    def _find(self, value: SubgraphValue) -> onnx.TypeProto | None:
        """Find the type of a value in its graph or in those around it, the declared one first."""
        subgraph: Subgraph | None = value.subgraph
        while subgraph is not None:
            known = _declared_type(subgraph, value.name)
            if not _has_shape(known):
                known = self._inferred.get(subgraph.prefix, {}).get(value.name, known)
            if known is not None:
                return known
            subgraph = subgraph.outer
        return None

    def _infer(self, missing: list[SubgraphValue], end: int) -> None:
        """Infer types up to a node; where ONNX does not find a shape, fold sizes and repeat."""
        bare = self._bare_model(end)
        while True:
            self._inferred_model = infer_types(bare)
            self._record(self._inferred_model.graph, {value.name for value in missing})
            if all(map(self._is_complete, missing)) or not self._fold(bare):
                return

    def _record(self, graph: onnx.GraphProto, wanted: set[str]) -> None:
        """Keep the inferred types of these values, in the main graph and those inside it."""
        graphs = [("", graph)]
        if self._main.subgraphs:
            graphs = [(subgraph.prefix, subgraph.graph) for subgraph in Subgraph(graph)]
        for prefix, nested in graphs:
            known = self._inferred.setdefault(prefix, {})
            for name, kind in _complete_types(nested, wanted):
                self._clear_new_symbols(kind)
                if _has_shape(kind) or name not in known:
                    known[name] = kind

    def _clear_new_symbols(self, kind: onnx.TypeProto) -> None:
        """Remove the symbols that inference invents for sizes that it does not know."""
        for dim in kind.tensor_type.shape.dim if kind.HasField("tensor_type") else ():
            if dim.dim_param and dim.dim_param not in self._symbols:
                dim.ClearField("dim_param")

    def _bare_model(self, end: int) -> onnx.ModelProto:
        """Copy the model up to a node, without what inference does not read."""
        bare = onnx.ModelProto(ir_version=self._proto.ir_version)
        bare.opset_import.extend(self._proto.opset_import)
        bare.functions.extend(self._proto.functions)
        graph, main = bare.graph, self._main.graph
        graph.name = main.name
        graph.input.extend(main.input)
        graph.initializer.extend(
            TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            if len(tensor.raw_data) > _LARGE_BYTES
            else tensor
            for tensor in main.initializer
        )
        graph.sparse_initializer.extend(main.sparse_initializer)
        graph.value_info.extend(main.value_info)
        graph.node.extend(self._main.nodes[:end])
        for node in graph.node:
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
        return bare

    def _fold(self, bare: onnx.ModelProto) -> bool:
        """Replace nodes that compute sizes by initializers; return whether there were any."""
        graph = bare.graph
        model = self._inferred_model
        types = {} if model is None else dict(_complete_types(model.graph))
        values = _fold_sizes(graph.node, graph.initializer, types, bare.opset_import)
        remaining = onnx.GraphProto()
        remaining.node.extend(n for n in graph.node if any(o and o not in values for o in n.output))
        if len(remaining.node) == len(graph.node):
            return False
        for tensor in graph.initializer:
            values.pop(tensor.name, None)
        graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in values.items())
        del graph.node[:]
        graph.node.extend(remaining.node)
        return True


def _declared_type(subgraph: Subgraph, name: str) -> onnx.TypeProto | None:
    value = subgraph.declared.get(name)
    return value.type if value is not None and _is_complete_type(value.type) else None


def _complete_types(
    graph: onnx.GraphProto, wanted: Container[str] | None = None
) -> Iterator[tuple[str, onnx.TypeProto]]:
    for values in (graph.value_info, graph.input, graph.output):
        for value in values:
            name = value.name
            if (wanted is None or name in wanted) and _is_complete_type(value.type):
                yield name, value.type


def _has_shape(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and (
        kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.HasField("shape")
    )


def _is_complete_type(kind: onnx.TypeProto) -> bool:
    """Return whether a type is set, and for a tensor its element type as well."""
    which = kind.WhichOneof("value")
    return which is not None and (which != "tensor_type" or bool(kind.tensor_type.elem_type))


def _fold_sizes(
    nodes: Iterable[onnx.NodeProto],
    initializers: Iterable[TensorProto],
    types: Mapping[str, onnx.TypeProto],
    opsets: Iterable[onnx.OperatorSetIdProto],
) -> dict[str, Value]:
    """Compute the small values that depend at most on the shapes of the inputs, not their data."""
    values = {
        tensor.name: value
        for tensor in initializers
        if math.prod(tensor.dims) <= _MAX_ELEMENTS and (value := tensor_array(tensor)) is not None
    }
    for node in nodes:
        names = [name for name in node.input if name]
        if nested_graphs(node.attribute) or not is_repeatable(node.domain, node.op_type):
            continue
        if all(name in values for name in names):
            values.update(_evaluate(node, {name: values[name] for name in names}, opsets))
        elif len(names) == 1 and _depends_on_shape_only(node.domain, node.op_type):
            stand_in = _zeros(types.get(names[0]))
            if stand_in is not None:
                values.update(_evaluate(node, {names[0]: stand_in}, opsets))
    return values


@functools.cache
def _depends_on_shape_only(domain: str, op_type: str) -> bool:
    """Return whether an operator computes sizes from a tensor of any type, whatever its data."""
    schema = find_schema(domain, op_type)
    return (
        schema is not None
        and schema.has_data_propagation_function
        and len(schema.inputs) == len(schema.outputs) == 1
        and set(schema.outputs[0].types) == {"tensor(int64)"}
    )


@functools.cache
def only_moves_data(domain: str, op_type: str) -> bool:
    """Return whether an operator copies elements of its input: it takes strings as well."""
    schema = find_schema(domain, op_type)
    if schema is None or not schema.inputs or not schema.outputs:
        return False
    output = schema.outputs[0]
    takes_strings = any("string" in kind for kind in output.types)
    return takes_strings and any(each.type_str == output.type_str for each in schema.inputs)


def _zeros(kind: onnx.TypeProto | None) -> Value | None:
    """Return an array of a fixed shape that takes no memory; None for another shape."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return None
    try:
        return np.broadcast_to(np.zeros((), np.float32), [dim.dim_value for dim in dims])
    except ValueError:  # a size below zero, or more than an array can have
        return None


def _evaluate(
    node: onnx.NodeProto, inputs: Mapping[str, Value], opsets: Iterable[onnx.OperatorSetIdProto]
) -> dict[str, Value]:
    """Run one node; return nothing where that is impossible or a result is large."""
    from onnx.reference import ReferenceEvaluator  # here, because its import takes long

    names = [name for name in node.output if name]
    graph = onnx.helper.make_graph(
        [node],
        "node",
        [onnx.ValueInfoProto(name=name) for name in inputs],
        [onnx.ValueInfoProto(name=name) for name in names],
    )
    try:
        model = onnx.helper.make_model(graph, opset_imports=list(opsets))
        # The log(0) of a position table is part of the model: numpy must not warn about it.
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model).run(None, dict(inputs))
    except Exception:  # an operator or a case that the reference implementation does not have
        return {}
    small = all(
        isinstance(value, np.ndarray | np.generic) and value.size <= _MAX_ELEMENTS
        for value in results
    )
    return dict(zip(names, map(np.asarray, results), strict=True)) if small else {}


def tensor_array(tensor: TensorProto) -> Value | None:
    """Return the data of a tensor as an array.

    Returns:
        The array; None for data in a data file, of the wrong size, or of an unknown type.
    """
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, MemoryError):  # MemoryError for sizes below zero
        return None
