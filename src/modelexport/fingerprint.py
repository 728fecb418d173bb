"""What a node does, as bytes to compare, and what a whole graph is, as one digest."""

from __future__ import annotations

import hashlib

import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from modelexport.graph import Graph

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_STRIPPED = (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)


def attributes(node: onnx.NodeProto) -> bytes:
    """Everything that a node's attributes say, in one order; nested bodies and the names of tensors are left out."""
    if not node.attribute:
        return b""
    said = sorted([_attribute(attribute) for attribute in node.attribute])
    return b"".join([len(part).to_bytes(8, "little") + part for part in said])


def attributes_digest(node: onnx.NodeProto) -> str | None:
    """The attributes as a short digest; None where there are none."""
    return hashlib.blake2b(attributes(node), digest_size=8).hexdigest() if node.attribute else None


def _attribute(attribute: AttributeProto) -> bytes:
    kind = attribute.type
    if kind in _BODIES:
        return f"{attribute.name}\0{kind}\0{len(attribute.graphs)}".encode()
    if kind == AttributeProto.TENSOR:
        return f"{attribute.name}\0{kind}\0".encode() + tensor_content(attribute.t)
    if attribute.doc_string or kind in _STRIPPED:
        copy = AttributeProto()
        copy.CopyFrom(attribute)
        copy.ClearField("doc_string")
        for tensor in (*copy.tensors, *(part for s in _sparse(copy) for part in (s.values, s.indices))):
            tensor.ClearField("name")
            tensor.ClearField("doc_string")
        return copy.SerializeToString(deterministic=True)
    return attribute.SerializeToString(deterministic=True)


def _sparse(attribute: AttributeProto) -> list[onnx.SparseTensorProto]:
    single = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    return [*single, *attribute.sparse_tensors]


def tensor_content(tensor: TensorProto) -> bytes:
    """Type, shape and values, however the values are stored."""
    head = f"{tensor.data_type}{tuple(tensor.dims)}\0".encode()
    if tensor.HasField("raw_data"):
        return head + tensor.raw_data
    if tensor.data_type == TensorProto.STRING:
        return head + b"".join(len(text).to_bytes(8, "little") + text for text in tensor.string_data)
    try:
        return head + numpy_helper.to_array(tensor).tobytes()
    except (ValueError, TypeError):  # values that do not fit the shape: as they stand
        return head + tensor.SerializeToString(deterministic=True)


def topology_digest(graph: Graph) -> str:
    """The nodes, what they do and what they read, whatever their order; equal only if all of it is."""
    lines = [
        "\0".join((*node.outputs, "\1", *node.inputs, "\1", node.domain, node.op_type, attributes_digest(proto) or ""))
        for node, proto in zip(graph.nodes, graph.protos, strict=True)
    ]
    lines.sort()
    ends = "\0".join((*graph.inputs, "\1", *graph.outputs, "\1", *sorted(graph.initializers)))
    lines.append(ends)
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
