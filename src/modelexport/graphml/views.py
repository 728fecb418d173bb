"""What the GraphML says of an element in words: for people and ordinary readers. The exact form stands beside it."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.graph.inference import tensor_array
from modelexport.tagged.tables import dim_size, dtype_name

_MOST_VALUES = 16
_NOT_XML = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

Value = int | float | str | list[int] | list[float] | list[str]


def plain(text: str | bytes) -> str:
    """A name as XML can hold it: what is no character there, and what editors change, as its code."""
    if isinstance(text, bytes):  # protobuf gives bytes for a name that is not UTF-8
        text = text.decode("utf-8", "backslashreplace")
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def attributes_text(attributes: Iterable[AttributeProto]) -> str:
    """The attributes as JSON, each in a readable form; nothing where there are none."""
    told = {plain(attribute.name): readable(attribute) for attribute in attributes}
    return plain(msgspec.json.encode(told).decode()) if told else ""


def readable(attribute: AttributeProto) -> Value:
    """An attribute's value: numbers and texts as they are, everything else described."""
    kind = attribute.type
    if attribute.ref_attr_name:
        return f"@{plain(attribute.ref_attr_name)}"
    if kind == AttributeProto.INT:
        return attribute.i
    if kind == AttributeProto.FLOAT:
        return _number(attribute.f)
    if kind == AttributeProto.STRING:
        return _text(attribute.s)
    if kind == AttributeProto.INTS:
        return list(attribute.ints)
    if kind == AttributeProto.FLOATS:
        return [_number(value) for value in attribute.floats]  # type: ignore[return-value]
    if kind == AttributeProto.STRINGS:
        return [_text(value) for value in attribute.strings]
    return _described(attribute)


def _described(attribute: AttributeProto) -> Value:
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        return _tensor(attribute.t)
    if kind == AttributeProto.TENSORS:
        return [_tensor(tensor) for tensor in attribute.tensors]
    if kind == AttributeProto.SPARSE_TENSOR:
        return _sparse(attribute.sparse_tensor)
    if kind == AttributeProto.SPARSE_TENSORS:
        return [_sparse(tensor) for tensor in attribute.sparse_tensors]
    if kind == AttributeProto.GRAPH:
        return f"graph {plain(attribute.g.name)}"
    if kind == AttributeProto.GRAPHS:
        return [f"graph {plain(graph.name)}" for graph in attribute.graphs]
    if kind == AttributeProto.TYPE_PROTO:
        return type_text(attribute.tp)
    if kind == AttributeProto.TYPE_PROTOS:
        return [type_text(declared) for declared in attribute.type_protos]
    return "undefined"


def _number(value: float) -> float | str:
    """A 32-bit float in as few digits as tell it from all others."""
    return float(str(np.float32(value))) if math.isfinite(value) else str(value)


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()
    return (
        text
        if text == plain(text) and not text.startswith("base64:")
        else "base64:" + _encoded(value)
    )


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _tensor(tensor: TensorProto) -> str:
    shape = ",".join(map(str, tensor.dims))
    told = f"{dtype_name(tensor.data_type)}[{shape}]"
    if math.prod(tensor.dims) > _MOST_VALUES or tensor.data_type == TensorProto.STRING:
        return told
    values = tensor_array(tensor)
    return told if values is None else f"{told} = {', '.join(map(str, values.reshape(-1)))}"


def _sparse(tensor: onnx.SparseTensorProto) -> str:
    return f"sparse {dtype_name(tensor.values.data_type)}[{','.join(map(str, tensor.dims))}]"


def type_text(declared: onnx.TypeProto) -> str:
    """A type in words, its shape included."""
    element, shape = type_and_shape(declared)
    return element + shape


def type_and_shape(declared: onnx.TypeProto) -> tuple[str, str]:
    """The element type of a tensor and its shape in brackets; the shape is empty where there is none."""
    kind = declared.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(declared, kind)
        before = "sparse " if kind == "sparse_tensor_type" else ""
        shape = (
            shape_text([dim_size(dim) for dim in tensor.shape.dim])
            if tensor.HasField("shape")
            else ""
        )
        return before + dtype_name(tensor.elem_type), shape
    if kind in ("sequence_type", "optional_type"):
        inner = type_text(getattr(declared, kind).elem_type)
        return f"{kind.removesuffix('_type')}({inner})", ""
    if kind == "map_type":
        return (
            f"map({dtype_name(declared.map_type.key_type)}, {type_text(declared.map_type.value_type)})",
            "",
        )
    return plain(kind or ""), ""


def shape_text(sizes: Sequence[int | str | None]) -> str:
    return f"[{','.join('?' if size is None else plain(str(size)) for size in sizes)}]"


class EditError(ValueError):
    """A readable form was changed to something that it cannot stand for."""


def says_the_same(text: str, node: onnx.NodeProto, *, complete: bool) -> bool:
    """Whether a text says what the attributes are; of tensors that lack their values it is taken to."""
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return False
    known = {plain(attribute.name): attribute for attribute in node.attribute}
    return said.keys() == known.keys() and all(
        readable(known[name]) == value
        or (not complete and known[name].type not in _SINGLE.keys() | _SEVERAL.keys())
        for name, value in said.items()
    )


def edited_attributes(node: onnx.NodeProto, text: str, schema_kinds: Mapping[str, int]) -> None:
    """Give a node the attributes that the text says; what it says unchanged stays exactly what it was.

    `schema_kinds` are the kinds of the attributes that the operator may have, as far as they are known.
    """
    try:
        wanted: dict[str, Any] = (
            msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise EditError(f"its attributes are no JSON object ({error})") from error
    for place in reversed(range(len(node.attribute))):
        attribute = node.attribute[place]
        name = plain(attribute.name)
        if name not in wanted:
            del node.attribute[place]
            continue
        value = wanted.pop(name)
        if readable(attribute) != value:
            told = attribute.doc_string
            attribute.CopyFrom(_made(attribute.name, value, attribute.type))
            if told:
                attribute.doc_string = told
    for name, value in wanted.items():
        node.attribute.append(_made(name, value, schema_kinds.get(name)))


def _made(name: str, value: Any, kind: int | None) -> AttributeProto:
    """An attribute of this kind, or of the one that the value has."""
    try:
        if kind is not None:
            value = _as_kind(value, kind)
        made: AttributeProto = onnx.helper.make_attribute(name, _as_bytes(value), attr_type=kind)
    except KeyError as error:
        raise EditError(
            f"its attribute {name} is no number or text, and cannot be edited here"
        ) from error
    except (ValueError, TypeError, OverflowError, AssertionError) as error:
        raise EditError(f"its attribute {name} cannot be {value!r}") from error
    return made


_SINGLE: dict[int, type] = {
    AttributeProto.INT: int,
    AttributeProto.FLOAT: float,
    AttributeProto.STRING: str,
}
_SEVERAL: dict[int, type] = {
    AttributeProto.INTS: int,
    AttributeProto.FLOATS: float,
    AttributeProto.STRINGS: str,
}


def _as_kind(value: Any, kind: int) -> Any:
    if kind in _SEVERAL:
        if not isinstance(value, list):
            raise TypeError(value)
        return [_converted(item, _SEVERAL[kind]) for item in value]
    return _converted(value, _SINGLE[kind])


def _converted(value: Any, kind: type) -> Any:
    """A number or text of this kind; a float may be written as a whole number, or as the text `inf` or `nan`."""
    if kind is float and (isinstance(value, int | float) or value in ("inf", "-inf", "nan")):
        number = float(value)
        if math.isfinite(number) and abs(number) > float(np.finfo(np.float32).max):
            raise OverflowError(value)
        return number
    if type(value) is not kind:
        raise TypeError(value)
    return value


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(item) for item in value]
    if isinstance(value, str) and value.startswith("base64:"):
        return base64.b64decode(value.removeprefix("base64:"), validate=True)
    return value
