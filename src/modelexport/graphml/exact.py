"""The exact form of every part of a model: its serialised message without what stands elsewhere in the GraphML."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import TensorProto

from modelexport.errors import ArgumentError
from modelexport.graph.flat import Graph, nested_graphs
from modelexport.graphml.dialect import INITIALIZER
from modelexport.graphml.store import Store
from modelexport.graphml.tensors import (
    EXTERNAL,
    Values,
    external_values,
    split,
    split_in_file,
    tensors_in,
)
from modelexport.graphml.wiring import Terminal, body_scope
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import external_location, parse_model

_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_FUNCTION_NODE = 7


class Exact(NamedTuple):
    """A message, and the values that were taken out of its tensors: place of the tensor, field, bytes."""

    message: bytes
    values: list[tuple[str, str, Values]]


def frame(data: wire.Buffer) -> bytes:
    """The model without the nodes and weights of its main graph and without the nodes of its functions."""
    pieces: list[wire.Buffer] = []
    for field in wire.fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH:
            kept = _without(data, field, {_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE})
            pieces += wire.delimited(_MODEL_GRAPH, kept)
        elif field.number == _MODEL_FUNCTIONS:
            pieces += wire.delimited(_MODEL_FUNCTIONS, _without(data, field, {_FUNCTION_NODE}))
        else:
            pieces.append(data[field.start : field.end])
    return b"".join(pieces)


def without_nodes(data: wire.Buffer, weights: Sequence[wire.Field], path: Path) -> onnx.ModelProto:
    """The model without the nodes of its main graph and without the values of its weights."""
    pieces: list[wire.Buffer] = []
    heads: list[wire.Buffer] = [
        wire.initializer(b"".join(wire.without_values(data, field))) for field in weights
    ]
    for field in wire.fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH:
            kept = _without(data, field, {_GRAPH_NODE, _GRAPH_INITIALIZER})
            pieces += wire.delimited(_MODEL_GRAPH, [*kept, *heads])
            heads = []
        else:
            pieces.append(data[field.start : field.end])
    return parse_model(b"".join(pieces), path, whole=True)


def _without(data: wire.Buffer, parent: wire.Field, numbers: set[int]) -> list[wire.Buffer]:
    inside = wire.fields(data, parent.body, parent.end)
    return [data[field.start : field.end] for field in inside if field.number not in numbers]


class ExactForms:
    """Takes a model file apart."""

    def __init__(
        self,
        path: Path,
        data: wire.Buffer,
        fields: Sequence[wire.Field],
        graph: Graph,
        proto: onnx.ModelProto,
        targets: Container[Path],
    ) -> None:
        self._targets = targets
        self._path = path
        self._data = data
        self._fields = fields
        self._graph = graph
        self._graphs: dict[str, onnx.GraphProto] = {"": proto.graph}
        for index in graph.bodies:
            for place, (_, nested) in enumerate(nested_graphs(graph.protos[index].attribute)):
                self._graphs[body_scope(index, place)] = nested

    def operator(self, index: int, node: onnx.NodeProto, store: Store) -> Exact:
        """An operator by its number, and its message, which is at hand."""
        if index in self._graph.bodies:
            node = _without_bodies(node)
        elif not node.attribute:
            return Exact(node.SerializeToString(), [])
        return self._taken_apart(node, store, weight=False)

    def weight(self, terminal: Terminal, store: Store) -> Exact:
        if terminal.kind == INITIALIZER and not terminal.scope:
            return self._main_initializer(terminal.position, store)
        graph = self._graphs[terminal.scope]
        found = graph.initializer if terminal.kind == INITIALIZER else graph.sparse_initializer
        return self._taken_apart(found[terminal.position], store, weight=True)

    def _main_initializer(self, position: int, store: Store) -> Exact:
        rest, values = split_in_file(self._data, self._fields[position], self._path)
        if store.takes_all:
            rest, further = split(rest)
            values |= further
        tensor = TensorProto.FromString(rest)
        values |= self._external(tensor)
        return Exact(rest, [("", name, found) for name, found in values.items()])

    def _taken_apart(
        self,
        message: onnx.NodeProto | TensorProto | onnx.SparseTensorProto,
        store: Store,
        *,
        weight: bool,
    ) -> Exact:
        """A message that is in memory, without the values of its tensors that the store takes."""
        taken: list[tuple[str, str, Values]] = []
        copy = None
        own: dict[str, TensorProto] = {}
        for at, tensor in tensors_in(message):
            values = self._values(tensor, store)
            wanted = {
                name: found for name, found in values.items() if store.takes(name, found, weight)
            }
            if not wanted:
                continue
            if copy is None:
                copy = type(message)()
                copy.CopyFrom(message)
                own = dict(tensors_in(copy))
            for name, found in wanted.items():
                if name != EXTERNAL:
                    own[at].ClearField(name)
                taken.append((at, name, found))
        return Exact((message if copy is None else copy).SerializeToString(), taken)

    def _values(self, tensor: TensorProto, store: Store) -> dict[str, Values]:
        values: dict[str, Values] = {}
        if store.takes_all:
            values = split(tensor.SerializeToString())[1]
        return values | self._external(tensor)

    def _external(self, tensor: TensorProto) -> dict[str, Values]:
        """The values that lie in a data file of the model, which must not be written over."""
        if external_location(tensor) is None:
            return {}
        values = external_values(tensor, self._path)
        if values.path.resolve() in self._targets:
            raise ArgumentError(
                f"{values.path} holds weights of the model itself", hint="choose another output"
            )
        return {EXTERNAL: values}


def _without_bodies(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for _, graph in nested_graphs(copy.attribute):
        for field in ("node", "initializer", "sparse_initializer"):
            graph.ClearField(field)
    return copy
