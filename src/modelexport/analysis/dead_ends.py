"""Numbers the nodes of a graph that no output needs, so that the order of a file does not matter for them either.

Without an output to start from, nodes are told apart by colours: what a node does, all that it reads and
all that reads it, refined until nothing more can be told apart. Nodes of one colour look the same from
everywhere, and any of them may come first; the others are then coloured anew, now knowing which it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Protocol

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph


class Walk(Protocol):
    """What has been met so far: nodes by number, tensors by reference, and what leaves hold."""

    graph: Graph
    labels: Sequence[str] | Mapping[int, str]
    leaves: dict[str, str]
    number: dict[int, int]
    reference: dict[str, int]

    def visit(self, index: int) -> None: ...


def number_dead_ends(walk: Walk, dead: Iterable[int]) -> None:
    """Visit all nodes that were not met, in an order that names and the order of the file have no part in."""
    left = {index for index in dead if index not in walk.number}
    while left:
        part = _Part(walk, left)
        groups: dict[str, list[int]] = {}
        for index in part.sinks():
            groups.setdefault(part.colour[index], []).append(index)
        for colour in sorted(groups):
            group = groups[colour]
            settled = len(group) == 1 or all(part.reads_only_met(index) for index in group)
            for index in group if settled or part.are_apart(group) else group[:1]:
                walk.visit(index)
            if not settled:
                break
        left -= walk.number.keys()


class _Part:
    """The nodes that are left, and the tensors among them."""

    def __init__(self, walk: Walk, left: set[int]) -> None:
        self.walk = walk
        self.left = left
        graph = walk.graph
        self.inside: dict[int, list[int]] = {}
        self.uses: dict[str, list[tuple[int, int]]] = {}
        for index in sorted(left):
            node = graph.nodes[index]
            self.inside.setdefault(node.enclosing, []).append(index)
            for place, name in enumerate(self._reads(index)):
                self.uses.setdefault(name, []).append((index, place))
        self.order = self._topological()
        self.colour = {index: walk.labels[index] for index in left}
        given = self._given_to_bodies()
        self._leaf = {
            name: given.get(name) or walk.leaves.get(name, "undefined")
            for name in self.uses
            if self._is_unmet_leaf(name)
        }
        self._joined = {index: index for index in left}
        self._join()
        self._refine()

    def _reads(self, index: int) -> list[str]:
        """The inputs of a node, and what its bodies give back."""
        bodies = self.walk.graph.bodies.get(index, ())
        return [
            *self.walk.graph.nodes[index].inputs,
            *(name for body in bodies for name in body.outputs),
        ]

    def _makes(self, index: int) -> list[tuple[int, str]]:
        """The outputs of a node by their places, but for those of a name that another node makes after it."""
        producer = self.walk.graph.producer
        return [
            (at, name)
            for at, name in enumerate(self.walk.graph.nodes[index].outputs)
            if producer[name] == index
        ]

    def _is_unmet_leaf(self, name: str) -> bool:
        return name not in self.walk.graph.producer and name not in self.walk.reference

    def _given_to_bodies(self) -> dict[str, str]:
        """The inputs of the bodies of what is left, each by its place."""
        return {
            name: f"{body.label} {place}"
            for index, bodies in self.walk.graph.bodies.items()
            if index in self.left
            for body in bodies
            for place, name in enumerate(body.inputs)
        }

    def _topological(self) -> list[int]:
        """Each node after those that it reads and those in its bodies."""
        producer = self.walk.graph.producer
        before = {
            index: {
                *self.inside.get(index, ()),
                *(producer[name] for name in self._reads(index) if name in producer),
            }
            & self.left
            for index in sorted(self.left)
        }
        try:
            return list(TopologicalSorter(before).static_order())
        except CycleError as error:
            raise FormatError(
                "the graph has a cycle", hint="no runtime can run it; export it again"
            ) from error

    def _refine(self) -> None:
        count = 0
        while (now := len({*self.colour.values(), *self._leaf.values()})) > count:
            count = now
            forward = self._forward()
            self.colour = self._backward(forward)
            self._leaf = {
                name: _hash([text, *self._readers(name, self.colour)])
                for name, text in self._leaf.items()
            }

    def _forward(self) -> dict[int, str]:
        """Each colour with those of everything before."""
        made: dict[str, str] = {}
        told: dict[int, str] = {}
        for index in self.order:
            sources = [made.get(name) or self._source(name) for name in self._reads(index)]
            inside = sorted(told[inner] for inner in self.inside.get(index, ()))
            told[index] = _hash([self.colour[index], *sources, "holds", *inside])
            made.update((name, f"{told[index]}.{place}") for place, name in self._makes(index))
        return told

    def _source(self, name: str) -> str:
        number = self.walk.reference.get(name)
        return self._leaf[name] if number is None else str(number)

    def _backward(self, forward: Mapping[int, str]) -> dict[int, str]:
        """Each colour with those of everything behind and around."""
        graph = self.walk.graph
        told: dict[int, str] = {}
        for index in reversed(self.order):
            node = graph.nodes[index]
            around = told.get(node.enclosing) or str(self.walk.number.get(node.enclosing))
            readers = [
                reader
                for _, name in self._makes(index)
                for reader in [*self._readers(name, told), "output"]
            ]
            told[index] = _hash([forward[index], around, *readers])
        return told

    def _readers(self, name: str, colour: Mapping[int, str]) -> list[str]:
        return sorted(f"{colour[reader]} {place}" for reader, place in self.uses.get(name, ()))

    def sinks(self) -> list[int]:
        """The nodes that nothing left reads, and that are in no body of what is left."""
        nodes = self.walk.graph.nodes
        return [
            index
            for index in sorted(self.left)
            if nodes[index].enclosing not in self.left
            and not any(name in self.uses for _, name in self._makes(index))
        ]

    def are_apart(self, group: Sequence[int]) -> bool:
        """Whether no two of these have anything in common that is left, so that any may come before the others."""
        return len({self._island(index) for index in group}) == len(group)

    def _island(self, index: int) -> int:
        """A number for all nodes that hang together with this one."""
        while self._joined[index] != index:
            self._joined[index] = index = self._joined[self._joined[index]]
        return index

    def _join(self) -> None:
        """Each node with one that it hangs together with: by a tensor that both touch, or one in the other's body."""
        nodes, producer = self.walk.graph.nodes, self.walk.graph.producer
        for name, uses in self.uses.items():
            maker = producer.get(name)
            touching = [reader for reader, _ in uses]
            if maker in self.left:
                touching.append(maker)
            elif name in self.walk.reference:
                continue
            for other in touching[1:]:
                self._joined[self._island(other)] = self._island(touching[0])
        for index in self.left:
            if nodes[index].enclosing in self.left:
                self._joined[self._island(index)] = self._island(nodes[index].enclosing)

    def reads_only_met(self, index: int) -> bool:
        return index not in self.inside and all(
            name in self.walk.reference for name in self._reads(index)
        )


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
