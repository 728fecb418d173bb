"""Assemble the parts of a GraphML file: without values, to compare, and in sections, to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from modelexport.errors import FormatError
from modelexport.graph.flat import StoredNodes, nested_graphs
from modelexport.graphml.format import (
    INITIALIZER,
    SPARSE,
    WRITE_AGAIN,
    function_scope,
    parse_subgraph_scope,
)
from modelexport.graphml.parts import CheckedSpan, Part, Parts, TerminalKey
from modelexport.graphml.tensors import EXTERNAL, Section, Values, join, read_chunks, tensors_in
from modelexport.onnx_file import wire
from modelexport.onnx_file.initializer_data import declared_span
from modelexport.onnx_file.model_file import external_location

# Field numbers of onnx.proto, fixed by the ONNX specification.
_GRAPH = 7
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15

_Member = int | TerminalKey
"""An operator by its order, or an initializer."""


class ExternalValues(NamedTuple):
    """Values that the model has in a data file of its own: the file, the offset, the bytes."""

    location: str
    offset: int
    values: CheckedSpan


class Assembly:
    """A model that keeps the nodes and initializers of its main graph in serialized form.

    `external` lists the values that go into data files of the model.
    """

    def __init__(self, parts: Parts) -> None:
        """Assemble a model.

        Args:
            parts: The parts of a GraphML file.

        Raises:
            FileError: If a data file is missing.
            FormatError: If a part is damaged, or belongs to a graph that is not there.
        """
        self.parts = parts
        self.external: list[ExternalValues] = []
        self._frame = parts.frame
        try:
            frame = onnx.ModelProto.FromString(self._frame)
        except DecodeError as error:
            raise FormatError(f"the model in {parts.path} is damaged", hint=WRITE_AGAIN) from error
        self._functions = {
            function_scope(position): function for position, function in enumerate(frame.functions)
        }
        self._inside: dict[int, dict[int, list[_Member]]] = {}  # of an operator's subgraphs
        self._in_functions: dict[str, list[int]] = {}
        main = self._sort_by_graph()
        messages = self._complete_operators()
        self._nodes = [messages[order] for order in main]
        if self._functions:
            for scope, orders in self._in_functions.items():
                nodes = (onnx.NodeProto.FromString(messages[order]) for order in orders)
                self._functions[scope].node.extend(nodes)
            self._frame = frame.SerializeToString()
        self._initializers = [self._join_initializer(key) for key in self._main(INITIALIZER)]
        self._sparse = [
            self._complete(parts.initializers[key], onnx.SparseTensorProto())
            for key in self._main(SPARSE)
        ]

    def _main(self, kind: str) -> list[TerminalKey]:
        """Return the initializers of the main graph in their order."""
        return sorted(key for key in self.parts.initializers if key.kind == kind and not key.scope)

    def _sort_by_graph(self) -> list[int]:
        """Note what lies in functions and subgraphs; return the operators of the main graph."""
        main = []
        for order in sorted(self.parts.operators):
            part = self.parts.operators[order]
            if not part.scope:
                main.append(order)
            elif part.scope in self._functions:
                self._in_functions.setdefault(part.scope, []).append(order)
            else:
                self._note_nested(part, order)
        for key in sorted(self.parts.initializers):
            if key.scope:
                self._note_nested(self.parts.initializers[key], key)
        return main

    def _note_nested(self, part: Part, member: _Member) -> None:
        scope = parse_subgraph_scope(part.scope)
        if scope is None or scope[0] not in self.parts.operators or scope[0] == member:
            raise FormatError(
                f"{part.title} belongs to the graph {part.scope!r}, which is not there",
                hint="the node that it was a part of was removed",
            )
        self._inside.setdefault(scope[0], {}).setdefault(scope[1], []).append(member)

    def _complete_operators(self) -> dict[int, bytes]:
        """Return the operators with the values and subgraphs that they lack, inner ones first."""
        messages: dict[int, bytes] = {}
        for order in sorted(self.parts.operators, reverse=True):
            part = self.parts.operators[order]
            message = self._complete(part, onnx.NodeProto())
            if order in self._inside:
                node = onnx.NodeProto.FromString(message)
                graphs = [graph for _, graph in nested_graphs(node.attribute)]
                for position, members in self._inside[order].items():
                    if position >= len(graphs):
                        raise FormatError(
                            f"{part.title} has no subgraph {position}", hint=WRITE_AGAIN
                        )
                    self._fill(graphs[position], members, messages)
                message = node.SerializeToString()
            messages[order] = message
        return messages

    def _fill(
        self, graph: onnx.GraphProto, members: Iterable[_Member], messages: dict[int, bytes]
    ) -> None:
        """Add members to a subgraph."""
        for member in members:
            if isinstance(member, int):
                if member not in messages:  # its scope names an operator behind it
                    raise FormatError(
                        f"{self.parts.operators[member].title} lies in itself", hint=WRITE_AGAIN
                    )
                graph.node.add().ParseFromString(messages[member])
                continue
            part = self.parts.initializers[member]
            if member.kind == INITIALIZER:
                graph.initializer.add().ParseFromString(self._complete(part, TensorProto()))
            else:
                sparse = self._complete(part, onnx.SparseTensorProto())
                graph.sparse_initializer.add().ParseFromString(sparse)

    def _complete(
        self, part: Part, message: onnx.NodeProto | TensorProto | onnx.SparseTensorProto
    ) -> bytes:
        """Return the message of a part with all its values."""
        if not part.stored:
            return part.message
        message.ParseFromString(part.message)
        tensors = dict(tensors_in(message))
        for at, values in self.parts.values(part).items():
            if at not in tensors:
                raise FormatError(f"{part.title} has no tensor {at!r}", hint=WRITE_AGAIN)
            inside = self._note_external(tensors[at], values, part)
            sections = join(tensors[at].SerializeToString(), inside)
            tensors[at].ParseFromString(b"".join(read_chunks(sections)))
        return bytes(message.SerializeToString())

    def _join_initializer(self, key: TerminalKey) -> list[Section]:
        """Return an initializer of the main graph in sections; its values may be large."""
        part = self.parts.initializers[key]
        values = self.parts.values(part)
        if set(values) - {""}:
            raise FormatError(f"{part.title} is one tensor", hint=WRITE_AGAIN)
        tensor = TensorProto.FromString(part.message)
        return join(part.message, self._note_external(tensor, values.get("", {}), part))

    def _note_external(
        self, tensor: TensorProto, values: dict[str, CheckedSpan], part: Part
    ) -> dict[str, Values]:
        """Return the values that are part of the tensor itself; note those of a data file."""
        outside = values.pop(EXTERNAL, None)
        if outside is not None:
            location = external_location(tensor)
            if location is None:
                raise FormatError(
                    f"nothing says where the values of {part.title} go", hint=WRITE_AGAIN
                )
            offset, length = declared_span(tensor, location)
            if length is not None and length != len(outside):
                raise FormatError(
                    f"the values of {part.title} are not as long as declared: "
                    f"expected {length} bytes, got {len(outside)}",
                    hint=WRITE_AGAIN,
                )
            self.external.append(ExternalValues(str(PurePosixPath(location)), offset, outside))
        return dict(values)

    def sections(self) -> list[Section]:
        """Return the whole model, large values as spans of the files that hold them."""
        return _join_graph(self._frame, self._nodes, self._initializers, self._sparse)

    def parse_without_nodes(self) -> onnx.ModelProto:
        """Parse the model without the main graph's nodes and without values of initializers."""
        heads = [[self.parts.initializers[key].message] for key in self._main(INITIALIZER)]
        model = onnx.ModelProto()
        sections = _join_graph(self._frame, [], heads, self._sparse)
        model.ParseFromString(b"".join(read_chunks(sections)))
        return model

    def stored_nodes(self) -> StoredNodes:
        """Return the nodes of the main graph, each parsed when it is needed."""
        nodes = self._nodes
        return StoredNodes(len(nodes), lambda index: onnx.NodeProto.FromString(nodes[index]))


def _join_graph(
    frame: bytes,
    nodes: Iterable[bytes],
    initializers: Iterable[Sequence[Section]],
    sparse: Iterable[bytes],
) -> list[Section]:
    """Put nodes and initializers of the main graph where a protobuf library writes them."""
    sections: list[Section] = []
    operators = [part for node in nodes for part in _delimit(_NODE, [node])]
    dense = [part for tensor in initializers for part in _delimit(_INITIALIZER, tensor)]
    further = [part for tensor in sparse for part in _delimit(_SPARSE, [tensor])]
    for field in wire.fields(frame, 0, len(frame)):
        if field.number == _GRAPH:
            inner = frame[field.body : field.end]
            first, second = (
                wire.insertion_offset(inner, _INITIALIZER),
                wire.insertion_offset(inner, _SPARSE),
            )
            before, middle, after = inner[:first], inner[first:second], inner[second:]
            graph = [*operators, before, *dense, middle, *further, after]
            sections += _delimit(_GRAPH, graph)
            operators, dense, further = [], [], []
        else:
            sections.append(frame[field.start : field.end])
    return sections


def _delimit(number: int, sections: Sequence[Section]) -> list[Section]:
    """Return a length-delimited field around sections."""
    return [wire.header(number, sum(map(len, sections))), *sections]
