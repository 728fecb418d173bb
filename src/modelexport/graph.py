"""An ONNX graph laid flat: every node, those in nested bodies and local functions included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import onnx


class Node(msgspec.Struct, frozen=True):
    """One node. Tensor names are keys: a name of a nested body has the body's path in front.

    `key` is the first output, which is unique where a node's name may be empty or repeated.
    `enclosing` is the node whose body this one is in (-1 at the top), `function` the local
    function it is part of.
    """

    key: str
    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    enclosing: int = -1
    function: str = ""
    calls_function: str = ""


class Graph:
    """The nodes in the order of the file (a node before those in its bodies), and who reads what."""

    def __init__(
        self, nodes: Sequence[Node], inputs: Sequence[str], outputs: Sequence[str], initializers: Sequence[str]
    ) -> None:
        self.nodes = list(nodes)
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.initializers = list(initializers)
        self.producer: dict[str, int] = {}
        self.consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.outputs:
                self.producer[name] = index
            for name in dict.fromkeys(node.inputs):
                self.consumers.setdefault(name, []).append(index)

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


def function_key(domain: str, name: str) -> str:
    return f"{domain}::{name}"


def flatten(model: onnx.ModelProto) -> Graph:
    """Lay a model flat. Only names are read, so weights may be absent."""
    builder = _Builder({function_key(f.domain, f.name) for f in model.functions})
    scope = builder.declare(model.graph, "")
    builder.add_graph(model.graph, "", [scope], -1, "")
    for function in model.functions:
        builder.add_function(function)
    main = model.graph
    initializers = [tensor.name for tensor in main.initializer]
    initializers += [sparse.values.name for sparse in main.sparse_initializer]
    weights = set(initializers)
    inputs = [value.name for value in main.input if value.name not in weights]
    return Graph(builder.nodes, inputs, [value.name for value in main.output], initializers)


class _Builder:
    def __init__(self, functions: set[str]) -> None:
        self.nodes: list[Node] = []
        self._functions = functions

    def declare(self, graph: onnx.GraphProto, prefix: str) -> dict[str, str]:
        """The keys of all tensors that a graph defines itself."""
        names = [value.name for value in graph.input]
        names += [tensor.name for tensor in graph.initializer]
        names += [name for node in graph.node for name in node.output]
        return {name: prefix + name for name in names if name}

    def add_graph(
        self, graph: onnx.GraphProto, prefix: str, scopes: list[dict[str, str]], enclosing: int, function: str
    ) -> None:
        for position, node in enumerate(graph.node):
            self.add_node(node, position, prefix, scopes, enclosing, function)

    def add_function(self, function: onnx.FunctionProto) -> None:
        key = function_key(function.domain, function.name)
        prefix = f"{key}/"
        names = [*function.input, *(name for node in function.node for name in node.output)]
        scopes = [{name: prefix + name for name in names if name}]
        for position, node in enumerate(function.node):
            self.add_node(node, position, prefix, scopes, -1, key)

    def add_node(
        self,
        node: onnx.NodeProto,
        position: int,
        prefix: str,
        scopes: list[dict[str, str]],
        enclosing: int,
        function: str,
    ) -> None:
        index = len(self.nodes)
        outputs = tuple(prefix + name for name in node.output if name)
        key = outputs[0] if outputs else f"{prefix}#{position}"
        called = function_key(node.domain, node.op_type)
        self.nodes.append(
            Node(
                key,
                node.name,
                node.op_type,
                tuple(_resolve(name, scopes) for name in node.input if name),
                outputs,
                enclosing,
                function,
                called if called in self._functions else "",
            )
        )
        for label, body in bodies(node):
            inner = f"{key}/{label}/"
            self.add_graph(body, inner, [*scopes, self.declare(body, inner)], index, function)


def _resolve(name: str, scopes: list[dict[str, str]]) -> str:
    for scope in reversed(scopes):
        found = scope.get(name)
        if found is not None:
            return found
    return name


def bodies(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs nested in a node, each with the name of its attribute."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            for position, graph in enumerate(attribute.graphs):
                yield f"{attribute.name}.{position}", graph
