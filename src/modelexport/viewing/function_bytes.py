"""The bytes of a model whose modules are local functions, made from those of the flat model.

The names of a function's inputs and outputs are those of the values outside. So a node of the model
is copied into a function as it is, and copied back when the function is inlined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import onnx

from modelexport.graph.flat import Initializer, initializers_by_name
from modelexport.modules.record import NodeTag
from modelexport.onnx_file import wire
from modelexport.tagged.records import FUNCTIONS_KEY, encode_tag
from modelexport.viewing.grouping import Group, MainNodes

FORMAT = "modelexport-functions/1"
_DOMAIN = "modelexport"
_LEAST_IR_VERSION = 10
"""The first with types of values in functions, which viewers show."""
MODEL_IR_VERSION, MODEL_OPSETS, MODEL_METADATA = 1, 8, 14
FUNCTION_NODE, _FUNCTION_VALUE_INFO = 7, 12


class FunctionsRecord(msgspec.Struct, frozen=True):
    """What restores a flat file from one with functions, in the metadata of the model."""

    format: str
    """`modelexport-functions/1`."""
    domain: str
    """The domain of the functions that were made from modules."""
    ir_version: int
    """The IR version of the flat file."""
    digest: str
    """The SHA-256 of the flat file."""
    order: tuple[tuple[int, int], ...]
    """The nodes of the flat file in the order in which the functions hold them: runs, each with its
    first node and its length."""


class Boundary(NamedTuple):
    """The values that enter and leave a group."""

    inputs: list[str]
    outputs: list[str]


def find_boundaries(main: MainNodes, root: Group, graph: onnx.GraphProto) -> dict[Group, Boundary]:
    """Find the values that enter and leave each group inside the root.

    The nodes of a group are next to each other where all groups are expanded, so that the positions
    of a value's producer and last consumer tell whether it crosses the border.
    """
    produced_at: dict[str, int] = {}
    last_use: dict[str, int] = {}
    order = root.expand()
    for position, index in enumerate(order):
        for name in main.outputs[index]:
            produced_at[name] = position
        for name in main.inputs[index]:
            last_use[name] = position
    last_use.update((value.name, len(order)) for value in graph.output)
    initializers = initializers_by_name(graph)
    boundaries: dict[Group, Boundary] = {}
    for group in reversed(list(root.inner())):
        consumed: dict[str, None] = {}
        produced: list[str] = []
        for item in group.items:
            if isinstance(item, Group):
                consumed.update(dict.fromkeys(boundaries[item].inputs))
                produced += boundaries[item].outputs
            else:
                consumed.update(dict.fromkeys(main.inputs[item]))
                produced += main.outputs[item]
        inputs = [name for name in consumed if produced_at.get(name, -1) < group.start]
        outputs = [name for name in produced if last_use.get(name, -1) >= group.end]
        # A call has an output, also where nothing consumes what it computes.
        outputs = outputs or [name for name in produced if name not in last_use]
        inputs.sort(key=initializers.__contains__)
        boundaries[group] = Boundary(inputs, outputs)
    return boundaries


class ValueTypes:
    """The types of values, as viewers show them in functions.

    Args:
        graph: The main graph of a model.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        declared = (*graph.value_info, *graph.input, *graph.output)
        self._declared: dict[str, onnx.ValueInfoProto] = {
            value.name: value for value in declared if value.HasField("type")
        }
        self._initializers = initializers_by_name(graph)
        self._fields: dict[str, bytes] = {}

    def fields(self, names: Iterable[str]) -> Iterator[wire.Buffer]:
        """Iterate over the declarations of those values whose types are known, for a function."""
        for name in dict.fromkeys(names):
            if name not in self._fields:
                value = self._describe(name)
                content = [value.SerializeToString()] if value.HasField("type") else []
                field = wire.delimited(_FUNCTION_VALUE_INFO, content) if content else []
                self._fields[name] = b"".join(field)
            yield self._fields[name]

    def _describe(self, name: str) -> onnx.ValueInfoProto:
        declared, initializer = self._declared.get(name), self._initializers.get(name)
        if declared is not None and not declared.doc_string and not declared.metadata_props:
            return declared
        value = onnx.ValueInfoProto(name=name)
        if declared is not None:
            value.type.CopyFrom(declared.type)
        elif initializer is not None:
            tensor = value.type.tensor_type
            tensor.elem_type = _element_type(initializer)
            tensor.shape.SetInParent()
            for size in initializer.dims:
                tensor.shape.dim.add().dim_value = size
        return value


def _element_type(tensor: Initializer) -> int:
    is_dense = isinstance(tensor, onnx.TensorProto)
    return int(tensor.data_type if is_dense else tensor.values.data_type)


class Title(NamedTuple):
    """How a function and the node that calls it are labelled."""

    function: str
    node: str
    text: str
    """The doc_string of the function."""
    tag: NodeTag | None
    """The tag of the node; None for a node without one."""


class FunctionWriter:
    """Write a model with functions instead of groups of nodes.

    Args:
        data: The model.
        proto: The model without initializer data.
        main: The nodes of its main graph.
        root: The groups of its nodes.
        boundaries: The values that enter and leave each group.
        titles: How the function of each group is labelled.
    """

    def __init__(
        self,
        data: wire.Buffer,
        proto: onnx.ModelProto,
        main: MainNodes,
        root: Group,
        boundaries: Mapping[Group, Boundary],
        titles: Mapping[Group, Title],
    ) -> None:
        self._data, self._proto, self._main, self._root = data, proto, main, root
        self._boundaries, self._titles = boundaries, titles
        self._types = ValueTypes(proto.graph)
        self._domain = _unused_domain(proto)
        opset = onnx.OperatorSetIdProto(domain=self._domain, version=1)
        self._opset: list[wire.Buffer] = [opset.SerializeToString()] if titles else []
        imports = [*proto.opset_import, opset]
        self._imports = onnx.FunctionProto(
            opset_import=imports, domain=self._domain
        ).SerializeToString()
        self._nodes = [field for graph in wire.graphs(data) for field in wire.nodes(data, graph)]

    def chunks(self) -> Iterator[wire.Buffer]:
        """Iterate over the chunks of the new model."""
        record = FunctionsRecord(
            FORMAT,
            self._domain,
            self._proto.ir_version,
            hashlib.sha256(self._data).hexdigest(),
            _find_runs(self._root.expand()),
        )
        text = msgspec.json.encode(record).decode()
        added = {
            MODEL_OPSETS: self._opset and wire.delimited(MODEL_OPSETS, self._opset),
            MODEL_METADATA: wire.delimited(MODEL_METADATA, wire.entry(FUNCTIONS_KEY, text)),
            wire.MODEL_FUNCTIONS: [
                chunk for group in self._root.inner() for chunk in self._function(group)
            ],
        }
        data = self._data
        for field in wire.fields(data, 0, len(data)):
            for number in [number for number in added if number < field.number]:
                yield from added.pop(number)
            if field.number == MODEL_IR_VERSION:
                least = _LEAST_IR_VERSION if self._titles else 0
                yield ir_version_field(max(self._proto.ir_version, least))
            elif field.is_bytes(wire.MODEL_GRAPH):
                nodes = self._items(self._root, wire.GRAPH_NODE)
                yield from wire.delimited(
                    wire.MODEL_GRAPH, replace_nodes(data, field, self._nodes, nodes)
                )
            else:
                yield data[field.start : field.end]
        for chunks in added.values():
            yield from chunks

    def _items(self, group: Group, number: int) -> list[wire.Buffer]:
        """Return the own nodes of a group and the calls of the groups inside it, in order."""
        data, chunks = self._data, []
        for item in group.items:
            content = (
                self._call(item)
                if isinstance(item, Group)
                else data[self._nodes[item].payload : self._nodes[item].end]
            )
            chunks += [wire.header(number, len(content)), content]
        return chunks

    def _call(self, group: Group) -> bytes:
        title, boundary = self._titles[group], self._boundaries[group]
        node = onnx.NodeProto(
            op_type=title.function,
            domain=self._domain,
            name=title.node,
            input=boundary.inputs,
            output=boundary.outputs,
        )
        if title.tag is not None:
            node.doc_string = encode_tag(title.tag).decode()
        return bytes(node.SerializeToString())

    def _function(self, group: Group) -> list[wire.Buffer]:
        title, boundary = self._titles[group], self._boundaries[group]
        names = [*boundary.inputs]
        for item in group.items:
            names += (
                self._boundaries[item].outputs
                if isinstance(item, Group)
                else self._main.outputs[item]
            )
        head = onnx.FunctionProto(
            name=title.function, input=boundary.inputs, output=boundary.outputs
        )
        content = [
            head.SerializeToString(),
            *self._items(group, FUNCTION_NODE),
            onnx.FunctionProto(doc_string=title.text).SerializeToString(),
            self._imports,
            *self._types.fields(names),
        ]
        return wire.delimited(wire.MODEL_FUNCTIONS, content)


def _unused_domain(proto: onnx.ModelProto) -> str:
    """Return a domain for the functions, without a dot, which no operator of the model is in."""
    used = {entry.domain for entry in proto.opset_import} | {f.domain for f in proto.functions}
    domain, number = _DOMAIN, 2
    while domain in used:
        domain, number = f"{_DOMAIN}_{number}", number + 1
    return domain


def _find_runs(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return runs of successive numbers, each with its first number and its length."""
    runs: list[tuple[int, int]] = []
    start = 0
    for position in range(1, len(order) + 1):
        if position == len(order) or order[position] != order[position - 1] + 1:
            runs.append((order[start], position - start))
            start = position
    return tuple(runs)


def ir_version_field(version: int) -> bytes:
    """Return the field of a model that states its IR version."""
    return bytes(onnx.ModelProto(ir_version=version).SerializeToString())


def replace_nodes(
    data: wire.Buffer,
    graph: wire.Field,
    old: Sequence[wire.Field],
    new: Sequence[wire.Buffer],
) -> list[wire.Buffer]:
    """Copy the content of a graph with other nodes, written where the first of the old ones is."""
    if not old:
        return [data[graph.payload : graph.end]]
    chunks = [data[graph.payload : old[0].start], *new]
    for before, after in pairwise(old):
        if before.end < after.start:
            chunks.append(data[before.end : after.start])
    return [*chunks, data[old[-1].end : graph.end]]
