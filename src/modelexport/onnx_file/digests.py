"""Digests of nodes, tensors and graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.graph.flat import Graph, Node
from modelexport.graph.inference import tensor_array
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import (
    PACKED,
    DataFiles,
    _initializer_messages,
    external_location,
)

_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_STRIPPED = (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)


def attribute_digests(graph: Graph, as_stored: bool = False) -> list[str | None]:
    """For each node a digest of all that its attributes say, in any order; None where there are none.

    Nested bodies and the names of tensors are left out, and how a tensor's values are stored does not
    matter. `as_stored` is faster and takes tensors as they stand.
    """
    known: dict[bytes, str] = {}  # most nodes say what others said before
    digests: list[str | None] = [None] * len(graph.nodes)
    protos = graph.protos
    for index in graph.attributed:
        found = protos[index].attribute
        if len(found) == 1:
            stored = found[0].SerializeToString()
        else:
            stored = b"\0".join(sorted([attribute.SerializeToString() for attribute in found]))
        digest = known.get(stored)
        if digest is None:
            told = stored if as_stored and index not in graph.bodies else _normalized(found)
            digest = known[stored] = hashlib.blake2b(told, digest_size=16).hexdigest()
        digests[index] = digest
    return digests


def _normalized(attributes: Iterable[AttributeProto]) -> bytes:
    said = sorted([_attribute(attribute) for attribute in attributes])
    return b"".join([len(part).to_bytes(8, "little") + part for part in said])


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
        for tensor in (
            *copy.tensors,
            *(part for s in _sparse(copy) for part in (s.values, s.indices)),
        ):
            tensor.ClearField("name")
            tensor.ClearField("doc_string")
        return bytes(copy.SerializeToString(deterministic=True))
    return bytes(attribute.SerializeToString(deterministic=True))


def _sparse(attribute: AttributeProto) -> list[onnx.SparseTensorProto]:
    single = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    return [*single, *attribute.sparse_tensors]


def message_content(tensor: TensorProto | onnx.SparseTensorProto) -> bytes:
    """Type, shape and values, however the values are stored."""
    if isinstance(tensor, TensorProto):
        return tensor_content(tensor)
    shape = repr(tuple(tensor.dims)).encode()
    return shape + tensor_content(tensor.values) + tensor_content(tensor.indices)


def tensor_head(tensor: TensorProto) -> bytes:
    """Type and shape, which stand before the values in a tensor's content."""
    return f"{tensor.data_type}{tuple(tensor.dims)}\0".encode()


def tensor_content(tensor: TensorProto) -> bytes:
    """The same of a dense tensor; one whose values lie in a data file goes by its place there."""
    head = tensor_head(tensor)
    if tensor.HasField("raw_data") and tensor.data_type not in PACKED:
        return head + bytes(tensor.raw_data)
    if tensor.data_type == TensorProto.STRING:
        return head + b"".join(
            len(text).to_bytes(8, "little") + text for text in tensor.string_data
        )
    values = tensor_array(tensor)
    return head + bytes(
        tensor.SerializeToString(deterministic=True) if values is None else values.tobytes()
    )


def node_digests(graph: Graph) -> list[str | None]:
    """For each node a digest of what it does and makes beyond operator, inputs and first output; None for nothing."""
    return [
        digest
        if len(node.outputs) == 1 and not node.domain and not node.gaps
        else _combined(node, digest)
        for node, digest in zip(graph.nodes, attribute_digests(graph, as_stored=True), strict=True)
    ]


def _combined(node: Node, attributes: str | None) -> str:
    return _digest((node.domain, node.gaps, attributes, node.outputs))


def topology_digest(graph: Graph, work: Sequence[str | None]) -> str:
    """The nodes, what they do (`work_digests`) and what they read, whatever their order."""
    nodes = sorted(
        [
            (node.key, node.op_type, digest or "", node.inputs)
            for node, digest in zip(graph.nodes, work, strict=True)
        ]
    )
    return _digest((nodes, graph.inputs, graph.outputs, sorted(graph.initializers)))


def _digest(content: object) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:32]


def initializer_digests(data: wire.Buffer, proto: onnx.ModelProto, model: Path) -> dict[str, str]:
    """A digest of type, shape and values for each initializer; reads the weights, and data files beside the model."""
    digests: dict[str, str] = {}
    with DataFiles(model) as files:
        for tensor, field in zip(proto.graph.initializer, _initializer_messages(data), strict=True):
            if external_location(tensor) is None:
                digests[tensor.name] = _inline_digest(data, tensor, field)
            else:
                digests[tensor.name] = _values_digest(tensor, files.values(tensor))
    for sparse in proto.graph.sparse_initializer:
        digests[sparse.values.name] = hashlib.sha256(message_content(sparse)).hexdigest()
    return digests


def _inline_digest(data: wire.Buffer, tensor: TensorProto, field: wire.Field) -> str:
    raw = None if tensor.data_type in PACKED else wire.raw_data(data, field)
    if raw is not None:
        return _values_digest(tensor, raw)
    whole = TensorProto.FromString(bytes(data[field.body : field.end]))
    return hashlib.sha256(tensor_content(whole)).hexdigest()


def _values_digest(tensor: TensorProto, values: wire.Buffer) -> str:
    digest = hashlib.sha256(tensor_head(tensor))
    digest.update(values)
    return digest.hexdigest()
