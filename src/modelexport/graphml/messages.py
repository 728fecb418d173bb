"""The exact form of every element: its serialized message without what other elements hold.

Values are taken out of tensors, and put back bit for bit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from modelexport.errors import ArgumentError, FormatError
from modelexport.graph.flat import nested_graphs
from modelexport.graphml.elements import Terminal, scoped_graphs
from modelexport.graphml.format import Kind
from modelexport.graphml.values import (
    EXTERNAL,
    INTEGER_FIELDS,
    PLAIN_FIELDS,
    Section,
    Span,
    Store,
    Values,
    read_chunks,
)
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import external_location, external_span, parse_model
from modelexport.tagged.model import TaggedModel

SPARSE_FIELD = 15
"""The field number of sparse initializers in GraphProto, fixed by the ONNX specification."""
_FUNCTION_NODE = 7
_HAS_TENSORS = {
    AttributeProto.UNDEFINED,
    AttributeProto.TENSOR,
    AttributeProto.TENSORS,
    AttributeProto.SPARSE_TENSOR,
    AttributeProto.SPARSE_TENSORS,
}

TensorMessage = onnx.NodeProto | TensorProto | onnx.SparseTensorProto
"""A message that tensors are in."""


class Message(NamedTuple):
    """A serialized message, and the values taken out of its tensors: path, field, values."""

    data: bytes
    values: Sequence[tuple[str, str, Values]] = ()


def parse_without_nodes(
    data: wire.Buffer, initializers: Sequence[wire.Field], path: Path
) -> onnx.ModelProto:
    """Parse a model without the nodes of its main graph and the values of its initializers.

    Args:
        data: The model file.
        initializers: The fields of the initializers of its main graph.
        path: The path of the file, for messages.

    Raises:
        FormatError: If the file is not an ONNX model.
    """
    heads = [wire.initializer(b"".join(wire.without_values(data, each))) for each in initializers]
    dropped = {wire.MODEL_GRAPH: {wire.GRAPH_NODE, wire.GRAPH_INITIALIZER}}
    return parse_model(_drop_fields(data, dropped, heads), path, whole=True)


def _drop_fields(
    data: wire.Buffer, dropped: Mapping[int, Container[int]], added: Iterable[bytes] = ()
) -> bytes:
    """Copy a model without some fields of its graph and functions; add fields to its graph."""
    left = [*added]

    def edit(field: wire.Field) -> list[wire.Buffer] | None:
        numbers = dropped.get(field.number)
        if numbers is None:
            return None
        kept = wire.replace_fields(
            data, field.payload, field.end, lambda each: [] if each.number in numbers else None
        )
        if field.number == wire.MODEL_GRAPH:
            kept += left
            left.clear()  # protobuf merges the graphs of a file that has several
        return wire.delimited(field.number, kept)

    return b"".join(wire.replace_fields(data, 0, len(data), edit))


class MessageMaker:
    """Makes the messages of a model's operators and initializers."""

    def __init__(
        self,
        model: TaggedModel,
        data: wire.Buffer,
        initializers: Sequence[wire.Field],
        store: Store,
        targets: Container[Path],
    ) -> None:
        """Prepare to take a model file apart.

        Args:
            model: The model, without the values of its initializers.
            data: The model file.
            initializers: The fields of the initializers of its main graph.
            store: Where values go.
            targets: Resolved paths that will be written, which must not be data files.
        """
        self._path = model.path
        self._data = data
        self._initializers = initializers
        self._graph = graph = model.graph
        self._store = store
        self._targets = targets
        self._graphs = {each.scope: each.proto for each in scoped_graphs(graph, model.proto)}

    def frame(self) -> Message:
        """Return the model without its initializers and the nodes of main graph and functions."""
        graph = {wire.GRAPH_NODE, wire.GRAPH_INITIALIZER, SPARSE_FIELD}
        dropped = {wire.MODEL_GRAPH: graph, wire.MODEL_FUNCTIONS: {_FUNCTION_NODE}}
        return Message(_drop_fields(self._data, dropped))

    def operator(self, index: int, node: onnx.NodeProto) -> Message:
        """Return the message of the operator with an index, without what is in its subgraphs.

        Raises:
            ArgumentError: If an output file is a data file of the model.
        """
        if index in self._graph.subgraphs:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            for _, graph in nested_graphs(copy.attribute):
                for field in ("node", "initializer", "sparse_initializer"):
                    graph.ClearField(field)
            node = copy
        return self._take_values(node, of_initializer=False)

    def initializer(self, terminal: Terminal) -> Message:
        """Return the message of an initializer.

        Raises:
            ArgumentError: If an output file is a data file of the model.
        """
        graph = self._graphs[terminal.scope]
        if terminal.kind != Kind.INITIALIZER:
            return self._take_values(graph.sparse_initializer[terminal.position])
        if terminal.scope:
            return self._take_values(graph.initializer[terminal.position])
        # The values of the main graph's initializers are not in memory.
        rest, values = _split_in_file(self._data, self._initializers[terminal.position], self._path)
        if self._store.takes_all:
            rest, further = _split(rest)
            values |= further
        values |= self._external_values(TensorProto.FromString(rest))
        return Message(rest, [("", name, each) for name, each in values.items()])

    def _take_values(self, message: TensorMessage, *, of_initializer: bool = True) -> Message:
        """Take the values that the store takes out of a copy of a message."""
        taken: list[tuple[str, str, Values]] = []
        for at, tensor in tensors_in(message):
            values = _split(tensor.SerializeToString())[1] if self._store.takes_all else {}
            for name, each in (values | self._external_values(tensor)).items():
                if self._store.takes(name, each, of_initializer=of_initializer):
                    taken.append((at, name, each))
        if taken:
            copy = type(message)()
            copy.CopyFrom(message)
            message = copy
            tensors = dict(tensors_in(message))
            for at, name, _ in taken:
                if name != EXTERNAL:
                    tensors[at].ClearField(name)
        return Message(message.SerializeToString(), taken)

    def _external_values(self, tensor: TensorProto) -> dict[str, Values]:
        """Return the values that lie in a data file of the model."""
        if external_location(tensor) is None:
            return {}
        values = Span(*external_span(tensor, self._path))
        if values.path.resolve() in self._targets:
            raise ArgumentError(
                f"output {values.path} would overwrite a data file of the model",
                hint="choose another output",
            )
        return {EXTERNAL: values}


def tensors_in(message: TensorMessage) -> Iterator[tuple[str, TensorProto]]:
    """Iterate over the tensors of a message, each with its path, as in `StoredValues.at`."""
    if isinstance(message, TensorProto):
        yield "", message
    elif isinstance(message, onnx.SparseTensorProto):
        yield "values", message.values
        yield "indices", message.indices
    else:
        for position, attribute in enumerate(message.attribute):
            if attribute.type in _HAS_TENSORS:
                for path, tensor in _attribute_tensors(attribute):
                    yield f"attribute.{position}.{path}", tensor


def _attribute_tensors(attribute: AttributeProto) -> Iterator[tuple[str, TensorProto]]:
    if attribute.HasField("t"):
        yield "t", attribute.t
    for number, tensor in enumerate(attribute.tensors):
        yield f"tensors.{number}", tensor
    if attribute.HasField("sparse_tensor"):
        for path, tensor in tensors_in(attribute.sparse_tensor):
            yield f"sparse_tensor.{path}", tensor
    for number, sparse in enumerate(attribute.sparse_tensors):
        for path, tensor in tensors_in(sparse):
            yield f"sparse_tensors.{number}.{path}", tensor


def _split(data: bytes) -> tuple[bytes, dict[str, Values]]:
    """Take the values out of a serialized tensor, as raw bytes by their fields; texts stay."""
    parts: dict[str, list[bytes]] = {}

    def take(field: wire.Field) -> list[wire.Buffer] | None:
        name = PLAIN_FIELDS.get(field.number)
        if name is None:
            return None
        # A repeated field may be in several parts; of raw_data, protobuf takes the last.
        if name == "raw_data":
            parts[name] = []
        parts.setdefault(name, []).append(data[field.payload : field.end])
        return []

    tensor = TensorProto.FromString(b"".join(wire.replace_fields(data, 0, len(data), take)))
    values: dict[str, Values] = {name: b"".join(payloads) for name, payloads in parts.items()}
    for name, dtype in INTEGER_FIELDS.items():
        integers = getattr(tensor, name)
        if integers:
            values[name] = np.array(integers, dtype).tobytes()
            tensor.ClearField(name)
    return tensor.SerializeToString(), values


def _split_in_file(
    data: wire.Buffer, tensor: wire.Field, path: Path
) -> tuple[bytes, dict[str, Values]]:
    """Take the values that are raw bytes out of a tensor of a file, as spans of the file."""
    kept: list[wire.Buffer] = []
    values: dict[str, Values] = {}
    for field in wire.fields(data, tensor.payload, tensor.end):
        name = PLAIN_FIELDS.get(field.number)
        if name is None:
            kept.append(data[field.start : field.end])
        elif name in values and name != "raw_data":  # in several parts, which are no span
            return bytes(data[tensor.payload : tensor.end]), {}
        else:
            values[name] = Span(path, field.payload, field.end - field.payload)
    return b"".join(kept), values


def join(rest: bytes, values: dict[str, Values]) -> list[Section]:
    """Put values back into a serialized tensor, and return it in sections.

    Args:
        rest: The tensor without its values.
        values: The values by the names of their fields.

    Raises:
        FormatError: If values are cut short.
    """
    integers = INTEGER_FIELDS.keys() & values.keys()
    if integers:
        tensor = TensorProto.FromString(rest)
        for name in integers:
            data, dtype = b"".join(read_chunks([values[name]])), np.dtype(INTEGER_FIELDS[name])
            if len(data) % dtype.itemsize:
                raise FormatError(f"the values of {tensor.name!r} are cut short")
            getattr(tensor, name).extend(np.frombuffer(data, dtype).tolist())
        rest = tensor.SerializeToString()
    sections: list[Section] = []
    for number, name in PLAIN_FIELDS.items():  # in the order in which protobuf writes them
        if name in values:
            position = wire.insertion_offset(rest, number)
            sections += [rest[:position], wire.header(number, len(values[name])), values[name]]
            rest = rest[position:]
    return [*sections, rest]
