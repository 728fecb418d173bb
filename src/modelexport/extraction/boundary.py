"""The boundary of a module: its nodes, the constants it needs, and the values that cross."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import onnx

from modelexport.graph.nested import ConstantFlow, Subgraph, SubgraphValue

Members = list[tuple[Subgraph, list[int]]]
"""Nodes by level and place, those of outer levels first."""


class SubgraphPart(NamedTuple):
    """The nodes of a piece that lie in one level, by their places there; those inside their bodies come along."""

    level: Subgraph
    members: tuple[int, ...]
    pulled: tuple[int, ...] = ()


class Boundary(NamedTuple):
    """One piece. `weights` are initializers, each with the level that holds it."""

    parts: tuple[SubgraphPart, ...]
    inputs: tuple[SubgraphValue, ...]
    outputs: tuple[SubgraphValue, ...]
    weights: tuple[SubgraphValue, ...]

    @property
    def size(self) -> int:
        """How many nodes it has, with those inside them, without what is pulled in."""
        return sum(
            1 + sum(sum(1 for _ in body.tags_inside()) for body in part.level.bodies.get(place, ()))
            for part in self.parts
            for place in part.members
        )

    def annotations(self) -> Iterator[tuple[Subgraph, onnx.TensorAnnotation]]:
        """The notes on the quantization of tensors that are in the piece, each with the level that has it."""
        present: dict[int, tuple[Subgraph, set[str]]] = {}
        for part in self.parts:
            names = present.setdefault(id(part.level), (part.level, set()))[1]
            names.update(
                name
                for place in (*part.members, *part.pulled)
                for name in part.level.nodes[place].output
            )
        for border in (*self.inputs, *self.weights):
            present.setdefault(id(border.level), (border.level, set()))[1].add(border.name)
        for level, names in present.values():
            yield from (
                (level, note)
                for note in level.graph.quantization_annotation
                if note.tensor_name in names
            )

    def with_annotated_weights(self) -> Boundary:
        """The piece with the scales and zero points that notes on its tensors name, though no node reads them."""
        added = dict.fromkeys(self.weights)
        for level, note in self.annotations():
            for entry in note.quant_parameter_tensor_names:
                holder: Subgraph | None = level
                while holder is not None and entry.value not in holder.weights:
                    holder = holder.outer
                if holder is not None:
                    added[SubgraphValue(holder, entry.value)] = None
        return self._replace(weights=tuple(added))

    def end(self, main: Subgraph) -> int:
        """One past the last node of the main graph that has to do with it."""
        last = -1
        for part in self.parts:
            level, place = part.level, max((*part.members, *part.pulled), default=-1)
            while level.outer is not None:
                level, place = level.outer, level.place
            last = max(last, place)
        return last + 1


def whole_model(main: Subgraph) -> Boundary:
    """All of a model, as it is."""
    places = tuple(range(len(main.nodes)))
    inputs = tuple(SubgraphValue(main, value.name) for value in main.graph.input)
    outputs = tuple(SubgraphValue(main, value.name) for value in main.graph.output)
    return Boundary(
        (SubgraphPart(main, places),),
        inputs,
        outputs,
        tuple(SubgraphValue(main, name) for name in main.weights),
    )


def members_of(main: Subgraph, belongs: Callable[[str, int | None], bool]) -> Members:
    """The nodes of a module, by its path and call; what lies in the bodies of its own nodes comes along with them."""
    found: Members = []
    pending = [main]
    for level in pending:
        own = [
            place
            for place, tag in enumerate(level.tags)
            if tag is not None and belongs(tag.hierarchy_module, tag.hierarchy_call)
        ]
        if own:
            found.append((level, own))
        taken = set(own)
        for place, bodies in level.bodies.items():
            if place not in taken:
                pending += bodies
    return found


def find_boundary(
    members: Members, results: Collection[str] = (), leaving: Sequence[str] | None = None
) -> Boundary:
    """The piece that these nodes make up.

    `results` leave it as well if it makes them; `leaving` are its outputs where those are known already.
    """
    gathered = _Gathered()
    outputs: list[SubgraphValue] = []
    for level, places in members:
        gathered.add(level, places)
        outputs += [
            SubgraphValue(level, name)
            for name in (leaving_of(level, places, results) if leaving is None else leaving)
        ]
    inputs = tuple(in_graph_order(gathered.inputs))
    return Boundary(
        gathered.parts(), inputs, tuple(outputs), tuple(gathered.weights)
    ).with_annotated_weights()


def in_graph_order(borders: Iterable[SubgraphValue]) -> list[SubgraphValue]:
    """Tensors as they are first read, but the inputs of a graph in their own order among themselves."""
    borders = list(borders)
    rank: dict[SubgraphValue, int] = {}
    for level in {id(border.level): border.level for border in borders}.values():
        rank.update(
            (SubgraphValue(level, value.name), number)
            for number, value in enumerate(level.graph.input)
        )
    following = iter(
        sorted((border for border in borders if border in rank), key=lambda border: rank[border])
    )
    return [next(following) if border in rank else border for border in borders]


def ends_in_order(level: Subgraph, borders: Iterable[SubgraphValue]) -> list[SubgraphValue]:
    """Tensors as they are made, but the outputs of a graph in their own order among themselves."""
    borders = list(borders)
    there = set(borders)
    ends = dict.fromkeys(SubgraphValue(level, value.name) for value in level.graph.output)
    following = iter([border for border in ends if border in there])
    return [next(following) if border in ends else border for border in borders]


class _Gathered:
    """Members with everything that they need: what they read is made by them, a weight, a constant, or an input."""

    def __init__(self) -> None:
        self.inputs: dict[SubgraphValue, None] = {}
        self.weights: dict[SubgraphValue, None] = {}
        self._members: dict[int, tuple[Subgraph, set[int]]] = {}
        self._pulled: dict[int, tuple[Subgraph, set[int]]] = {}
        self._made: dict[int, set[str]] = {}

    def add(self, level: Subgraph, places: Sequence[int]) -> None:
        own = set(places)
        self._members[id(level)] = (level, own)
        self._made[id(level)] = {name for place in places for name in level.nodes[place].output}
        flow = level.flow(max(places) + 1)
        entering: dict[str, None] = {}
        for place in places:
            entering.update(dict.fromkeys(level.reads(place)))
        for name in entering:
            self._need(flow, name)

    def _need(self, flow: ConstantFlow, name: str) -> None:
        pending = [(flow, name)]
        while pending:
            seen_from, name = pending.pop()
            level = _level_of(seen_from.level, name, self._made)
            if level is not None:
                continue
            weight = _holder(seen_from, name)
            if weight is not None:
                self.weights[SubgraphValue(weight, name)] = None
                continue
            producer = seen_from.producer(name)
            if producer is None:
                self.inputs[SubgraphValue(_home(seen_from, name), name)] = None
                continue
            home, place = producer
            _, places = self._pulled.setdefault(id(home.level), (home.level, set()))
            if (
                place not in places
                and place not in self._members.get(id(home.level), (None, ()))[1]
            ):
                places.add(place)
                pending += [(home, read) for read in home.level.reads(place)]

    def parts(self) -> tuple[SubgraphPart, ...]:
        found: dict[int, SubgraphPart] = {}
        for key, (level, places) in self._pulled.items():
            found[key] = SubgraphPart(level, (), tuple(sorted(places)))
        for key, (level, places) in self._members.items():
            pulled = found[key].pulled if key in found else ()
            found[key] = SubgraphPart(
                level,
                tuple(sorted(places)),
                tuple(place for place in pulled if place not in places),
            )
        return tuple(sorted(found.values(), key=lambda part: len(part.level.prefix)))


def _level_of(level: Subgraph | None, name: str, made: dict[int, set[str]]) -> Subgraph | None:
    """The level, from this one outwards, whose members make a tensor."""
    while level is not None and name not in made.get(id(level), ()):
        level = level.outer
    return level


def _holder(flow: ConstantFlow | None, name: str) -> Subgraph | None:
    """The level, from this one outwards, that has an initializer of this name."""
    while flow is not None:
        if name in flow.level.weights:
            return flow.level
        flow = flow.outer
    return None


def _home(flow: ConstantFlow, name: str) -> Subgraph:
    """The outermost level from which a tensor that varies can be seen."""
    while flow.outer is not None and name in flow.outer.varying:
        flow = flow.outer
    return flow.level


def leaving_of(level: Subgraph, places: Sequence[int], results: Collection[str]) -> list[str]:
    """What others read of these nodes, or the graph gives back; failing that, what they make and do not read.

    A constant that others read does not leave: they have it themselves.
    """
    made = dict.fromkeys(name for place in places for name in level.nodes[place].output if name)
    own = set(places)
    leaving = {
        name for name in (*(value.name for value in level.graph.output), *results) if name in made
    }
    bodies = level.bodies
    constant = level.flow(max(places) + 1).constant
    for place in range(min(places), len(level.nodes)):
        if place not in own:
            for name in level.reads(place) if place in bodies else level.nodes[place].input:
                if name in made and name not in constant:
                    leaving.add(name)
    if not leaving:
        inside = {name for place in places for name in level.reads(place)}
        leaving = {name for name in made if name not in inside} or set(made)
    leaving_in_order = ends_in_order(
        level, (SubgraphValue(level, name) for name in made if name in leaving)
    )
    return [border.name for border in leaving_in_order]
