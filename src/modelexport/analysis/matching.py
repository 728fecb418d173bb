"""Match the nodes of two graphs, whatever their names and order.

Equal graphs have the same canonical form, which pairs all their nodes. Of graphs that differ
somewhere, nodes are matched by what they are computed from and what is computed from them, then by
either alone, so that a change in the middle leaves everything before and after it matched. The rest
is matched by the names of values, by inputs, and last by operator within a module.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, Node
from modelexport.onnx_file.digests import message_content

_END, _ENCLOSED, _SUBGRAPH, _LAST_LEAF = -1, -2, -3, -3
"""Separators in the sequence of numbers that is hashed; leaves have numbers below `_LAST_LEAF`."""

Labels = Sequence[str] | Mapping[int, str]
"""What each node computes, by its index: see `node_labels`."""


class LabeledGraph(NamedTuple):
    """A graph with what identifies its nodes and leaves.

    `labels` are those of `node_labels`, `initializers` has the digest of the content of each
    initializer, `modules` the module path of each node, None for a node without a tag, and
    `input_types` the element type of each input.
    """

    graph: Graph
    labels: Sequence[str]
    initializers: Mapping[str, str]
    modules: Sequence[str | None]
    input_types: Mapping[str, int] = {}

    @property
    def leaves(self) -> dict[str, Hashable]:
        """What identifies each initializer, by content, and each input, by position."""
        leaves: dict[str, Hashable] = {
            name: ("initializer", digest) for name, digest in self.initializers.items()
        }
        leaves.update((name, ("input", i)) for i, name in enumerate(self.graph.inputs))
        return leaves


class CanonicalForm(NamedTuple):
    """The digest of a graph, and its nodes in canonical order.

    Graphs with equal digests have the same node at the same position of `order`.
    """

    digest: str
    order: list[int]


def canonical_form(side: LabeledGraph) -> CanonicalForm:
    """Compute the canonical form of a model: of its main graph and all local functions."""
    graph, labels = side.graph, side.labels
    leaves = {name: f"initializer {digest}" for name, digest in side.initializers.items()}
    leaves |= {name: f"input {i} {side.input_types[name]}" for i, name in enumerate(graph.inputs)}
    members = [index for index, node in enumerate(graph.nodes) if not node.function]
    forms = [_form(graph, members, labels, leaves, graph.outputs)]
    forms += [_function_form(graph, key, labels) for key in sorted(graph.functions)]
    return CanonicalForm(
        _hash(form.digest for form in forms), [index for form in forms for index in form.order]
    )


def node_labels(graph: Graph, attributes: Sequence[str | None]) -> list[str]:
    """Label each node, so that nodes with equal labels compute the same from the same inputs.

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
        self.leaves = defaultdict(lambda: "undefined", leaves)
        self.number: dict[int, int] = {}
        self.reference: dict[str, int] = {}
        self._reached_leaves: list[str] = []
        for subgraph in (subgraph for nested in graph.subgraphs.values() for subgraph in nested):
            for name, tensor in subgraph.initializers.items():
                digest = hashlib.sha256(message_content(tensor)).hexdigest()
                self.leaves[name] = f"initializer {digest}"

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
                self._reached_leaves.append(self.leaves[name])
                reference[name] = -len(self._reached_leaves) + _LAST_LEAF
            else:  # not numbered yet, or all its outputs would have a reference
                stack.extend(self._add_node(index))

    def _add_node(self, index: int) -> list[str]:
        """Number a node, its outputs and the inputs of its subgraphs; return what to follow."""
        self.number[index] = len(self.number)
        node, subgraphs = self.graph.nodes[index], self.graph.subgraphs.get(index, ())
        reference = self.reference
        for name in node.outputs:
            reference.setdefault(name, len(reference))
        sources = [*node.inputs]
        for subgraph in subgraphs:
            for name in subgraph.inputs:
                reference[name] = len(reference)
            sources += subgraph.outputs
        return sources[::-1]

    def dead_digests(self, members: Iterable[int]) -> list[tuple[str, int]]:
        """Describe each node that no output needs by its label and all that it is computed from.

        Such nodes are not numbered: which of two equal ones feeds a third changes no result.
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
            for subgraph in self.graph.subgraphs.get(index, ()):
                known.update(
                    (name, f"{digest} {subgraph.label} {i}")
                    for i, name in enumerate(subgraph.inputs)
                )
        for index in digests:  # the nodes of a subgraph come after the node that holds it
            subgraphs = self.graph.subgraphs.get(index, ())
            ends = [self._source(name, known) for inner in subgraphs for name in inner.outputs]
            if ends:
                digests[index] = _hash([digests[index], *ends])
        return [(digest, index) for index, digest in digests.items()]

    def _source(self, name: str, known: Mapping[str, str]) -> str:
        number = self.reference.get(name)
        return known.get(name) or self.leaves[name] if number is None else str(number)

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
            for subgraph in self.graph.subgraphs.get(index, ()):
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
    return graph.subgraphs[node.enclosing][node.subgraph_number].label


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def match_nodes(a: LabeledGraph, b: LabeledGraph, certain: bool = False) -> dict[int, int]:
    """Return the index in `b` of each node of `a` that has a match, by its index in `a`.

    Args:
        a: The first graph.
        b: The second graph.
        certain: Match only by structure, and only nodes that are the only ones of their kind.
    """
    matches: dict[int, int] = {}
    before: dict[Hashable, int] = {}
    after: dict[Hashable, int] = {}
    upstream = [_upstream_numbers(side, before) for side in (a, b)]
    downstream = [_downstream_numbers(side, after) for side in (a, b)]
    both = [list(zip(*pair, strict=True)) for pair in zip(upstream, downstream, strict=True)]
    extend = _extend_certain if certain else functools.partial(_extend, a.graph, b.graph)
    for keys in (both, upstream, downstream):
        if len(matches) < min(map(len, keys)):
            extend(matches, *keys)
    if certain:
        return matches
    extend(matches, *([(node.key, node.op_type) for node in side.graph.nodes] for side in (a, b)))
    extend(matches, _input_keys(a, matches), _input_keys(b, None))
    if any(a.modules) and any(b.modules):
        extend(matches, _module_keys(a), _module_keys(b))
    return matches


def _extend(
    a: Graph,
    b: Graph,
    matches: dict[int, int],
    keys_a: Sequence[Hashable],
    keys_b: Sequence[Hashable],
) -> None:
    """Match unmatched nodes with equal keys; among several, those of the same name first."""
    groups_b = _group_by_key(keys_b, set(matches.values()))
    for key, left in _group_by_key(keys_a, matches).items():
        right = groups_b.get(key, [])
        by_name = {b.nodes[index].key: index for index in right}
        named = {i: by_name[a.nodes[i].key] for i in left if a.nodes[i].key in by_name}
        used = set(named.values())
        rest = (i for i in left if i not in named), (i for i in right if i not in used)
        matches |= named
        matches.update(zip(*rest, strict=False))


def _extend_certain(
    matches: dict[int, int], keys_a: Sequence[Hashable], keys_b: Sequence[Hashable]
) -> None:
    """Match unmatched nodes with equal keys that no other node of either graph has."""
    indices_b, used = _unique_keys(keys_b), set(matches.values())
    for key, index in _unique_keys(keys_a).items():
        other = indices_b.get(key)
        if other is not None and index not in matches and other not in used:
            matches[index] = other


def _unique_keys(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    """Return the index of the node with each key, of the keys that only one node has."""
    counts = Counter(keys)
    return {key: index for index, key in enumerate(keys) if counts[key] == 1}


def _group_by_key(keys: Sequence[Hashable], matched: Container[int]) -> dict[Hashable, list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        if key is not None and index not in matched:
            groups[key].append(index)
    return groups


def _upstream_numbers(side: LabeledGraph, numbers: dict[Hashable, int]) -> list[int]:
    """Number nodes so that equal numbers mean the same operations on everything before."""
    graph, labels, known = side.graph, side.labels, side.leaves
    enclosed: defaultdict[int, list[str]] = defaultdict(list)
    for node, label in zip(graph.nodes, labels, strict=True) if graph.subgraphs else ():
        enclosed[node.enclosing].append(label)  # -1 in the main graph
    result = []
    for index, node in enumerate(graph.nodes):
        key: Hashable = (labels[index], *map(known.get, node.inputs))
        if index in enclosed:
            key = (key, *sorted(enclosed[index]))
        number = numbers.setdefault(key, len(numbers))
        result.append(number)
        for i, name in enumerate(node.outputs):
            known[name] = (number, i) if i else number
    return result


def _downstream_numbers(side: LabeledGraph, numbers: dict[Hashable, int]) -> list[int]:
    """Number nodes so that equal numbers mean the same operations on everything after."""
    graph, labels = side.graph, side.labels
    uses: defaultdict[str, list[Hashable]] = defaultdict(list)
    for i, name in enumerate(graph.outputs):
        uses[name].append((0, "output", i))
    for subgraph in (subgraph for nested in graph.subgraphs.values() for subgraph in nested):
        for i, name in enumerate(subgraph.outputs):
            uses[name].append((1, subgraph.label, i))
    result = []
    for node, label in zip(reversed(graph.nodes), reversed(labels), strict=True):
        key: list[Hashable] = [label]
        for i, name in enumerate(node.outputs):
            ends = uses.get(name, [])
            # Nothing orders the consumers of a value across two files, so they are sorted.
            if len(ends) > 1:
                ends.sort(key=repr)
            key += (i, *ends)
        number = numbers.setdefault(tuple(key), len(numbers))
        result.append(number)
        inputs = node.inputs
        for at, name in enumerate(inputs):
            if inputs.count(name) == 1:
                uses[name].append((number, at))
            elif inputs.index(name) == at:
                uses[name].append((number, *[i for i, each in enumerate(inputs) if each == name]))
    return result[::-1]


def _input_keys(side: LabeledGraph, matches: Mapping[int, int] | None) -> list[Hashable]:
    """Return the sources of each node's inputs, in terms of the other graph given `matches`."""
    graph, leaves = side.graph, side.leaves

    def source(name: str) -> Hashable:
        index = graph.producer.get(name)
        if index is None:
            return leaves.get(name)
        other = index if matches is None else matches.get(index)
        return other, graph.nodes[index].outputs.index(name)

    return [tuple([source(name) for name in node.inputs]) or None for node in graph.nodes]


def _module_keys(side: LabeledGraph) -> list[Hashable]:
    return [
        None if module is None else (module, node.op_type)
        for node, module in zip(side.graph.nodes, side.modules, strict=True)
    ]
