"""Digests of nodes, tensors and graphs, and the sizes of initializers.

The results of `node_digests`, `topology_digest`, `text_digest` and `record_digest` are written
into files: they must stay the same from version to version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, Initializer
from modelexport.graph.inference import tensor_array
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import DataFiles, external_location, initializer_fields

_SUBGRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_WITH_NAMES = (AttributeProto.TENSORS, AttributeProto.SPARSE_TENSOR, AttributeProto.SPARSE_TENSORS)
_PACKED: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
"""Element types of which several share a byte, with the bits of one."""
_MAX_ELEMENTS = 1 << 60


def text_digest(text: bytes) -> str:
    """Return a digest of a text, 32 hexadecimal digits."""
    return hashlib.sha256(text).hexdigest()[:32]


def record_digest(content: object) -> str:
    """Return a digest of anything that msgspec can encode, 32 hexadecimal digits."""
    return text_digest(msgspec.msgpack.encode(content))


def attribute_digests(graph: Graph, as_stored: bool = False) -> list[str | None]:
    """Return a digest of the attributes of each node, whatever their order.

    Subgraphs and the names of tensors are left out, and how a tensor's data is stored does not
    matter.

    Args:
        graph: The nodes.
        as_stored: Whether tensors are digested as they are stored, which is faster.

    Returns:
        The digests; None for a node without attributes.
    """
    known: dict[bytes, str] = {}  # most nodes have the same attributes as others
    digests: list[str | None] = [None] * len(graph.nodes)
    protos = graph.protos
    for index in graph.attributed:
        attributes = protos[index].attribute
        if len(attributes) == 1:
            stored = attributes[0].SerializeToString()
        else:
            stored = b"\0".join(sorted([entry.SerializeToString() for entry in attributes]))
        digest = known.get(stored)
        if digest is None:
            exact = as_stored and index not in graph.subgraphs
            content = stored if exact else _normalize(attributes)
            digest = known[stored] = hashlib.blake2b(content, digest_size=16).hexdigest()
        digests[index] = digest
    return digests


def _normalize(attributes: Iterable[AttributeProto]) -> bytes:
    contents = sorted([_attribute_content(attribute) for attribute in attributes])
    return b"".join([len(content).to_bytes(8, "little") + content for content in contents])


def _attribute_content(attribute: AttributeProto) -> bytes:
    kind = attribute.type
    if kind in _SUBGRAPHS:
        return f"{attribute.name}\0{kind}\0{len(attribute.graphs)}".encode()
    if kind == AttributeProto.TENSOR:
        return f"{attribute.name}\0{kind}\0".encode() + _tensor_content(attribute.t)
    if attribute.doc_string or kind in _WITH_NAMES:
        copy = AttributeProto()
        copy.CopyFrom(attribute)
        copy.ClearField("doc_string")
        sparse = [copy.sparse_tensor] if copy.HasField("sparse_tensor") else []
        parts = (part for s in (*sparse, *copy.sparse_tensors) for part in (s.values, s.indices))
        for tensor in (*copy.tensors, *parts):
            tensor.ClearField("name")
            tensor.ClearField("doc_string")
        attribute = copy
    return bytes(attribute.SerializeToString(deterministic=True))


def message_content(tensor: Initializer) -> bytes:
    """Return type, shape and data of a tensor, as bytes that are equal for equal tensors.

    Where the data is in a data file, its location stands for it.
    """
    if isinstance(tensor, TensorProto):
        return _tensor_content(tensor)
    shape = repr(tuple(tensor.dims)).encode()
    return shape + _tensor_content(tensor.values) + _tensor_content(tensor.indices)


def _tensor_head(tensor: TensorProto) -> bytes:
    """Return type and shape, which come before the data in a tensor's content."""
    return f"{tensor.data_type}{tuple(tensor.dims[:])}\0".encode()


def _tensor_content(tensor: TensorProto) -> bytes:
    head = _tensor_head(tensor)
    if tensor.HasField("raw_data") and tensor.data_type not in _PACKED:
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
    """Return a digest of what each node does beyond operator, inputs and first output.

    Returns:
        The digests of attributes, domain, further outputs and omitted ones; None for none of them.
    """
    return [
        digest
        if len(node.outputs) == 1 and not node.domain and not node.gaps
        else record_digest((node.domain, node.gaps, digest, node.outputs))
        for node, digest in zip(graph.nodes, attribute_digests(graph, as_stored=True), strict=True)
    ]


def topology_digest(graph: Graph, work: Sequence[str | None]) -> str:
    """Return a digest of nodes, edges, inputs, outputs and initializer names of a graph.

    It does not depend on the order of the nodes; `work` is what `node_digests` returns for them.
    """
    nodes = sorted(
        [
            (node.key, node.op_type, digest or "", node.inputs)
            for node, digest in zip(graph.nodes, work, strict=True)
        ]
    )
    return record_digest((nodes, graph.inputs, graph.outputs, sorted(graph.initializers)))


def initializer_digests(data: wire.Buffer, proto: onnx.ModelProto, model: Path) -> dict[str, str]:
    """Return digests of type, shape and data of the initializers of the main graph, by name.

    Args:
        data: The bytes of the model file.
        proto: The model.
        model: The model file; its data files are read as well.

    Raises:
        FileError: A data file is missing.
        FormatError: The file is damaged.
    """
    digests: dict[str, str] = {}
    with DataFiles(model) as files:
        fields = initializer_fields(data, model)
        for tensor, field in zip(proto.graph.initializer, fields, strict=True):
            values: wire.Buffer | None
            if external_location(tensor) is not None:
                values = files.values(tensor)
            else:
                values = None if tensor.data_type in _PACKED else wire.raw_data(data, field)
            if values is None:
                whole = TensorProto.FromString(bytes(data[field.payload : field.end]))
                digest = hashlib.sha256(_tensor_content(whole))
            else:
                # Not as one content: that would copy the data.
                digest = hashlib.sha256(_tensor_head(tensor))
                digest.update(values)
            digests[tensor.name] = digest.hexdigest()
    for sparse in proto.graph.sparse_initializer:
        digests[sparse.values.name] = hashlib.sha256(message_content(sparse)).hexdigest()
    return digests


class InitializerSize(msgspec.Struct, frozen=True, gc=False):
    """The size of one initializer, as declared by its type and shape."""

    name: str
    elements: int
    bytes: int


def initializer_sizes(proto: onnx.ModelProto) -> list[InitializerSize]:
    """Return the sizes of the initializers of the main graph; of sparse ones, what they store.

    Raises:
        FormatError: No memory holds a tensor of such a shape.
    """
    sizes = [
        InitializerSize(tensor.name, _elements(tensor), _byte_size(tensor))
        for tensor in proto.graph.initializer
    ]
    for sparse in proto.graph.sparse_initializer:
        values = sparse.values
        stored = _byte_size(values) + _byte_size(sparse.indices)
        sizes.append(InitializerSize(values.name, _elements(values), stored))
    return sizes


def _elements(tensor: TensorProto) -> int:
    elements: int = math.prod(tensor.dims)
    if not 0 <= elements <= _MAX_ELEMENTS:
        size = "a negative size" if elements < 0 else "more elements than fit into any memory"
        raise FormatError(
            f"initializer {tensor.name!r} has {size}",
            hint="its shape is damaged; export the model again",
        )
    return elements


def _byte_size(tensor: TensorProto) -> int:
    return (_elements(tensor) * _bits(tensor.data_type) + 7) // 8


def _bits(data_type: int) -> int:
    """Return the bits of one element; 0 where that depends on its value."""
    if data_type in _PACKED:
        return _PACKED[data_type]
    if data_type == TensorProto.STRING:
        return 0
    try:
        return 8 * int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    except (KeyError, TypeError):
        return 0
