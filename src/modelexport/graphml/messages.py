"""The exact form of every element: its serialized message without what other elements hold."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import TensorProto

from modelexport.errors import ArgumentError
from modelexport.graph.flat import nested_graphs
from modelexport.graphml.elements import Terminal
from modelexport.graphml.format import INITIALIZER, subgraph_scope
from modelexport.graphml.tensors import (
    EXTERNAL,
    Span,
    Store,
    Values,
    split,
    split_in_file,
    tensors_in,
)
from modelexport.onnx_file import wire
from modelexport.onnx_file.initializer_data import external_span
from modelexport.onnx_file.model_file import external_location, parse_model
from modelexport.tagged.model import TaggedModel

# Field numbers of onnx.proto, fixed by the ONNX specification.
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_FUNCTION_NODE = 7


class Message(NamedTuple):
    """A serialized message, and the values taken out of its tensors: path, field, values."""

    data: bytes
    values: Sequence[tuple[str, str, Values]] = ()


def make_frame(data: wire.Buffer) -> Message:
    """Take nodes and initializers out of a model.

    Args:
        data: The model file.

    Returns:
        The model without the nodes and initializers of its main graph and without the nodes of
        its functions.
    """
    without_elements = {_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE}
    sections: list[wire.Buffer] = []
    for field in wire.fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH:
            sections += wire.delimited(field.number, _drop_fields(data, field, without_elements))
        elif field.number == _MODEL_FUNCTIONS:
            sections += wire.delimited(field.number, _drop_fields(data, field, {_FUNCTION_NODE}))
        else:
            sections.append(data[field.start : field.end])
    return Message(b"".join(sections))


def parse_without_nodes(
    data: wire.Buffer, initializers: Sequence[wire.Field], path: Path
) -> onnx.ModelProto:
    """Parse a model without the nodes of its main graph and the values of its initializers.

    Args:
        data: The model file.
        initializers: The fields of the initializers of its main graph.
        path: The path of the file, for messages.

    Returns:
        The model.

    Raises:
        FormatError: If the file is not an ONNX model.
    """
    heads: list[wire.Buffer] = [
        wire.initializer(b"".join(wire.without_values(data, field))) for field in initializers
    ]
    sections: list[wire.Buffer] = []
    for field in wire.fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH:
            kept = _drop_fields(data, field, {_GRAPH_NODE, _GRAPH_INITIALIZER})
            sections += wire.delimited(_MODEL_GRAPH, [*kept, *heads])
            heads = []  # protobuf merges the graphs of a file that has several
        else:
            sections.append(data[field.start : field.end])
    return parse_model(b"".join(sections), path, whole=True)


def _drop_fields(data: wire.Buffer, parent: wire.Field, numbers: set[int]) -> list[wire.Buffer]:
    inside = wire.fields(data, parent.body, parent.end)
    return [data[field.start : field.end] for field in inside if field.number not in numbers]


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
        self._graphs: dict[str, onnx.GraphProto] = {"": model.proto.graph}
        for index in graph.bodies:
            for position, (_, nested) in enumerate(nested_graphs(graph.protos[index].attribute)):
                self._graphs[subgraph_scope(index, position)] = nested

    def operator(self, index: int, node: onnx.NodeProto) -> Message:
        """Make the message of an operator, without what is in its subgraphs.

        Args:
            index: Its index in the flat graph.
            node: The node.

        Returns:
            The message.

        Raises:
            ArgumentError: If an output file is a data file of the model.
        """
        if index in self._graph.bodies:
            node = _empty_subgraphs(node)
        elif not node.attribute:
            return Message(node.SerializeToString())
        return self._take_values(node, of_initializer=False)

    def initializer(self, terminal: Terminal) -> Message:
        """Make the message of an initializer.

        Args:
            terminal: The initializer.

        Returns:
            The message.

        Raises:
            ArgumentError: If an output file is a data file of the model.
        """
        if terminal.kind == INITIALIZER and not terminal.scope:
            return self._main_initializer(terminal.position)
        graph = self._graphs[terminal.scope]
        tensors = graph.initializer if terminal.kind == INITIALIZER else graph.sparse_initializer
        return self._take_values(tensors[terminal.position], of_initializer=True)

    def _main_initializer(self, position: int) -> Message:
        """Make the message of an initializer whose values are not in memory."""
        rest, values = split_in_file(self._data, self._initializers[position], self._path)
        if self._store.takes_all:
            rest, further = split(rest)
            values |= further
        values |= self._external_values(TensorProto.FromString(rest))
        return Message(rest, [("", name, each) for name, each in values.items()])

    def _take_values(
        self,
        message: onnx.NodeProto | TensorProto | onnx.SparseTensorProto,
        *,
        of_initializer: bool,
    ) -> Message:
        """Take the values that the store takes out of a copy of a message."""
        taken: list[tuple[str, str, Values]] = []
        for at, tensor in tensors_in(message):
            values = split(tensor.SerializeToString())[1] if self._store.takes_all else {}
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


def _empty_subgraphs(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for _, graph in nested_graphs(copy.attribute):
        for field in ("node", "initializer", "sparse_initializer"):
            graph.ClearField(field)
    return copy
