"""A first layout, in linear time: rows from top to bottom as the data flows, every group around its members.

Within a group a member stands one row below the lowest member that it reads from. A group that is
closed takes the room of its label; what is inside is laid out for the moment when it is opened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from modelexport.graphml.scene import SHEET, Scene

ROW_GAP, COLUMN_GAP = 44.0, 28.0
PADDING, HEADER = 18.0, 30.0
CLOSED_HEIGHT = 48.0
_WIDEST_ROW = 2600.0
_MOST_VISIBLE = 150
_CHARACTER, _LINE, _MARGIN = 7.2, 15.0, 18.0
_NARROWEST = 64.0


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Layout:
    """Where everything is. Boxes of groups are those of the open group; `closed_size` is the closed one's."""

    def __init__(self, scene: Scene, label: Callable[[int], str]) -> None:
        self._scene = scene
        count = len(scene.parents)
        self._x, self._y, self._width, self._height = (array("d", bytes(8 * count)) for _ in range(4))
        groups = len(scene.groups)
        self._group_x, self._group_y, self._open_width, self._open_height = (
            array("d", bytes(8 * groups)) for _ in range(4)
        )
        self._closed_width = array("d", bytes(8 * groups))
        for element in range(count):
            self._width[element], self._height[element] = text_size(label(element))
        for number in range(1, groups):
            self._closed_width[number] = max(text_size(label(~number))[0] + 24, 110.0)
        self.open_depth = _open_depth(scene)
        self._arrange()
        self._move_into_place()

    def is_closed(self, group: int) -> bool:
        return self._scene.groups[group].depth > self.open_depth or not self._scene.groups[group].members

    def box(self, element: int) -> Box:
        return Box(self._x[element], self._y[element], self._width[element], self._height[element])

    def open_box(self, group: int) -> Box:
        return Box(self._group_x[group], self._group_y[group], self._open_width[group], self._open_height[group])

    def closed_box(self, group: int) -> Box:
        return Box(self._group_x[group], self._group_y[group], self._closed_width[group], CLOSED_HEIGHT)

    def _size(self, member: int) -> tuple[float, float]:
        if member >= 0:
            return self._width[member], self._height[member]
        if self.is_closed(~member):
            return self._closed_width[~member], CLOSED_HEIGHT
        return self._open_width[~member], self._open_height[~member]

    def _arrange(self) -> None:
        """Every group's members relative to the group, innermost groups first."""
        scene = self._scene
        between = [array("q") for _ in scene.groups]
        for source, target in zip(scene.sources, scene.targets, strict=True):
            met = scene.meeting(source, target)
            if met is not None:
                between[met[0]].extend(met[1:])
        first = _first_orders(scene)
        for number in range(len(scene.groups) - 1, -1, -1):
            group = scene.groups[number]
            edge = 0.0 if number == SHEET else PADDING
            top = 0.0 if number == SHEET else HEADER + PADDING
            places, width, height = _rows(group.members, between[number], first, self._size)
            between[number] = array("q")
            for member, (x, y) in zip(group.members, places, strict=True):
                self._set(member, x + edge, y + top)
            self._open_width[number] = max(width + 2 * edge, self._closed_width[number])
            self._open_height[number] = height + top + edge

    def _set(self, member: int, x: float, y: float) -> None:
        if member >= 0:
            self._x[member], self._y[member] = x, y
        else:
            self._group_x[~member], self._group_y[~member] = x, y

    def _move_into_place(self) -> None:
        """From places relative to the group to places on the sheet, outermost groups first."""
        for number, group in enumerate(self._scene.groups):
            x, y = self._group_x[number], self._group_y[number]
            for member in group.members:
                if member >= 0:
                    self._x[member] += x
                    self._y[member] += y
                else:
                    self._group_x[~member] += x
                    self._group_y[~member] += y


def text_size(text: str) -> tuple[float, float]:
    """The room that a label takes, with a margin."""
    lines = text.split("\n")
    width = max(map(len, lines)) * _CHARACTER + _MARGIN
    return max(round(width), _NARROWEST), len(lines) * _LINE + _MARGIN


def _open_depth(scene: Scene) -> int:
    """How deep groups are open: as deep as what is seen then is not too much to look at, and at least one level."""
    shown: dict[int, int] = {}
    for group in scene.groups:
        shown[group.depth] = shown.get(group.depth, 0) + len(group.members)
    depth, seen = 0, shown.get(0, 0)
    while depth + 1 in shown and (depth == 0 or seen + shown[depth + 1] <= _MOST_VISIBLE):
        depth += 1
        seen += shown[depth]
    return depth


def _first_orders(scene: Scene) -> Callable[[int], float]:
    """When each member first runs: operators by their order, groups by what is in them, weights by their readers."""
    operators = len(scene.wiring.graph.nodes)
    never = float("inf")
    terminals = array("d", [never]) * len(scene.wiring.terminals)
    for source, target in zip(scene.sources, scene.targets, strict=True):
        if source >= operators:
            order = target if target < operators else never
            terminals[source - operators] = min(terminals[source - operators], order - 0.5)
    groups = array("d", [never]) * len(scene.groups)
    for number in range(len(scene.groups) - 1, 0, -1):
        group = scene.groups[number]
        if group.element >= 0:
            groups[number] = group.element
        for member in group.members:
            order = groups[~member] if member < 0 else member if member < operators else never
            groups[number] = min(groups[number], order)

    def first(member: int) -> float:
        if member < 0:
            return groups[~member]
        return float(member) if member < operators else terminals[member - operators]

    return first


def _rows(
    members: Sequence[int],
    wires: array[int],
    first: Callable[[int], float],
    size: Callable[[int], tuple[float, float]],
) -> tuple[list[tuple[float, float]], float, float]:
    """The places of a group's members, and the room that they take."""
    count = len(members)
    if not count:
        return [], 0.0, 0.0
    order = sorted(range(count), key=lambda place: first(members[place]))
    rank = {members[place]: turn for turn, place in enumerate(order)}
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for start in range(0, len(wires), 2):
        one, other = rank[wires[start]], rank[wires[start + 1]]
        if one < other and (not after[one] or after[one][-1] != other):  # what goes back is drawn, but moves nothing
            after[one].append(other)
            before[other].append(one)
    row = [0] * count
    for turn in range(count):
        for earlier in before[turn]:
            row[turn] = max(row[turn], row[earlier] + 1)
    for turn in range(count):  # what reads nothing stands right above its first reader
        if not before[turn] and after[turn]:
            row[turn] = max(0, min(row[later] for later in after[turn]) - 1)
    last = max(row) + 1
    sizes = [size(members[place]) for place in order]
    rows: list[list[int]] = [[] for _ in range(last + 1)]
    for turn in range(count):
        rows[row[turn] if before[turn] or after[turn] else last].append(turn)
    centres = [0.0] * count
    tops = [0.0] * count
    top = 0.0
    for turns in rows:
        for part in _parts(turns, sizes):
            _spread(part, before, centres, sizes)
            height = max(sizes[turn][1] for turn in part)
            for turn in part:
                tops[turn] = top + (height - sizes[turn][1]) / 2
            top += height + ROW_GAP
    left = min(centres[turn] - sizes[turn][0] / 2 for turn in range(count))
    right = max(centres[turn] + sizes[turn][0] / 2 for turn in range(count))
    places = [(0.0, 0.0)] * count
    for turn, place in enumerate(order):
        places[place] = (centres[turn] - sizes[turn][0] / 2 - left, tops[turn])
    return places, right - left, top - ROW_GAP


def _parts(turns: list[int], sizes: Sequence[tuple[float, float]]) -> list[list[int]]:
    """A row, broken where it would be too wide to look at."""
    parts: list[list[int]] = []
    room = 0.0
    for turn in turns:
        width = sizes[turn][0] + COLUMN_GAP
        if not parts or room + width > _WIDEST_ROW:
            parts.append([])
            room = 0.0
        parts[-1].append(turn)
        room += width
    return parts


def _spread(
    turns: list[int], before: Sequence[Sequence[int]], centres: list[float], sizes: Sequence[tuple[float, float]]
) -> None:
    """Put a row's members below what they read from, side by side; those that read nothing to the right."""
    wanted = {
        turn: sum(centres[earlier] for earlier in before[turn]) / len(before[turn]) for turn in turns if before[turn]
    }
    turns.sort(key=lambda turn: (turn not in wanted, wanted.get(turn, 0.0)))
    x = shift = 0.0
    for number, turn in enumerate(turns):
        half = sizes[turn][0] / 2
        centre = wanted.get(turn, x + half) if number == 0 else max(wanted.get(turn, x + half), x + half)
        centres[turn] = centre
        x = centre + half + COLUMN_GAP
    if wanted:  # pushing was to the right only: move the row back by half of it, on average
        shift = sum(wanted[turn] - centres[turn] for turn in turns if turn in wanted) / len(wanted)
    for turn in turns:
        centres[turn] += shift
