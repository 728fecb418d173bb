"""The words of a drawing: readable attributes and types, and the label of every box."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.graph.flat import function_key, nested_graphs, subgraph_prefix
from modelexport.graph.inference import tensor_array
from modelexport.graphml.elements import GroupTree, value_key
from modelexport.graphml.format import INITIALIZERS, MODULE, escape_name
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import parse_model
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.tables import dim_size, dtype_name

_MOST_VALUES = 16
_LONGEST_LABEL = 48
_LARGEST_INFERRED = 2 << 20
"""Bytes of nodes up to which types are inferred: inference takes a multiple of the graph."""

Types = dict[str, tuple[str, str]]
"""Element type and shape of values by their keys."""
_Readable = int | float | str | list[int] | list[float | str] | list[str]


def attributes_text(attributes: Iterable[AttributeProto]) -> str:
    """Write attributes as a JSON object.

    Args:
        attributes: The attributes of a node.

    Returns:
        Numbers and texts as they are, everything else described; empty if there are none.
    """
    values = {escape_name(attribute.name): _readable(attribute) for attribute in attributes}
    return escape_name(msgspec.json.encode(values).decode()) if values else ""


def _readable(attribute: AttributeProto) -> _Readable:
    """Return a number or text as it is, and a description of anything else."""
    if attribute.ref_attr_name:
        return f"@{escape_name(attribute.ref_attr_name)}"
    match attribute.type:
        case AttributeProto.INT:
            return attribute.i
        case AttributeProto.FLOAT:
            return _number(attribute.f)
        case AttributeProto.STRING:
            return _text(attribute.s)
        case AttributeProto.INTS:
            return list(attribute.ints)
        case AttributeProto.FLOATS:
            return list(map(_number, attribute.floats))
        case AttributeProto.STRINGS:
            return list(map(_text, attribute.strings))
        case AttributeProto.TENSOR:
            return _describe_tensor(attribute.t)
        case AttributeProto.TENSORS:
            return list(map(_describe_tensor, attribute.tensors))
        case AttributeProto.SPARSE_TENSOR:
            return _describe_sparse(attribute.sparse_tensor)
        case AttributeProto.SPARSE_TENSORS:
            return list(map(_describe_sparse, attribute.sparse_tensors))
        case AttributeProto.GRAPH:
            return f"graph {escape_name(attribute.g.name)}"
        case AttributeProto.GRAPHS:
            return [f"graph {escape_name(graph.name)}" for graph in attribute.graphs]
        case AttributeProto.TYPE_PROTO:
            return "".join(type_and_shape(attribute.tp))
        case AttributeProto.TYPE_PROTOS:
            return ["".join(type_and_shape(declared)) for declared in attribute.type_protos]
    return "undefined"


def _number(value: float) -> float | str:
    """Return a 32-bit float with as few digits as distinguish it from all others."""
    return float(str(np.float32(value))) if math.isfinite(value) else str(value)


def _text(value: bytes) -> str:
    """Return a text that XML can hold; any other bytes in base64."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text == escape_name(text) and not text.startswith("base64:"):
        return text
    return "base64:" + base64.b64encode(value).decode()


def _describe_tensor(tensor: TensorProto) -> str:
    text = dtype_name(tensor.data_type) + shape_text(tensor.dims)
    if math.prod(tensor.dims) > _MOST_VALUES or tensor.data_type == TensorProto.STRING:
        return text
    values = tensor_array(tensor)
    return text if values is None else f"{text} = {', '.join(map(str, values.reshape(-1)))}"


def _describe_sparse(tensor: onnx.SparseTensorProto) -> str:
    return f"sparse {dtype_name(tensor.values.data_type)}{shape_text(tensor.dims)}"


def type_and_shape(declared: onnx.TypeProto) -> tuple[str, str]:
    """Write a type.

    Args:
        declared: The type of a value.

    Returns:
        The element type of a tensor and its shape in brackets; the shape is empty where there
        is none.
    """
    kind = declared.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(declared, kind)
        element = dtype_name(tensor.elem_type)
        has_shape = tensor.HasField("shape")
        return (
            f"sparse {element}" if kind == "sparse_tensor_type" else element,
            shape_text([dim_size(dim) for dim in tensor.shape.dim]) if has_shape else "",
        )
    if kind in ("sequence_type", "optional_type"):
        inner = "".join(type_and_shape(getattr(declared, kind).elem_type))
        return f"{kind.removesuffix('_type')}({inner})", ""
    if kind == "map_type":
        inner = "".join(type_and_shape(declared.map_type.value_type))
        return f"map({dtype_name(declared.map_type.key_type)}, {inner})", ""
    return escape_name(kind or ""), ""


def shape_text(sizes: Iterable[int | str | None]) -> str:
    """Write a shape in brackets, with `?` for an unknown size."""
    return f"[{','.join('?' if size is None else escape_name(str(size)) for size in sizes)}]"


class Labels:
    """The label of every element, and of every group by the complement of its number."""

    def __init__(self, model: TaggedModel, tree: GroupTree, types: Types) -> None:
        self._graph = model.graph
        self._modules = model.modules
        self._tree = tree
        self._types = types

    def __call__(self, member: int) -> str:
        """Return the label of a member of a group."""
        if member < 0:
            label = self._group_label(~member)
        elif member < len(self._graph.nodes):
            label = self._operator_label(member)
        else:
            label = self._terminal_label(member)
        return label or "(no name)"

    def _operator_label(self, index: int) -> str:
        return shorten(escape_name(self._graph.nodes[index].op_type))

    def _terminal_label(self, member: int) -> str:
        terminal = self._tree.elements.terminal(member)
        name = escape_name(terminal.name)
        if terminal.kind in INITIALIZERS:
            group = self._tree.groups[self._tree.parents[member]]
            if group.kind == MODULE and group.name:
                name = name.removeprefix(f"{escape_name(group.name)}.")
        declared = "".join(self._types.get(terminal.key, ()))
        return f"{shorten(name)}\n{shorten(declared)}".rstrip()

    def _group_label(self, number: int) -> str:
        group = self._tree.groups[number]
        if group.element >= 0:
            return self._operator_label(group.element)
        if group.kind != MODULE:
            return shorten(escape_name(group.name))
        record = self._modules.get(group.name)
        class_name = "" if record is None else record.class_.rpartition(".")[2]
        name = group.name.rpartition(".")[2]
        label = shorten(escape_name(": ".join(filter(None, (name, class_name))) or "(root)"))
        if record is None or record.status == "nodes":
            return label
        return f"{label}, {escape_name(record.status)}"


def shorten(text: str) -> str:
    """Shorten a long name at its beginning: the end is more specific."""
    return text if len(text) <= _LONGEST_LABEL else f"…{text[1 - _LONGEST_LABEL :]}"


def find_types(model: TaggedModel, data: wire.Buffer, initializers: Sequence[wire.Field]) -> Types:
    """Find the type and shape of every value.

    Args:
        model: The model, without the values of its initializers.
        data: The model file.
        initializers: The fields of the initializers of its main graph.

    Returns:
        The types that the file declares, and those that ONNX infers, by the keys of the values.
    """
    inferred = _infer_types(model, data, initializers)
    types: Types = {value.name: type_and_shape(value.type) for value in inferred}
    known: dict[bytes, tuple[str, str]] = {}  # most values are of few types

    def add(graph: onnx.GraphProto, prefix: str) -> None:
        for values in (graph.value_info, graph.input, graph.output):
            for value in values:
                stored = value.type.SerializeToString()
                if stored not in known:
                    known[stored] = type_and_shape(value.type)
                types[value_key(prefix, value.name)] = known[stored]
        for tensor in graph.initializer:
            declared = dtype_name(tensor.data_type), shape_text(tensor.dims)
            types[value_key(prefix, tensor.name)] = declared
        for sparse in graph.sparse_initializer:
            declared = f"sparse {dtype_name(sparse.values.data_type)}", shape_text(sparse.dims)
            types[value_key(prefix, sparse.values.name)] = declared

    add(model.proto.graph, "")
    for function in model.proto.functions:
        prefix = f"{function_key(function.domain, function.name, function.overload)}/"
        for value in function.value_info:
            types[value_key(prefix, value.name)] = type_and_shape(value.type)
    for index in model.graph.bodies:
        for label, nested in nested_graphs(model.graph.protos[index].attribute):
            add(nested, subgraph_prefix(model.graph.nodes[index].key, label))
    return types


def _infer_types(
    model: TaggedModel, data: wire.Buffer, initializers: Sequence[wire.Field]
) -> Sequence[onnx.ValueInfoProto]:
    """Infer the types that a file does not declare, as those of torchscript's exporter."""
    declared = {value.name for value in (*model.proto.graph.value_info, *model.proto.graph.output)}
    main = (node for node in model.graph.nodes if node.enclosing < 0 and not node.function)
    if declared.issuperset(name for node in main for name in node.outputs):
        return ()
    nodes = (field for graph in wire.graphs(data) for field in wire.nodes(data, graph))
    if sum(field.end - field.body for field in nodes) > _LARGEST_INFERRED:
        return ()
    whole = parse_model(data, model.path, initializers)
    try:
        return list(onnx.shape_inference.infer_shapes(whole, data_prop=True).graph.value_info)
    except Exception:  # inference raises several unrelated kinds; types are a courtesy here
        return ()
