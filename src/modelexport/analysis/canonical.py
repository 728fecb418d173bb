"""The canonical form of a graph: equal for two graphs that differ only in names and order."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import onnx

from modelexport.analysis.dead_ends import number_dead_ends
from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, Node
from modelexport.onnx_file.digests import message_content

_END, _INSIDE, _BODY, _LEAVES = -1, -2, -3, -3
"""Marks between the numbers of a form; the numbers of leaves lie below them."""


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
    return Canonical(
        _hash(form.digest for form in forms), [index for form in forms for index in form.order]
    )


def node_labels(graph: Graph, attributes: Sequence[str | None]) -> list[str]:
    """What each node does, without what it reads: equal text for equal work. `attributes` are their digests."""
    functions: dict[str, str] = {}
    members: dict[str, list[int]] = {key: [] for key in graph.functions}
    for index, node in enumerate(graph.nodes):
        if node.function:
            members[node.function].append(index)
    for key in _callees_first(graph, members):
        told = {
            index: _label(graph.nodes[index], attributes[index], functions)
            for index in members[key]
        }
        functions[key] = _function_form(
            graph, key, defaultdict(str, told)
        ).digest  # a name may lead outside
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


def _callees_first(graph: Graph, members: Mapping[str, Sequence[int]]) -> list[str]:
    """The local functions, each after those that it calls."""
    calls = {
        key: {graph.nodes[i].calls_function for i in indices} - {""}
        for key, indices in members.items()
    }
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise FormatError(
            f"the function {error.args[1][0]} calls itself", hint="ONNX has no recursion"
        ) from error


def _function_form(graph: Graph, key: str, labels: Sequence[str] | Mapping[int, str]) -> Canonical:
    body = graph.functions[key]
    leaves = {name: f"input {place}" for place, name in enumerate(body.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if node.function == key]
    form = _form(graph, members, labels, leaves, body.outputs)
    return Canonical(_hash([key, body.declared, form.digest]), form.order)


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

    def __init__(
        self, graph: Graph, labels: Sequence[str] | Mapping[int, str], leaves: Mapping[str, str]
    ) -> None:
        self.graph = graph
        self.labels = labels
        self.leaves = dict(leaves)
        self.number: dict[int, int] = {}
        self.reference: dict[str, int] = {}
        self._met_leaves: list[str] = []
        for body in (body for bodies in graph.bodies.values() for body in bodies):
            for name, tensor in body.initializers.items():
                self.leaves[name] = f"weight {hashlib.sha256(message_content(tensor)).hexdigest()}"

    def follow(self, names: Sequence[str]) -> None:
        """Meet these tensors and everything that they are computed from."""
        stack = list(reversed(names))
        producer, reference = self.graph.producer, self.reference
        while stack:
            name = stack.pop()
            if name in reference:
                continue
            index = producer.get(name)
            if index is None:
                self._met_leaves.append(self.leaves.get(name, "undefined"))
                reference[name] = -len(self._met_leaves) + _LEAVES
            elif index not in self.number:
                stack.extend(self._meet(index))
            else:  # another node makes a tensor of this name too
                reference[name] = len(reference)

    def visit(self, index: int) -> None:
        """Meet a node that no tensor leads to."""
        if index not in self.number:
            self.follow(self._meet(index)[::-1])

    def _meet(self, index: int) -> list[str]:
        """Number a node, what it makes and what its bodies are given; what it reads comes next, the last first."""
        self.number[index] = len(self.number)
        node, bodies = self.graph.nodes[index], self.graph.bodies.get(index, ())
        reference = self.reference
        for name in node.outputs:
            reference.setdefault(name, len(reference))
        given = [*node.inputs]
        for body in bodies:
            for name in body.inputs:
                reference[name] = len(reference)
            given += body.outputs
        return given[::-1]

    def digest(self, outputs: Sequence[str]) -> str:
        """All that was met, in the order of the numbers: what each node does, and the numbers of what it reads."""
        words: dict[str, int] = {}
        told = array("q")
        nodes, labels, bodies, reference = (
            self.graph.nodes,
            self.labels,
            self.graph.bodies,
            self.reference,
        )
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
