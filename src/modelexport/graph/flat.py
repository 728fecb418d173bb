"""A flat view of an ONNX graph: every node, including those in subgraphs and local functions."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import onnx

Initializer = onnx.TensorProto | onnx.SparseTensorProto
_GRAPH, _GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS
_TENSOR, _TENSORS = onnx.AttributeProto.TENSOR, onnx.AttributeProto.TENSORS


class Node(msgspec.Struct, frozen=True, gc=False):
    """One node; its value names are keys, which are unique in the whole model.

    A key is the name of the value, in a subgraph or function with the path of that in front.
    """

    key: str
    """The first output, which is unique where a node's name may be empty or repeated."""
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    enclosing: int = -1
    """The index of the node whose subgraph this one is in, -1 at the top level."""
    function: str = ""
    """The key of the local function that this node is part of."""
    calls_function: str = ""
    """The key of the local function that this node calls."""
    gaps: str = ""
    """Which inputs and outputs were omitted by an empty name."""
    subgraph_number: int = -1
    """Which of the enclosing node's subgraphs this node is in."""


class FlatSubgraph(msgspec.Struct, frozen=True, gc=False):
    """The declarations of a subgraph or a local function; value names are keys."""

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: dict[str, onnx.TensorProto | onnx.SparseTensorProto]
    declared: str = ""
    """The attributes that a function declares, with their defaults."""


class StoredNodes(Sequence[onnx.NodeProto]):
    """The nodes of a graph that is too large for memory: each is parsed when it is accessed.

    Args:
        count: The number of nodes.
        parse: Returns the node with a given index.
    """

    def __init__(self, count: int, parse: Callable[[int], onnx.NodeProto]) -> None:
        self._count = count
        self._parse = parse

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # an index from 0; slices are not supported
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._parse(index)


class Graph(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The nodes of a model in file order, a node before those of its subgraphs, and their edges."""

    nodes: list[Node]
    protos: Sequence[onnx.NodeProto]
    """The protobuf node of each."""
    attributed: list[int]
    """The indices of the nodes that have attributes."""
    subgraphs: dict[int, list[FlatSubgraph]]
    """The subgraphs of a node, by its index."""
    functions: dict[str, FlatSubgraph]
    """The local functions, by their key."""
    inputs: list[str]
    """The inputs of the main graph, without initializers."""
    outputs: list[str]
    """The outputs of the main graph."""
    initializers: list[str]
    """The initializers of the main graph."""
    non_utf8_names: bool = False
    """Whether a name is not UTF-8, so that protobuf returns it as bytes. Names in subgraphs and
    functions are always text."""
    has_external_data: bool = False
    """Whether an initializer or a tensor in an attribute has its data in a data file."""

    @functools.cached_property
    def producer(self) -> dict[str, int]:
        """The index of the node that produces each value."""
        return {name: index for index, node in enumerate(self.nodes) for name in node.outputs}

    @functools.cached_property
    def consumers(self) -> dict[str, list[int]]:
        """The indices of the nodes that consume each value, each node once."""
        consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            inputs = node.inputs
            for name in inputs if len(inputs) < 2 else dict.fromkeys(inputs):
                known = consumers.get(name)
                if known is None:
                    consumers[name] = [index]
                else:
                    known.append(index)
        return consumers

    def consumers_of(self, index: int) -> Iterator[int]:
        """Iterate over the indices of the nodes that consume an output of the node `index`."""
        for name in self.nodes[index].outputs:
            yield from self.consumers.get(name, ())

    def producers_of(self, index: int) -> Iterator[int]:
        """Iterate over the indices of the nodes that produce an input of the node `index`."""
        for name in self.nodes[index].inputs:
            producer = self.producer.get(name)
            if producer is not None:
                yield producer

    def tensors(self) -> Iterator[str]:
        """Iterate over the keys of all values: graph inputs, initializers, node outputs."""
        yield from dict.fromkeys((*self.inputs, *self.initializers, *self.producer))


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause garbage collection while the block creates many small records that all stay alive.

    Each collection would walk every live object, again and again as the records grow.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def defer_full_collections() -> Iterator[None]:
    """Collect only young garbage while the block runs.

    A full collection walks every object of the process, which takes half a second with torch and
    transformers loaded. Records that are kept during an export bring one about.
    """
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


def subgraph_prefix(key: str, label: str) -> str:
    """Return the prefix of the keys in a subgraph, given its node's key and its own label."""
    return f"{key}/{label}/"


def function_key(domain: str, name: str, overload: str = "") -> str:
    """Return the key of a local function; `name` is the `op_type` of the nodes that call it."""
    return f"{domain}::{name}:{overload}" if overload else f"{domain}::{name}"


def flatten(model: onnx.ModelProto, nodes: StoredNodes | None = None) -> Graph:
    """Build the flat view of a model. Only names are read, so initializer data may be absent.

    Args:
        model: The model.
        nodes: The nodes of the main graph, where the model itself is without them.
    """
    return _Builder(model, nodes).build(model.graph)


class _Scope(msgspec.Struct, frozen=True):
    """The scope of some nodes: their subgraph or function, and the names that are visible there.

    `names` maps the names that each graph around a node defines to keys, outermost first; the keys
    of the main graph are the names themselves.
    """

    prefix: str = ""
    names: tuple[dict[str, str], ...] = ()
    enclosing: int = -1
    function: str = ""
    subgraph_number: int = -1

    def key(self, name: str) -> str:
        """Return the key of a name.

        A name that no graph around it defines is one of the main graph, or of the function, which
        does not see the main graph.
        """
        for names in reversed(self.names):
            known = names.get(name)
            if known is not None:
                return known
        return f"{self.function}/{as_text(name)}" if self.function else name


class _Builder:
    def __init__(self, model: onnx.ModelProto, stored: StoredNodes | None) -> None:
        self._nodes: list[Node] = []
        self._kept: list[onnx.NodeProto | int] = []
        self._stored = stored
        self._attributed: list[int] = []
        self._subgraphs: dict[int, list[FlatSubgraph]] = {}
        self._functions: dict[str, FlatSubgraph] = {}
        self._non_utf8_names = False
        self._has_external_data = _are_external(model.graph.initializer)
        self._function_keys = {function_key(f.domain, f.name, f.overload) for f in model.functions}
        self._add_nodes(model.graph.node if stored is None else stored, _Scope())
        for function in model.functions:
            self._add_function(function)

    def build(self, main: onnx.GraphProto) -> Graph:
        initializers = [tensor.name for tensor in main.initializer]
        initializers += [sparse.values.name for sparse in main.sparse_initializer]
        stored = set(initializers)
        inputs = [value.name for value in main.input if value.name not in stored]
        outputs = [value.name for value in main.output]
        odd = self._non_utf8_names or not _is_text((*inputs, *outputs, *initializers))
        return Graph(
            self._nodes, self._protos(), self._attributed, self._subgraphs, self._functions,
            inputs, outputs, initializers, odd, self._has_external_data,
        )  # fmt: skip

    def _protos(self) -> Sequence[onnx.NodeProto]:
        """Return the protobuf nodes; of stored ones, only those with subgraphs are in memory."""
        kept, stored = self._kept, self._stored
        if stored is None:
            return cast("list[onnx.NodeProto]", kept)

        def parse(index: int) -> onnx.NodeProto:
            node = kept[index]
            return stored[node] if isinstance(node, int) else node

        return StoredNodes(len(kept), parse)

    def _add_function(self, function: onnx.FunctionProto) -> None:
        key = function_key(function.domain, function.name, function.overload)
        prefix = f"{key}/"
        names = [*function.input, *(name for node in function.node for name in node.output)]
        scope = _Scope(prefix, (_keys(prefix, names),), function=key)
        defaults = sorted(entry.SerializeToString().hex() for entry in function.attribute_proto)
        declared = " ".join((*sorted(map(as_text, function.attribute)), *defaults))
        inputs = tuple(prefix + as_text(name) for name in function.input)
        outputs = tuple(map(scope.key, function.output))
        self._functions[key] = FlatSubgraph(key, inputs, outputs, {}, declared)
        self._add_nodes(function.node, scope)

    def _add_nodes(self, nodes: Sequence[onnx.NodeProto], scope: _Scope) -> None:
        added, kept = self._nodes, self._kept
        prefix, function = scope.prefix, scope.function
        stored = nodes is self._stored
        for position, node in enumerate(nodes):
            inputs, outputs = tuple(node.input[:]), tuple(node.output[:])
            gaps = ""
            if "" in inputs or "" in outputs:
                gaps = f"{_empty(inputs)} {_empty(outputs)}"
                inputs, outputs = tuple(filter(None, inputs)), tuple(filter(None, outputs))
            if prefix:
                inputs = tuple([scope.key(name) for name in inputs])
                outputs = tuple([prefix + as_text(name) for name in outputs])
            key = outputs[0] if outputs else f"{prefix}#{position}"
            domain, op_type, name = node.domain, node.op_type, node.name
            if not _is_text((domain, op_type, name, *inputs, *outputs)):
                self._non_utf8_names = True
            called = ""
            if self._function_keys:
                called = function_key(domain, op_type, node.overload)
                called = called if called in self._function_keys else ""
            index = len(added)
            added.append(
                Node(
                    key, name, op_type, domain, inputs, outputs,
                    scope.enclosing, function, called, gaps, scope.subgraph_number,
                )
            )  # fmt: skip
            kept.append(position if stored else node)
            attributes = node.attribute
            if attributes:
                self._attributed.append(index)
                if self._have_graphs(attributes):
                    kept[index] = node
                    for number, (label, graph) in enumerate(nested_graphs(attributes)):
                        self._add_subgraph(index, number, label, graph, scope)

    def _have_graphs(self, attributes: Iterable[onnx.AttributeProto]) -> bool:
        """Return whether attributes may have subgraphs, and note tensors in data files."""
        found = False
        for attribute in attributes:
            kind = attribute.type
            if kind == _TENSOR:
                if attribute.t.data_location:
                    self._has_external_data = True
            elif kind in (_GRAPH, _GRAPHS):
                found = True
            elif kind == _TENSORS:
                self._has_external_data |= _are_external(attribute.tensors)
        return found

    def _add_subgraph(
        self, index: int, number: int, label: str, graph: onnx.GraphProto, outer: _Scope
    ) -> None:
        prefix = subgraph_prefix(self._nodes[index].key, label)
        inputs = [value.name for value in graph.input]
        tensors = initializers_by_name(graph)
        self._has_external_data |= _are_external(graph.initializer)
        names = [*inputs, *tensors, *(name for node in graph.node for name in node.output)]
        scope = _Scope(prefix, (*outer.names, _keys(prefix, names)), index, outer.function, number)
        subgraph = FlatSubgraph(
            label,
            tuple(prefix + as_text(name) for name in inputs),
            tuple(scope.key(value.name) for value in graph.output),
            {prefix + as_text(name): tensor for name, tensor in tensors.items()},
        )
        self._subgraphs.setdefault(index, []).append(subgraph)
        self._add_nodes(graph.node, scope)


def _keys(prefix: str, names: Iterable[str]) -> dict[str, str]:
    return {name: prefix + as_text(name) for name in names if name}


def _empty(names: tuple[str, ...]) -> list[int]:
    return [index for index, name in enumerate(names) if not name]


def _are_external(tensors: Iterable[onnx.TensorProto]) -> bool:
    return any(tensor.data_location for tensor in tensors)


def _is_text(names: Iterable[str]) -> bool:
    """Return whether all names are text; protobuf returns bytes for one that is not UTF-8."""
    try:
        "".join(names)
    except TypeError:
        return False
    return True


def initializers_by_name(graph: onnx.GraphProto) -> dict[str, Initializer]:
    """Return the initializers of a graph, dense and sparse ones, by name."""
    tensors: dict[str, Initializer] = {tensor.name: tensor for tensor in graph.initializer}
    tensors.update((sparse.values.name, sparse) for sparse in graph.sparse_initializer)
    return tensors


def nested_graphs(attributes: Iterable[onnx.AttributeProto]) -> list[tuple[str, onnx.GraphProto]]:
    """List the subgraphs among attributes of a node, each with a label unique among them."""
    graphs: dict[str, onnx.GraphProto] = {}

    def add(label: str, graph: onnx.GraphProto) -> None:
        while label in graphs:
            label += "'"
        graphs[label] = graph

    for attribute in attributes:
        kind = attribute.type
        if kind == _GRAPH and attribute.HasField("g"):
            add(as_text(attribute.name), attribute.g)
        elif kind == _GRAPHS:
            for number, graph in enumerate(attribute.graphs):
                add(f"{as_text(attribute.name)}.{number}", graph)
    return list(graphs.items())


def as_text(name: str | bytes) -> str:
    """Return a name as text; protobuf returns bytes for one that is not UTF-8: escape those."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
