"""A flat view of an ONNX graph: every node, including those in subgraphs and local functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import cast, overload

import msgspec
import onnx

_GRAPH, _GRAPHS = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS


class Node(msgspec.Struct, frozen=True, gc=False):
    """One node. Tensor names are keys: a name of a nested body has the body's path in front.

    `key` is the first output, which is unique where a node's name may be empty or repeated.
    `enclosing` is the node whose body this one is in (-1 at the top) and `body` the place of that body among
    those of the node, `function` the local function it is part of. `gaps` tells which inputs and outputs were
    left out by an empty name.
    """

    key: str
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    enclosing: int = -1
    function: str = ""
    calls_function: str = ""
    gaps: str = ""
    body: int = -1


class Body(msgspec.Struct, frozen=True, gc=False):
    """A graph nested in a node, or a local function: its own tensors and what it gives back, as keys."""

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: dict[str, onnx.TensorProto | onnx.SparseTensorProto]
    declared: str = ""
    """What a function declares beside its nodes: its attributes and their defaults."""


class StoredNodes(Sequence[onnx.NodeProto]):
    """The nodes of a graph that is too large to have them all in memory: each is made when it is asked for."""

    def __init__(self, count: int, made: Callable[[int], onnx.NodeProto]) -> None:
        self._count = count
        self._made = made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> onnx.NodeProto: ...
    @overload
    def __getitem__(self, place: slice) -> list[onnx.NodeProto]: ...
    def __getitem__(self, place: int | slice) -> onnx.NodeProto | list[onnx.NodeProto]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(self._count))]
        if not 0 <= place < self._count:
            raise IndexError(place)
        return self._made(place)


class Graph:
    """The nodes in the order of the file (a node before those in its bodies), and who reads what.

    `protos` has the protobuf node of each, `attributed` the indices of those with attributes, `bodies` what
    is nested in a node, by its index, and `functions` the local functions. `odd_names` tells that a name is not
    UTF-8, so that it is bytes; names in bodies and functions always are text.
    """

    def __init__(
        self,
        nodes: list[Node],
        protos: Sequence[onnx.NodeProto],
        attributed: list[int],
        bodies: dict[int, list[Body]],
        functions: dict[str, Body],
        inputs: Sequence[str],
        outputs: Sequence[str],
        initializers: Sequence[str],
        odd_names: bool = False,
    ) -> None:
        self.odd_names = odd_names
        self.nodes = nodes
        self.protos = protos
        self.attributed = attributed
        self.bodies = bodies
        self.functions = functions
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.initializers = list(initializers)

    @functools.cached_property
    def producer(self) -> dict[str, int]:
        """The node that makes each tensor."""
        return {name: index for index, node in enumerate(self.nodes) for name in node.outputs}

    @functools.cached_property
    def consumers(self) -> dict[str, list[int]]:
        """The nodes that read each tensor, each node once."""
        consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            inputs = node.inputs
            for name in inputs if len(inputs) < 2 else dict.fromkeys(inputs):
                found = consumers.get(name)
                if found is None:
                    consumers[name] = [index]
                else:
                    found.append(index)
        return consumers

    def readers(self, index: int) -> Iterator[int]:
        """The nodes that read an output of this node."""
        for name in self.nodes[index].outputs:
            yield from self.consumers.get(name, ())

    def writers(self, index: int) -> Iterator[int]:
        """The nodes that made an input of this node."""
        for name in self.nodes[index].inputs:
            producer = self.producer.get(name)
            if producer is not None:
                yield producer

    def tensors(self) -> Iterator[str]:
        """Every tensor once: graph inputs, initializers, node outputs."""
        yield from dict.fromkeys((*self.inputs, *self.initializers, *self.producer))


def subgraph_prefix(key: str, label: str) -> str:
    """What stands before the names of the body with this label, in the node with this key."""
    return f"{key}/{label}/"


def function_key(domain: str, name: str, overload: str = "") -> str:
    """What a local function goes by, and what a node says that calls it."""
    return f"{domain}::{name}:{overload}" if overload else f"{domain}::{name}"


def flatten(model: onnx.ModelProto, nodes: StoredNodes | None = None) -> Graph:
    """Lay a model flat. Only names are read, so weights may be absent.

    `nodes` are those of the main graph where the model itself is without them, to save memory.
    """
    b = _Builder(model, nodes)
    main = model.graph
    initializers = [tensor.name for tensor in main.initializer]
    initializers += [sparse.values.name for sparse in main.sparse_initializer]
    weights = set(initializers)
    inputs = [value.name for value in main.input if value.name not in weights]
    outputs = [value.name for value in main.output]
    odd = b.odd_names or not _is_text((*inputs, *outputs, *initializers))
    return Graph(
        b.nodes, b.protos, b.attributed, b.bodies, b.functions, inputs, outputs, initializers, odd
    )


_Scopes = list[dict[str, str]]
"""The keys of the names that each graph around a node defines, outermost first; the main graph's are the names."""


class _Builder:
    def __init__(self, model: onnx.ModelProto, stored: StoredNodes | None) -> None:
        self.nodes: list[Node] = []
        self._kept: list[onnx.NodeProto | int] = []
        self._stored = stored
        self.attributed: list[int] = []
        self.bodies: dict[int, list[Body]] = {}
        self.functions: dict[str, Body] = {}
        self.odd_names = False
        self._called = {function_key(f.domain, f.name, f.overload) for f in model.functions}
        self._add_nodes(model.graph.node if stored is None else stored, "", [], -1, "", -1)
        for function in model.functions:
            self._add_function(function)

    @property
    def protos(self) -> Sequence[onnx.NodeProto]:
        """The protobuf nodes; of stored ones only those with bodies are kept, the others are made again."""
        kept, stored = self._kept, self._stored
        if stored is None:
            return cast("list[onnx.NodeProto]", kept)

        def made(index: int) -> onnx.NodeProto:
            found = kept[index]
            return stored[found] if isinstance(found, int) else found

        return StoredNodes(len(kept), made)

    def _add_function(self, function: onnx.FunctionProto) -> None:
        key = function_key(function.domain, function.name, function.overload)
        prefix = f"{key}/"
        names = [*function.input, *(name for node in function.node for name in node.output)]
        scopes = [{name: prefix + as_text(name) for name in names if name}]
        outputs = tuple(_resolve(name, scopes, key) for name in function.output)
        defaults = sorted(
            attribute.SerializeToString().hex() for attribute in function.attribute_proto
        )
        declared = " ".join((*sorted(map(as_text, function.attribute)), *defaults))
        self.functions[key] = Body(
            key, tuple(prefix + as_text(name) for name in function.input), outputs, {}, declared
        )
        self._add_nodes(function.node, prefix, scopes, -1, key, -1)

    def _add_nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        prefix: str,
        scopes: _Scopes,
        enclosing: int,
        function: str,
        inside: int,
    ) -> None:
        found, kept = self.nodes, self._kept
        stored = nodes is self._stored
        for position, node in enumerate(nodes):
            inputs, outputs = tuple(node.input[:]), tuple(node.output[:])
            gaps = ""
            if "" in inputs or "" in outputs:
                gaps = f"{_empty(inputs)} {_empty(outputs)}"
                inputs, outputs = tuple(filter(None, inputs)), tuple(filter(None, outputs))
            if prefix:
                inputs = tuple([_resolve(name, scopes, function) for name in inputs])
                outputs = tuple([prefix + as_text(name) for name in outputs])
            key = outputs[0] if outputs else f"{prefix}#{position}"
            domain, op_type, name = node.domain, node.op_type, node.name
            if not _is_text((domain, op_type, name, *inputs, *outputs)):
                self.odd_names = True
            called = ""
            if self._called:
                called = function_key(domain, op_type, node.overload)
                called = called if called in self._called else ""
            index = len(found)
            found.append(
                Node(
                    key,
                    name,
                    op_type,
                    domain,
                    inputs,
                    outputs,
                    enclosing,
                    function,
                    called,
                    gaps,
                    inside,
                )
            )
            kept.append(position if stored else node)
            attributes = node.attribute
            if attributes:
                self.attributed.append(index)
                for place, (label, body) in enumerate(nested_graphs(attributes)):
                    kept[index] = node
                    self._add_body(
                        index, place, label, body, subgraph_prefix(key, label), scopes, function
                    )

    def _add_body(
        self,
        index: int,
        place: int,
        label: str,
        graph: onnx.GraphProto,
        prefix: str,
        scopes: _Scopes,
        function: str,
    ) -> None:
        inputs = [value.name for value in graph.input]
        weights = {tensor.name: tensor for tensor in graph.initializer}
        weights |= {sparse.values.name: sparse for sparse in graph.sparse_initializer}
        names = [*inputs, *weights, *(name for node in graph.node for name in node.output)]
        own = {name: prefix + as_text(name) for name in names if name}
        inner = [*scopes, own]
        outputs = tuple(_resolve(value.name, inner, function) for value in graph.output)
        initializers = {prefix + as_text(name): weight for name, weight in weights.items()}
        body = Body(label, tuple(prefix + as_text(name) for name in inputs), outputs, initializers)
        self.bodies.setdefault(index, []).append(body)
        self._add_nodes(graph.node, prefix, inner, index, function, place)


def _empty(names: tuple[str, ...]) -> list[int]:
    return [place for place, name in enumerate(names) if not name]


def _is_text(names: Iterable[str]) -> bool:
    """Whether all names are text; protobuf gives bytes for one that is not UTF-8."""
    try:
        "".join(names)
    except TypeError:
        return False
    return True


def _resolve(name: str, scopes: _Scopes, function: str) -> str:
    """The key of a name; one that nobody defines is of the main graph, or of the function, which sees nothing else."""
    for scope in reversed(scopes):
        found = scope.get(name)
        if found is not None:
            return found
    return f"{function}/{as_text(name)}" if function else name


def nested_graphs(attributes: Iterable[onnx.AttributeProto]) -> list[tuple[str, onnx.GraphProto]]:
    """The graphs nested in a node, each with the name of its attribute; no two have the same."""
    found: dict[str, onnx.GraphProto] = {}
    for attribute in attributes:
        kind = attribute.type
        if kind == _GRAPH and attribute.HasField("g"):
            found[_unlike(found, as_text(attribute.name))] = attribute.g
        elif kind == _GRAPHS:
            for place, graph in enumerate(attribute.graphs):
                found[_unlike(found, f"{as_text(attribute.name)}.{place}")] = graph
    return list(found.items())


def _unlike(known: Container[str], label: str) -> str:
    while label in known:
        label += "'"
    return label


def as_text(name: str | bytes) -> str:
    """A name as text; protobuf gives bytes for one that is not UTF-8."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
