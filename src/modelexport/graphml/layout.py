"""A first layout, in linear time: rows from top to bottom as the data flows, every group around its members.

Within a group a member stands one row below the lowest member that it reads from. A group that is
closed takes the room of its label; what is inside is laid out for the moment when it is opened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from modelexport.graph.order import running_order
from modelexport.graphml.dialect import INPUT, WEIGHTS
from modelexport.graphml.scene import SHEET, Scene

ROW_GAP, COLUMN_GAP = 44.0, 28.0
PADDING, HEADER = 18.0, 30.0
CLOSED_HEIGHT = 48.0
_WIDEST_ROW = 2600.0
_MOST_VISIBLE = 60
_CHARACTER, _LINE, _MARGIN = 7.2, 15.0, 18.0
_NARROWEST = 64.0
_LONGEST_LANE, _LANE_WIDTH, _MOST_WITH_LANES = 8, 12.0, 400


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Layout:
    """Where everything is. Boxes of groups are those of the open group; `closed_box` is the closed one's."""

    def __init__(self, scene: Scene, label: Callable[[int], str]) -> None:
        self._scene = scene
        count = len(scene.parents)
        self._x, self._y, self._width, self._height = (
            array("d", bytes(8 * count)) for _ in range(4)
        )
        groups = len(scene.groups)
        self._group_x, self._group_y, self._open_width, self._open_height = (
            array("d", bytes(8 * groups)) for _ in range(4)
        )
        self._closed_width = array("d", bytes(8 * groups))
        self._bends: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for element in range(count):
            self._width[element], self._height[element] = text_size(label(element))
        for number in range(1, groups):
            self._closed_width[number] = max(text_size(label(~number))[0] + 24, 110.0)
        self.open_depth = _open_depth(scene)
        self._arrange()
        self._move_into_place()

    def is_closed(self, group: int) -> bool:
        return (
            self._scene.groups[group].depth > self.open_depth
            or not self._scene.groups[group].members
        )

    def box(self, element: int) -> Box:
        return Box(self._x[element], self._y[element], self._width[element], self._height[element])

    def open_box(self, group: int) -> Box:
        return Box(
            self._group_x[group],
            self._group_y[group],
            self._open_width[group],
            self._open_height[group],
        )

    def closed_box(self, group: int) -> Box:
        return Box(
            self._group_x[group], self._group_y[group], self._closed_width[group], CLOSED_HEIGHT
        )

    def bends(self, source: int, target: int) -> list[tuple[float, float]]:
        """Where the line of a wire bends on its way."""
        met = self._scene.meeting(source, target) if self._bends else None
        if met is None:
            return []
        x, y = self._group_x[met[0]], self._group_y[met[0]]
        return [(x + across, y + down) for across, down in self._bends.get(met, ())]

    def _size(self, member: int) -> tuple[float, float]:
        if member >= 0:
            return self._width[member], self._height[member]
        if self.is_closed(~member):
            return self._closed_width[~member], CLOSED_HEIGHT
        return self._open_width[~member], self._open_height[~member]

    def _is_input(self, member: int) -> bool:
        wiring = self._scene.wiring
        return member >= len(wiring.graph.nodes) and wiring.terminal(member).kind == INPUT

    def _is_aside(self, member: int) -> bool:
        """Whether it is a weight, or an operator that reads nothing: what stands beside the flow."""
        wiring = self._scene.wiring
        if member >= len(wiring.graph.nodes):
            return wiring.terminal(member).kind in WEIGHTS
        return member >= 0 and not wiring.graph.nodes[member].inputs

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
            with_lanes = not self.is_closed(number) and len(group.members) <= _MOST_WITH_LANES
            rows = _Rows(
                group.members,
                between[number],
                first,
                self._size,
                self._is_input,
                self._is_aside,
                with_lanes,
            )
            between[number] = array("q")
            for member, (x, y) in zip(group.members, rows.places, strict=True):
                self._set(member, x + edge, y + top)
            for ends, points in rows.bends.items():
                self._bends[(number, *ends)] = [(x + edge, y + top) for x, y in points]
            self._open_width[number] = max(rows.width + 2 * edge, self._closed_width[number])
            self._open_height[number] = rows.height + top + edge

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


def _running_order(
    members: Sequence[int], wires: array[int], first: Callable[[int], float]
) -> list[int]:
    """The places of the members, each after what it reads from; where that goes round, by when they first run."""
    place = {member: number for number, member in enumerate(members)}
    readers: list[list[int]] = [[] for _ in members]
    for start in range(0, len(wires), 2):
        readers[place[wires[start]]].append(place[wires[start + 1]])
    return running_order(readers, [first(member) for member in members])


class _Rows:
    """The members of one group in rows. They are numbered by when they first run; lanes for long lines come after."""

    def __init__(
        self,
        members: Sequence[int],
        wires: array[int],
        first: Callable[[int], float],
        size: Callable[[int], tuple[float, float]],
        is_input: Callable[[int], bool],
        is_aside: Callable[[int], bool],
        with_lanes: bool,
    ) -> None:
        count = len(members)
        order = _running_order(members, wires, first)
        rank = {members[place]: turn for turn, place in enumerate(order)}
        self._before: list[list[int]] = [[] for _ in range(count)]
        self._after: list[list[int]] = [[] for _ in range(count)]
        for start in range(0, len(wires), 2):
            one, other = rank[wires[start]], rank[wires[start + 1]]
            # what goes back is drawn, but moves nothing
            if one < other and (not self._after[one] or self._after[one][-1] != other):
                self._after[one].append(other)
                self._before[other].append(one)
        self._is_source = [not found for found in self._before]
        self._is_aside = [is_aside(members[place]) for place in order]
        self._sizes = [size(members[place]) for place in order]
        row = self._row_numbers()
        last = max(row, default=0) + 1
        for turn in range(count):
            if (
                self._is_source[turn]
                and not self._after[turn]
                and not is_input(members[order[turn]])
            ):
                row[turn] = last
        self._lanes: dict[tuple[int, int], list[int]] = {}
        if with_lanes:
            self._add_lanes(row)
        rows: list[list[int]] = [[] for _ in range(last + 1)]
        for turn, number in enumerate(row):
            rows[number].append(turn)
        self._place(rows)
        left = min(
            (self._centres[turn] - self._sizes[turn][0] / 2 for turn in range(len(row))),
            default=0.0,
        )
        right = max(
            (self._centres[turn] + self._sizes[turn][0] / 2 for turn in range(len(row))),
            default=0.0,
        )
        self.width = right - left
        self.places = [(0.0, 0.0)] * count
        for turn, place in enumerate(order):
            self.places[place] = (
                self._centres[turn] - self._sizes[turn][0] / 2 - left,
                self._tops[turn],
            )
        self.bends = {
            (members[order[one]], members[order[other]]): [
                (self._centres[turn] - left, y)
                for turn in turns
                for y in (self._tops[turn], self._tops[turn] + self._heights[turn])
            ]
            for (one, other), turns in self._lanes.items()
        }

    def _row_numbers(self) -> list[int]:
        row = [0] * len(self._before)
        for turn, earlier in enumerate(self._before):
            row[turn] = max((row[found] + 1 for found in earlier), default=0)
        for turn, later in enumerate(
            self._after
        ):  # what reads nothing stands right above its first reader
            if self._is_source[turn] and later:
                row[turn] = min(row[found] for found in later) - 1
        lowest = min(row, default=0)
        return [number - lowest for number in row]

    def _add_lanes(self, row: list[int]) -> None:
        """Room in the rows that a line passes, so that it need not go through what stands there."""
        for one in range(len(self._after)):
            lane: list[int] = []
            for other in sorted(self._after[one], key=lambda turn: row[turn]):
                between = row[other] - row[one] - 1
                if not 0 < between <= _LONGEST_LANE:
                    continue
                while len(lane) < between:
                    lane.append(len(row))
                    self._before.append([lane[-2] if len(lane) > 1 else one])
                    self._is_source.append(False)
                    self._is_aside.append(False)
                    self._sizes.append((_LANE_WIDTH, 0.0))
                    row.append(row[one] + len(lane))
                self._lanes[one, other] = lane[:between]
                self._before[other] = [
                    lane[between - 1] if turn == one else turn for turn in self._before[other]
                ]

    def _place(self, rows: list[list[int]]) -> None:
        count = len(self._before)
        self._centres, self._tops, self._heights = [0.0] * count, [0.0] * count, [0.0] * count
        top = 0.0
        for turns in rows:
            for part in self._parts(turns):
                self._spread(part)
                height = max(self._sizes[turn][1] for turn in part)
                for turn in part:
                    own = self._sizes[turn][1]
                    self._tops[turn] = top + (height - own) / 2 if own else top
                    self._heights[turn] = own or height
                top += height + ROW_GAP
        self.height = max(top - ROW_GAP, 0.0)

    def _parts(self, turns: list[int]) -> list[list[int]]:
        """A row, broken where it would be too wide to look at."""
        parts: list[list[int]] = []
        room = 0.0
        for turn in turns:
            width = self._sizes[turn][0] + COLUMN_GAP
            if not parts or room + width > _WIDEST_ROW:
                parts.append([])
                room = 0.0
            parts[-1].append(turn)
            room += width
        return parts

    def _spread(self, turns: list[int]) -> None:
        """Put a row's members below what they read from, side by side; those that read nothing to the right."""
        wanted = {turn: self._wanted(turn) for turn in turns if not self._is_source[turn]}
        turns.sort(key=lambda turn: (turn not in wanted, wanted.get(turn, 0.0)))
        x = 0.0
        for number, turn in enumerate(turns):
            half = self._sizes[turn][0] / 2
            place = wanted.get(turn, x + half)
            self._centres[turn] = place if number == 0 else max(place, x + half)
            x = self._centres[turn] + half + COLUMN_GAP
        if wanted:  # pushing was to the right only: move the row back by half of it, on average
            shift = sum(wanted[turn] - self._centres[turn] for turn in wanted) / len(wanted)
            for turn in turns:
                self._centres[turn] += shift

    def _wanted(self, turn: int) -> float:
        """Below what it reads from; to the left of weights if these are all, which leaves the way down free."""
        flow = [
            self._centres[earlier] for earlier in self._before[turn] if not self._is_aside[earlier]
        ]
        if flow:
            return sum(flow) / len(flow)
        left = min(
            self._centres[earlier] - self._sizes[earlier][0] / 2 for earlier in self._before[turn]
        )
        return left - COLUMN_GAP / 2 - self._sizes[turn][0] / 2
