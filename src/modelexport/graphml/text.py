"""The words of a drawing: readable attributes and types, and the label of every box."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.errors import FormatError
from modelexport.graph.flat import function_key
from modelexport.graph.inference import infer_types, tensor_array
from modelexport.graphml.elements import GroupTree, scoped_graphs, value_key
from modelexport.graphml.format import INITIALIZERS, Kind, escape_name
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import initializer_fields, open_mapped, parse_model
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.tables import dim_size, dtype_name

MOST_VALUES = 16
_LONGEST_LABEL = 48
_LARGEST_INFERRED = 2 << 20
"""Bytes of nodes up to which types are inferred: inference takes a multiple of the graph."""

Types = dict[str, tuple[str, str]]
"""Element type and shape of values by their keys."""
_Readable = int | float | str


def attributes_text(attributes: Iterable[AttributeProto], most_values: int = MOST_VALUES) -> str:
    """Write the attributes of a node as JSON; nothing if there are none.

    Numbers and texts are written as they are, everything else is described.

    Args:
        attributes: The attributes.
        most_values: Up to how many values a tensor is written with them.
    """
    values = {escape_name(each.name): describe_attribute(each, most_values) for each in attributes}
    return escape_name(msgspec.json.encode(values).decode()) if values else ""


def describe_attribute(
    attribute: AttributeProto, most_values: int = MOST_VALUES
) -> _Readable | list[_Readable]:
    """Return numbers and texts as they are, and a description of anything else."""
    if attribute.ref_attr_name:
        return f"@{escape_name(attribute.ref_attr_name)}"
    try:
        value = onnx.helper.get_attribute_value(attribute)
    except ValueError:  # of a type that this version of ONNX does not know
        return "undefined"
    if isinstance(value, list):
        return [_readable(each, most_values) for each in value]
    return _readable(value, most_values)


def _readable(value: object, most_values: int) -> _Readable:
    """Return a number or text as it is, and a description of anything else."""
    match value:
        case int():
            return value
        case float():
            return _number(value)
        case bytes():
            return _text(value)
        case TensorProto():
            return describe_tensor(value, most_values)
        case onnx.SparseTensorProto():
            return f"sparse {dtype_name(value.values.data_type)}{shape_text(value.dims)}"
        case onnx.GraphProto():
            return f"graph {escape_name(value.name)}"
        case onnx.TypeProto():
            return "".join(type_and_shape(value))
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


def describe_tensor(tensor: TensorProto, most_values: int = MOST_VALUES) -> str:
    """Write the type of a tensor, and its values if they are few."""
    text = dtype_name(tensor.data_type) + shape_text(tensor.dims)
    if math.prod(tensor.dims) > most_values or tensor.data_type == TensorProto.STRING:
        return text
    values = tensor_array(tensor)
    return text if values is None else f"{text} = {', '.join(map(str, values.reshape(-1)))}"


def type_and_shape(declared: onnx.TypeProto) -> tuple[str, str]:
    """Write a type: the element type, and the shape in brackets; empty where there is none."""
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
            if group.kind == Kind.MODULE and group.name:
                name = name.removeprefix(f"{escape_name(group.name)}.")
        declared = shorten("".join(self._types.get(terminal.key, ())))
        return f"{shorten(name)}\n{declared}".rstrip()

    def _group_label(self, number: int) -> str:
        group = self._tree.groups[number]
        if group.element >= 0:
            return self._operator_label(group.element)
        if group.kind != Kind.MODULE:
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


def load_with_types(path: Path) -> tuple[TaggedModel, Types]:
    """Load a model file, and find the types of its values.

    Raises:
        FileError: The file cannot be read.
        FormatError: It is not an ONNX model.
    """
    with open_mapped(path) as data:
        fields = initializer_fields(data, path)
        model = TaggedModel(path, parse_model(data, path, fields))
        return model, find_types(model, data, fields)


def find_types(model: TaggedModel, data: wire.Buffer, initializers: Sequence[wire.Field]) -> Types:
    """Find the types of values that the file declares, and those that ONNX infers.

    Args:
        model: The model, without the values of its initializers.
        data: The model file.
        initializers: The fields of the initializers of its main graph.
    """
    written = functools.cache(lambda stored: type_and_shape(onnx.TypeProto.FromString(stored)))
    inferred = _infer_types(model, data, initializers)
    types: Types = {value.name: type_and_shape(value.type) for value in inferred}
    for _, prefix, graph, _ in scoped_graphs(model.graph, model.proto):
        for value in (*graph.value_info, *graph.input, *graph.output):
            # Most values are of few types.
            types[value_key(prefix, value.name)] = written(value.type.SerializeToString())
        for tensor in graph.initializer:
            declared = dtype_name(tensor.data_type), shape_text(tensor.dims)
            types[value_key(prefix, tensor.name)] = declared
        for sparse in graph.sparse_initializer:
            declared = f"sparse {dtype_name(sparse.values.data_type)}", shape_text(sparse.dims)
            types[value_key(prefix, sparse.values.name)] = declared
    for function in model.proto.functions:
        prefix = f"{function_key(function.domain, function.name, function.overload)}/"
        for value in function.value_info:
            types[value_key(prefix, value.name)] = type_and_shape(value.type)
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
    if sum(field.end - field.payload for field in nodes) > _LARGEST_INFERRED:
        return ()
    try:
        return list(infer_types(parse_model(data, model.path, initializers)).graph.value_info)
    except FormatError:  # the drawing is complete without them
        return ()
