"""partition(): a module taken apart into its children and what lies between them, in an order that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx

from modelexport.errors import FormatError
from modelexport.hierarchy.tree import is_within
from modelexport.pieces.build import Renamed, build, clashes
from modelexport.pieces.cut import Border, Cut, cut, leaving_of
from modelexport.pieces.extract import Extracted, TaggedFile, opened
from modelexport.pieces.levels import Level
from modelexport.pieces.order import Key, in_order
from modelexport.pieces.target import Target
from modelexport.pieces.write import loaded
from modelexport.tagged.files import StrPath


def partition(
    onnx_model: onnx.ModelProto | StrPath, module: str = "", *, call: int | None = None
) -> Iterator[Extracted]:
    """Take a module apart: a piece for each call of each child, and pieces of the module's own nodes between them.

    The pieces come in an order in which they can be run: each takes (`record.inputs`) what the
    module is given or what an earlier one gives (`record.outputs`). Together they hold every node of
    the module, and compute what it computes, bit for bit. A child that never runs itself, such as a
    list, stands for its own children. A call is split where something outside it runs in between.
    """
    with opened(onnx_model) as file:
        target = file.find(module, call)
        members = file.members(target)
        if file.is_all(target):
            yield from _constants(file, target)
        renamed = clashes(cut(members)) if len(members) > 1 else {}  # one level has no name twice
        for level, places in members:
            yield from _pieces(file, target, level, places, renamed)


def _constants(file: TaggedFile, target: Target) -> Iterator[Extracted]:
    """A piece without nodes for what a model gives back though no node makes it."""
    main = file.source.main
    given = tuple(Border(main, value.name) for value in main.graph.output if value.name in main.weights)
    if given:
        piece = build(file.source, Cut((), (), given, given), target, "")
        yield Extracted(loaded(piece, file.weights), piece.record)


def _pieces(file: TaggedFile, target: Target, level: Level, places: list[int], renamed: Renamed) -> Iterator[Extracted]:
    """The pieces of one level."""
    flow = level.flow(len(level.nodes))
    readers = _Readers(level, places, leaving_of(level, places, file.modules.results(target)))
    constant = set(flow.constant.values())
    keys: dict[int, Key | None] = {}
    for place in places:
        key = _child(file, target, level, place)
        if key is not None or place not in constant or readers.needed(place):
            keys[place] = key
    pieces = list(in_order(keys, readers.edges(keys)))
    counts = Counter(key for key, _ in pieces)
    seen: Counter[Key | None] = Counter()
    for key, members in pieces:
        part = seen[key] if counts[key] > 1 else None
        seen[key] += 1
        child = target if key is None else Target(key[0], file.modules.tags.get(key[0]), key[1])
        piece = cut([(level, members)], leaving=readers.leaving(members))
        built = build(file.source, piece, child, "", part, renamed)
        yield Extracted(loaded(built, file.weights), built.record)


def _child(file: TaggedFile, target: Target, level: Level, place: int) -> Key | None:
    """The child and the call of it that a node belongs to; None for the module's own nodes."""
    tag = level.tags[place]
    if tag is None or not is_within(tag.hierarchy_module, target.path) or tag.hierarchy_module == target.path:
        return None
    return file.modules.child_call(tag.hierarchy_module, tag.hierarchy_call, target.path)


class _Readers:
    """Who reads what among the nodes of a module in one level."""

    def __init__(self, level: Level, places: Sequence[int], leaving: Sequence[str]) -> None:
        self._level = level
        self._leaving = set(leaving)
        self._constant = level.flow(len(level.nodes)).constant
        self._maker = {name: place for place in places for name in level.nodes[place].output if name}
        self._reads = {place: level.reads(place) for place in places}
        self._read_by: dict[str, list[int]] = {}
        for place, names in self._reads.items():
            for name in names:
                self._read_by.setdefault(name, []).append(place)

    def needed(self, place: int) -> bool:
        """Whether what a constant node makes leaves the module, or is read by nobody in it."""
        names = [name for name in self._level.nodes[place].output if name]
        return any(name in self._leaving for name in names) or not any(name in self._read_by for name in names)

    def edges(self, kept: Mapping[int, object]) -> dict[int, list[int]]:
        """For each of these nodes those among them that it reads from, all of which come before it."""
        makers = {place: map(self._maker.get, self._reads[place]) for place in kept}
        edges = {
            place: [maker for maker in found if maker is not None and maker in kept] for place, found in makers.items()
        }
        if any(maker >= place for place, found in edges.items() for maker in found):
            raise FormatError(
                "the nodes are in no order that runs",
                hint="one reads what comes after it, or two make a tensor of the same name",
            )
        return edges

    def leaving(self, members: Sequence[int]) -> list[str]:
        """What a piece gives: to other pieces, or out of the module."""
        own = set(members)
        made = [name for place in members for name in self._level.nodes[place].output if name]
        given = [
            name
            for name in made
            if name in self._leaving
            or (name not in self._constant and any(reader not in own for reader in self._read_by.get(name, ())))
        ]
        return given or made
