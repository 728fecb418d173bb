"""The canonical form of a graph: equal for two graphs if one is the other with its tensors renamed, else not.

A graph's outputs have an order, and so have the inputs of every node. Walking from the outputs back
and numbering what is met therefore gives the same numbers whatever names and node order a file has, and
an isomorphism, if there is one, can only map a number to the same number. Nodes that no output needs
have no such anchor, and are walked last (dead_ends.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx

from modelexport.analysis.dead_ends import number_dead_ends
from modelexport.errors import FormatError
from modelexport.fingerprint import tensor_content
from modelexport.graph import Graph, Node

_END, _INSIDE, _BODY = -1, -2, -3
"""Marks between the numbers of a form."""


class Canonical(NamedTuple):
    """The digest of the form, and the nodes in the order of their canonical numbers."""

    digest: str
    order: list[int]


def canonical_form(
    graph: Graph, proto: onnx.ModelProto, weights: Mapping[str, str], labels: Sequence[str]
) -> Canonical:
    """`weights` has a digest of the content of every initializer of the main graph; `labels` are `node_labels`."""
    leaves = {name: f"weight {digest}" for name, digest in weights.items()}
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    leaves |= {name: f"input {place} {types[name]}" for place, name in enumerate(graph.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if not node.function]
    forms = [_form(graph, members, labels, leaves, graph.outputs)]
    forms += [_function_form(graph, key, labels) for key in sorted(graph.functions)]
    return Canonical(_hash(form.digest for form in forms), [index for form in forms for index in form.order])


def node_labels(graph: Graph, attributes: Sequence[str | None]) -> list[str]:
    """What each node does, without what it reads: equal text for equal work. `attributes` are their digests."""
    functions: dict[str, str] = {}
    for key in graph.functions:
        _add_function(graph, key, attributes, functions, ())
    labels: list[str] = []
    known: dict[tuple[object, ...], str] = {}
    for node, said in zip(graph.nodes, attributes, strict=True):
        work = (node.op_type, said, node.domain, len(node.outputs), node.gaps, node.calls_function)
        label = known.get(work)
        if label is None:
            label = known[work] = _label(node, said, functions)
        labels.append(label)
    return labels


def _label(node: Node, attributes: str | None, functions: Mapping[str, str]) -> str:
    called = functions.get(node.calls_function, "") if node.calls_function else ""
    return f"{node.domain}:{node.op_type} {len(node.outputs)} {node.gaps} {attributes} {called}"


def _add_function(
    graph: Graph, key: str, attributes: Sequence[str | None], functions: dict[str, str], path: tuple[str, ...]
) -> None:
    """The digest of a local function, after those of the functions that it calls."""
    if key in path:
        raise FormatError(f"the function {key} calls itself", hint="ONNX has no recursion")
    if key in functions:
        return
    members = [index for index, node in enumerate(graph.nodes) if node.function == key]
    for called in {graph.nodes[index].calls_function for index in members} - {""}:
        _add_function(graph, called, attributes, functions, (*path, key))
    labels = {index: _label(graph.nodes[index], attributes[index], functions) for index in members}
    functions[key] = _function_form(graph, key, labels).digest


def _function_form(graph: Graph, key: str, labels: Sequence[str] | Mapping[int, str]) -> Canonical:
    body = graph.functions[key]
    leaves = {name: f"input {place}" for place, name in enumerate(body.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if node.function == key]
    form = _form(graph, members, labels, leaves, body.outputs)
    return Canonical(_hash([key, form.digest]), form.order)


def _form(
    graph: Graph,
    members: Sequence[int],
    labels: Sequence[str] | Mapping[int, str],
    leaves: Mapping[str, str],
    outputs: Sequence[str],
) -> Canonical:
    walk = _Walk(graph, labels, leaves)
    walk.follow(outputs)
    number_dead_ends(walk, members)
    unused = sorted(text for name, text in leaves.items() if name not in walk.reference)
    return Canonical(_hash([walk.digest(outputs), *unused]), list(walk.number))


class _Walk:
    """Numbers nodes and tensors in the order in which they are met."""

    def __init__(self, graph: Graph, labels: Sequence[str] | Mapping[int, str], leaves: Mapping[str, str]) -> None:
        self.graph = graph
        self.labels = labels
        self.leaves = dict(leaves)
        self.number: dict[int, int] = {}
        self.reference: dict[str, int] = {}
        self._met_leaves: list[str] = []
        for body in (body for bodies in graph.bodies.values() for body in bodies):
            for name, tensor in body.initializers.items():
                self.leaves[name] = f"weight {hashlib.sha256(tensor_content(tensor)).hexdigest()}"

    def follow(self, names: Sequence[str]) -> None:
        """Meet these tensors and everything that they are computed from."""
        stack = list(reversed(names))
        producer, number, nodes, bodies = self.graph.producer, self.number, self.graph.nodes, self.graph.bodies
        reference = self.reference
        while stack:
            name = stack.pop()
            if name in reference:
                continue
            index = producer.get(name)
            if index is None:
                reference[name] = len(reference)
                self._met_leaves.append(self.leaves.get(name, "undefined"))
                continue
            number[index] = len(number)
            node = nodes[index]
            for output in node.outputs:
                reference[output] = len(reference)
            if index in bodies:
                self._enter(index)
                for body in reversed(bodies[index]):
                    stack.extend(reversed(body.outputs))
            stack.extend(node.inputs[::-1])

    def visit(self, index: int) -> None:
        """Meet a node that may have no outputs, or none that is read."""
        if index in self.number:
            return
        node = self.graph.nodes[index]
        if node.outputs:
            self.follow(node.outputs[:1])
            return
        self.number[index] = len(self.number)
        self._enter(index)
        self.follow(node.inputs)
        for body in self.graph.bodies.get(index, ()):
            self.follow(body.outputs)

    def _enter(self, index: int) -> None:
        """Meet the inputs of a node's bodies."""
        for body in self.graph.bodies.get(index, ()):
            for name in body.inputs:
                self.reference[name] = len(self.reference)

    def digest(self, outputs: Sequence[str]) -> str:
        """All that was met, in the order of the numbers: what each node does, and the numbers of what it reads."""
        words: dict[str, int] = {}
        told = array("q")
        nodes, labels, bodies, reference = self.graph.nodes, self.labels, self.graph.bodies, self.reference
        for index in self.number:
            node = nodes[index]
            told.append(words.setdefault(labels[index], len(words)))
            told.extend([reference[name] for name in node.inputs])
            if node.enclosing >= 0:
                place = words.setdefault(_body_label(self.graph, index), len(words))
                told.extend((_INSIDE, self.number.get(node.enclosing, -1), place))
            for body in bodies.get(index, ()):
                told.extend((_BODY, words.setdefault(body.label, len(words)), len(body.inputs)))
                told.extend([reference[name] for name in body.outputs])
            told.append(_END)
        told.extend([reference[name] for name in outputs])
        digest = hashlib.sha256(_hash([*words, *self._met_leaves]).encode())
        digest.update(told.tobytes())
        return digest.hexdigest()


def _body_label(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    return node.key[len(graph.nodes[node.enclosing].key) + 1 :].partition("/")[0]


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
