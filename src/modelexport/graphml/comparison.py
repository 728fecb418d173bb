"""An assembled model against its picture: which node is which element, and whether anything was changed."""

from __future__ import annotations

import numpy as np

from modelexport.errors import FormatError
from modelexport.graph.flat import flatten
from modelexport.graphml.assembly import BODY_SCOPE, Assembly
from modelexport.graphml.parts import End, Parts
from modelexport.graphml.views import plain
from modelexport.graphml.wiring import Wiring, body_scope, structure_digest

_NOTHING, _NOTE = -1, -2


class Comparison:
    """The elements of an assembled model against the nodes and edges of the picture."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.parts = assembly.parts
        model = assembly.model(with_nodes=False)
        self.graph = flatten(model, assembly.stored_nodes())
        self.wiring = Wiring(self.graph, model)
        first = len(self.graph.nodes)
        known = {
            End(t.kind, t.scope, t.position): element
            for element, t in enumerate(self.wiring.terminals, first)
        }
        self.elements: dict[int, int] = {
            number: assembly.rank[order] for number, order in self.parts.orders.items()
        }
        places = _weight_ranks(self.parts)
        for number, end in self.parts.ends.items():
            position = places.get(end, end.position)
            element = known.get(End(end.kind, self.scope(end.scope), position))
            if element is None:
                raise FormatError(
                    f"{self.parts.places.get(number, end.kind)} belongs to no graph of the model"
                )
            self.elements[number] = element

    def scope(self, told: str) -> str:
        """The graph that a scope of the picture means, now that some operators may be gone."""
        found = BODY_SCOPE.fullmatch(told)
        if found is None or int(found[1]) not in self.assembly.rank:
            return told
        return body_scope(self.assembly.rank[int(found[1])], int(found[2]))

    def is_unchanged(self) -> bool:
        """Whether the picture has the structure that it was written with."""
        parts = self.parts
        if parts.added or any(part.edits for part in parts.operators.values()):
            return False
        if len(parts.weights) != parts.parameters.weights:
            return False
        if len(parts.orders) + len(parts.ends) != len(self.graph.nodes) + len(
            self.wiring.terminals
        ):
            return False
        for number, element in self.elements.items():
            if element >= len(self.graph.nodes):
                told = parts.told_names[number]
                if told and told != plain(self.wiring.terminal(element).name):
                    return False
        if self._notes_in_between() or not np.array_equal(self._drawn(), self._expected()):
            return False
        return self.is_recorded()

    def is_recorded(self) -> bool:
        """Whether the operators are those that were there when the GraphML was written."""
        return structure_digest(self.graph) == self.parts.card.told.get("topology", "")

    def _notes_in_between(self) -> bool:
        """Whether edges lead into a note and out of it again, as if it did something."""
        notes, edges = self.parts.notes, self.parts.edges
        if not notes:
            return False
        ends = list(zip(edges.sources, edges.targets, strict=True))
        outwards = {
            source for source, target in ends if source in notes and target in self.elements
        }
        return any(target in outwards and source in self.elements for source, target in ends)

    def _expected(self) -> np.ndarray:
        rows = np.fromiter((number for wire in self.wiring.wires() for number in wire), np.int64)
        return _sorted(rows.reshape(-1, 4))

    def _drawn(self) -> np.ndarray:
        edges = self.parts.edges
        lookup = np.full(len(edges.numbers) + 1, _NOTHING, np.int64)
        lookup[np.fromiter(self.elements, np.int64)] = np.fromiter(self.elements.values(), np.int64)
        ends = [
            lookup[np.frombuffer(column, np.int64)] for column in (edges.sources, edges.targets)
        ]
        rows = [
            ends[0],
            np.frombuffer(edges.outputs, np.int64),
            ends[1],
            np.frombuffer(edges.slots, np.int64),
        ]
        table = np.stack(rows, axis=1)
        if self.parts.notes:
            lookup[np.fromiter(self.parts.notes, np.int64)] = _NOTE
            drawn = [
                lookup[np.frombuffer(column, np.int64)] for column in (edges.sources, edges.targets)
            ]
            table = table[(drawn[0] != _NOTE) & (drawn[1] != _NOTE)]
        return _sorted(table)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def _weight_ranks(parts: Parts) -> dict[End, int]:
    """The place of every weight among those that are left of its graph."""
    ranks: dict[End, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for end in sorted(parts.weights):
        graph = (end.kind, end.scope)
        ranks[end] = counts.get(graph, 0)
        counts[graph] = ranks[end] + 1
    return ranks
