"""The canonical form of a graph: equal for two graphs that differ only in names and in order."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, Node
from modelexport.onnx_file.digests import message_content

_END, _ENCLOSED, _SUBGRAPH, _LAST_LEAF = -1, -2, -3, -3
"""Separators in the sequence of numbers that is hashed; leaves have numbers below `_LAST_LEAF`."""

Labels = Sequence[str] | Mapping[int, str]
"""What each node computes, by its index: see `node_labels`."""


class CanonicalForm(NamedTuple):
    """The digest of a graph, and its nodes in canonical order.

    Graphs with equal digests have the same node at the same position of `order`.
    """

    digest: str
    order: list[int]


def canonical_form(
    graph: Graph, proto: onnx.ModelProto, initializers: Mapping[str, str], labels: Labels
) -> CanonicalForm:
    """Compute the canonical form of a model.

    Args:
        graph: The model laid flat.
        proto: The model, for the types of its inputs.
        initializers: The digest of the content of each initializer of the main graph.
        labels: The labels of all nodes, from `node_labels`.

    Returns:
        The form of the main graph and of all local functions.
    """
    leaves = {name: f"initializer {digest}" for name, digest in initializers.items()}
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    leaves |= {name: f"input {number} {types[name]}" for number, name in enumerate(graph.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if not node.function]
    forms = [_form(graph, members, labels, leaves, graph.outputs)]
    forms += [_function_form(graph, key, labels) for key in sorted(graph.functions)]
    return CanonicalForm(
        _hash(form.digest for form in forms), [index for form in forms for index in form.order]
    )


def node_labels(graph: Graph, attributes: Sequence[str | None]) -> list[str]:
    """Describe what each node computes, apart from its inputs, as a text.

    Args:
        graph: The model laid flat.
        attributes: The digest of the attributes of each node.

    Returns:
        One label per node; nodes with equal labels compute the same from the same inputs.

    Raises:
        FormatError: If a local function calls itself.
    """
    functions: dict[str, str] = {}
    members: dict[str, list[int]] = {key: [] for key in graph.functions}
    for index, node in enumerate(graph.nodes):
        if node.function:
            members[node.function].append(index)
    for key in _callees_first(graph, members):
        labels = {
            index: _label(graph.nodes[index], attributes[index], functions)
            for index in members[key]
        }
        # A broken file can lead from the function to a node outside it, which has no label here.
        functions[key] = _function_form(graph, key, defaultdict(str, labels)).digest
    return [
        _label(node, digest, functions)
        for node, digest in zip(graph.nodes, attributes, strict=True)
    ]


def _label(node: Node, attributes: str | None, functions: Mapping[str, str]) -> str:
    called = functions.get(node.calls_function, "") if node.calls_function else ""
    return f"{node.domain}:{node.op_type} {len(node.outputs)} {node.gaps} {attributes} {called}"


def _callees_first(graph: Graph, members: Mapping[str, Sequence[int]]) -> list[str]:
    """Order the local functions so that each comes after those that it calls."""
    calls = {
        key: {graph.nodes[index].calls_function for index in indices} - {""}
        for key, indices in members.items()
    }
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise FormatError(
            f"the function {error.args[1][0]} calls itself", hint="ONNX has no recursion"
        ) from error


def _function_form(graph: Graph, key: str, labels: Labels) -> CanonicalForm:
    function = graph.functions[key]
    leaves = {name: f"input {number}" for number, name in enumerate(function.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if node.function == key]
    form = _form(graph, members, labels, leaves, function.outputs)
    return CanonicalForm(_hash([key, function.declared, form.digest]), form.order)


def _form(
    graph: Graph,
    members: Sequence[int],
    labels: Labels,
    leaves: Mapping[str, str],
    outputs: Sequence[str],
) -> CanonicalForm:
    numbering = _Numbering(graph, labels, leaves)
    numbering.follow(outputs)
    unused = sorted(text for name, text in leaves.items() if name not in numbering.reference)
    dead = sorted(numbering.dead_digests(members))
    return CanonicalForm(
        _hash([numbering.digest(outputs), *unused, *(digest for digest, _ in dead)]),
        [*numbering.number, *(index for _, index in dead)],
    )


class _Numbering:
    """Numbers for nodes and values, in the order in which a walk from the outputs reaches them."""

    def __init__(self, graph: Graph, labels: Labels, leaves: Mapping[str, str]) -> None:
        self.graph = graph
        self.labels = labels
        self.leaves = dict(leaves)
        self.number: dict[int, int] = {}
        self.reference: dict[str, int] = {}
        self._reached_leaves: list[str] = []
        for subgraph in (subgraph for nested in graph.bodies.values() for subgraph in nested):
            for name, tensor in subgraph.initializers.items():
                self.leaves[name] = (
                    f"initializer {hashlib.sha256(message_content(tensor)).hexdigest()}"
                )

    def follow(self, names: Sequence[str]) -> None:
        """Number these values and everything that they are computed from."""
        stack = list(reversed(names))
        producer, reference = self.graph.producer, self.reference
        while stack:
            name = stack.pop()
            if name in reference:
                continue
            index = producer.get(name)
            if index is None:
                self._reached_leaves.append(self._leaf(name))
                reference[name] = -len(self._reached_leaves) + _LAST_LEAF
            else:  # not numbered yet, or all its outputs would have a reference
                stack.extend(self._add_node(index))

    def _add_node(self, index: int) -> list[str]:
        """Number a node, its outputs and the inputs of its subgraphs; return what to follow."""
        self.number[index] = len(self.number)
        node, subgraphs = self.graph.nodes[index], self.graph.bodies.get(index, ())
        reference = self.reference
        for name in node.outputs:
            reference.setdefault(name, len(reference))
        sources = [*node.inputs]
        for subgraph in subgraphs:
            for name in subgraph.inputs:
                reference[name] = len(reference)
            sources += subgraph.outputs
        return sources[::-1]

    def _leaf(self, name: str) -> str:
        return self.leaves.get(name, "undefined")

    def dead_digests(self, members: Iterable[int]) -> list[tuple[str, int]]:
        """Describe each node that no output needs by its label and all that it is computed from.

        Such nodes are counted, not numbered: which of two equal dead nodes feeds a third dead one
        makes no difference to any result.
        """
        known: dict[str, str] = {}
        digests: dict[int, str] = {}
        for index in members:
            if index in self.number:
                continue
            node = self.graph.nodes[index]
            enclosing = digests.get(node.enclosing, str(self.number.get(node.enclosing)))
            sources = [self._source(name, known) for name in node.inputs]
            if node.enclosing >= 0:
                enclosing += _subgraph_label(self.graph, node)
            digest = _hash([self.labels[index], enclosing, *sources])
            digests[index] = digest
            known.update((name, f"{digest} {i}") for i, name in enumerate(node.outputs))
            for subgraph in self.graph.bodies.get(index, ()):
                known.update(
                    (name, f"{digest} {subgraph.label} {i}")
                    for i, name in enumerate(subgraph.inputs)
                )
        for index in digests:  # the nodes of a subgraph come after the node that holds it
            subgraphs = self.graph.bodies.get(index, ())
            ends = [self._source(name, known) for found in subgraphs for name in found.outputs]
            if ends:
                digests[index] = _hash([digests[index], *ends])
        return [(digest, index) for index, digest in digests.items()]

    def _source(self, name: str, known: Mapping[str, str]) -> str:
        number = self.reference.get(name)
        return known.get(name) or self._leaf(name) if number is None else str(number)

    def digest(self, outputs: Sequence[str]) -> str:
        """Hash all numbered nodes in order: what each computes, and the numbers of its inputs."""
        words: dict[str, int] = {}
        content = array("q")
        nodes, reference = self.graph.nodes, self.reference
        for index in self.number:
            node = nodes[index]
            content.append(words.setdefault(self.labels[index], len(words)))
            content.extend([reference[name] for name in node.inputs])
            if node.enclosing >= 0:
                label = words.setdefault(_subgraph_label(self.graph, node), len(words))
                content.extend((_ENCLOSED, self.number.get(node.enclosing, -1), label))
            for subgraph in self.graph.bodies.get(index, ()):
                label = words.setdefault(subgraph.label, len(words))
                content.extend((_SUBGRAPH, label, len(subgraph.inputs)))
                content.extend([reference[name] for name in subgraph.outputs])
            content.append(_END)
        content.extend([reference[name] for name in outputs])
        digest = hashlib.sha256(_hash([*words, *self._reached_leaves]).encode())
        digest.update(content.tobytes())
        return digest.hexdigest()


def _subgraph_label(graph: Graph, node: Node) -> str:
    """Return the label of the subgraph that a node is in."""
    return graph.bodies[node.enclosing][node.body].label


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
