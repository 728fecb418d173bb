"""A layered layout in linear time: rows from top to bottom as data flows, groups around members.

Within a group, a member stands one row below the lowest member that it consumes from. A closed
group takes the room of its label; its members are laid out for the moment when it is opened.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from modelexport.graph.nested import topological_order
from modelexport.graphml.elements import SHEET, GroupTree
from modelexport.graphml.format import HEADER, INITIALIZERS, PADDING, Box, Kind

# Lengths are in pixels at yEd's zoom of 100 %.
_ROW_GAP, _COLUMN_GAP = 44.0, 28.0
_CLOSED_HEIGHT = 48.0
_WIDEST_ROW = 2600.0
"""About two screens; a wider row is broken into lines."""
_MOST_VISIBLE = 60
"""The most boxes that a drawing opens with: about what fits on a screen and stays readable."""
_CHARACTER, _LINE, _MARGIN = 7.2, 15.0, 18.0
"""The width and height of a character of a label, on average, and the space around a label."""
_NARROWEST = 64.0
_LONGEST_LANE, _LANE_WIDTH = 8, 12.0
"""Edges that pass more rows get no lane: their lanes would widen all of these rows."""
_MOST_WITH_LANES = 400
"""The most members of a group with lanes, which are up to `_LONGEST_LANE` more things to place for
each member."""
_NEVER = float("inf")


class Layout:
    """Where everything is.

    Columns have an entry for every member of a group: elements from the beginning, and group
    `number` at the index `~number`, which counts from the end.
    """

    def __init__(self, tree: GroupTree, label: Callable[[int], str]) -> None:
        """Lay out a tree of groups.

        Args:
            tree: The groups and their members.
            label: Returns the label of a member.
        """
        self._tree = tree
        count = len(tree.parents) + len(tree.groups)
        self._x, self._y, self._width, self._height, self._closed_width = (
            array("d", bytes(8 * count)) for _ in range(5)
        )
        self._bends: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        for element in range(len(tree.parents)):
            self._width[element], self._height[element] = text_size(label(element))
        for number in range(1, len(tree.groups)):
            self._closed_width[~number] = max(text_size(label(~number))[0] + 24, 110.0)
        self._open_depth = _choose_open_depth(tree)
        self._arrange_groups()
        for number, group in enumerate(tree.groups):  # outer groups first: add up the offsets
            for member in group.members:
                self._x[member] += self._x[~number]
                self._y[member] += self._y[~number]

    def is_closed(self, group: int) -> bool:
        """Return whether a group is shown closed."""
        closed = self._tree.groups[group]
        return closed.depth > self._open_depth or not closed.members

    def box(self, member: int) -> Box:
        """Return the box of an element, or the open box of a group by its complement."""
        return Box(self._x[member], self._y[member], self._width[member], self._height[member])

    def closed_box(self, group: int) -> Box:
        """Return the box of a closed group."""
        return Box(self._x[~group], self._y[~group], self._closed_width[~group], _CLOSED_HEIGHT)

    def bends(self, source: int, target: int) -> list[tuple[float, float]]:
        """Return the points where the line between two elements bends."""
        ends = self._tree.common_members(source, target) if self._bends else None
        if ends is None:
            return []
        x, y = self._x[~ends[0]], self._y[~ends[0]]
        return [(x + across, y + down) for across, down in self._bends.get(ends, ())]

    def _arrange_groups(self) -> None:
        """Set the members of every group relative to the group, innermost groups first."""
        tree = self._tree
        edges = [array("q") for _ in tree.groups]
        for source, target in tree.elements.edges.ends():
            ends = tree.common_members(source, target)
            if ends is not None:
                edges[ends[0]].extend(ends[1:])
        first = _first_runs(tree)
        for number in range(len(tree.groups) - 1, -1, -1):
            border = 0.0 if number == SHEET else PADDING
            top = 0.0 if number == SHEET else HEADER + PADDING
            members = tree.groups[number].members
            with_lanes = not self.is_closed(number) and len(members) <= _MOST_WITH_LANES
            order = _order_members(members, edges[number], first)
            rows = _Rows(order, edges[number], self, with_lanes)
            edges[number] = array("q")
            for member, (x, y) in zip(rows.members, rows.positions, strict=True):
                self._x[member], self._y[member] = x + border, y + top
            for pair, points in rows.bends.items():
                self._bends[(number, *pair)] = [(x + border, y + top) for x, y in points]
            self._width[~number] = max(rows.width + 2 * border, self._closed_width[~number])
            self._height[~number] = rows.height + top + border

    def size(self, member: int) -> tuple[float, float]:
        """Return the size of a member as it is shown."""
        if member < 0 and self.is_closed(~member):
            return self._closed_width[member], _CLOSED_HEIGHT
        return self._width[member], self._height[member]

    def is_input(self, member: int) -> bool:
        """Return whether a member is an input of a graph."""
        elements = self._tree.elements
        return member >= len(elements.graph.nodes) and elements.terminal(member).kind == Kind.INPUT

    def is_aside(self, member: int) -> bool:
        """Return whether a member stands beside the flow: it is constant, or consumes nothing."""
        elements = self._tree.elements
        if member >= len(elements.graph.nodes):
            return elements.terminal(member).kind in INITIALIZERS
        return member >= 0 and not elements.graph.nodes[member].inputs


def text_size(text: str) -> tuple[float, float]:
    """Return the width and height of a label with a margin."""
    lines = text.split("\n")
    width = max(map(len, lines)) * _CHARACTER + _MARGIN
    return max(round(width), _NARROWEST), len(lines) * _LINE + _MARGIN


def _choose_open_depth(tree: GroupTree) -> int:
    """Return the depth down to which groups are open: at least 1, and not too much to look at."""
    counts: dict[int, int] = {}
    for group in tree.groups:
        counts[group.depth] = counts.get(group.depth, 0) + len(group.members)
    depth, visible = 0, counts[0]
    while depth + 1 in counts and (depth == 0 or visible + counts[depth + 1] <= _MOST_VISIBLE):
        depth += 1
        visible += counts[depth]
    return depth


def _first_runs(tree: GroupTree) -> array[float]:
    """Return when each member first runs: operators in their order, terminals before consumers."""
    elements = tree.elements
    operators = len(elements.graph.nodes)
    first = array("d", [_NEVER]) * (len(tree.parents) + len(tree.groups))
    for element in range(operators):
        first[element] = element
    for source, target in elements.edges.ends():
        if operators <= source and target < operators:
            first[source] = min(first[source], target - 0.5)
    for number in range(len(tree.groups) - 1, 0, -1):
        group = tree.groups[number]
        inside = [first[member] for member in group.members if member < operators]
        own = _NEVER if group.element < 0 else float(group.element)
        first[~number] = min([own, *inside])
    return first


def _order_members(members: Sequence[int], edges: array[int], first: array[float]) -> Sequence[int]:
    """Return members in running order; `edges` alternates sources and targets."""
    index = {member: position for position, member in enumerate(members)}
    consumers: list[list[int]] = [[] for _ in members]
    for source, target in zip(edges[::2], edges[1::2], strict=True):
        consumers[index[source]].append(index[target])
    order = topological_order(consumers, [first[member] for member in members])
    return [members[position] for position in order]


class _Rows:
    """The members of one group in rows.

    Numbers are positions in the running order. Lanes are further numbers: room in the rows that a
    long line passes. Without them the line of a residual connection is hidden by the boxes, and
    by the lines between them, that it skips.
    """

    def __init__(
        self, members: Sequence[int], edges: array[int], layout: Layout, with_lanes: bool
    ) -> None:
        self.members = members
        numbers = {member: position for position, member in enumerate(members)}
        self._before: list[list[int]] = [[] for _ in members]
        self._after: list[list[int]] = [[] for _ in members]
        for ends in zip(edges[::2], edges[1::2], strict=True):
            source, target = (numbers[end] for end in ends)
            # An edge against the running order, out of a loop, is drawn but moves nothing.
            if source < target and (not self._after[source] or self._after[source][-1] != target):
                self._after[source].append(target)
                self._before[target].append(source)
        self._is_source = [not before for before in self._before]
        self._is_aside = [layout.is_aside(member) for member in members]
        self._sizes = [layout.size(member) for member in members]
        row = self._number_rows(layout)
        self._lanes: dict[tuple[int, int], list[int]] = {}
        if with_lanes:
            self._add_lanes(row)
        self._set_rows(row)
        self._measure()

    def _number_rows(self, layout: Layout) -> list[int]:
        """Return the row of each member: one below the lowest that it consumes from."""
        row = [0] * len(self.members)
        for number, before in enumerate(self._before):
            row[number] = max((row[earlier] + 1 for earlier in before), default=0)
        for number, after in enumerate(self._after):
            if self._is_source[number] and after:  # right above its first consumer
                row[number] = min(row[later] for later in after) - 1
        lowest = min(row, default=0)
        row = [position - lowest for position in row]
        last = max(row, default=0) + 1
        for number, after in enumerate(self._after):
            if self._is_source[number] and not after and not layout.is_input(self.members[number]):
                row[number] = last  # without any edges
        return row

    def _add_lanes(self, row: list[int]) -> None:
        """Reserve room in the rows that edges pass."""
        for source, after in enumerate(self._after):
            lane: list[int] = []
            for target in sorted(after, key=row.__getitem__):
                between = row[target] - row[source] - 1
                if not 0 < between <= _LONGEST_LANE:
                    continue
                while len(lane) < between:  # edges of one source share their lane
                    self._before.append([lane[-1] if lane else source])
                    lane.append(len(row))
                    self._is_source.append(False)
                    self._is_aside.append(False)
                    self._sizes.append((_LANE_WIDTH, 0.0))
                    row.append(row[source] + len(lane))
                self._lanes[source, target] = lane[:between]
                before = self._before[target]
                self._before[target] = [
                    lane[between - 1] if number == source else number for number in before
                ]

    def _set_rows(self, row: list[int]) -> None:
        """Set the rows below each other; `row` has the row of each number."""
        rows: list[list[int]] = [[] for _ in range(max(row, default=0) + 1)]
        for number, position in enumerate(row):
            rows[position].append(number)
        self._centres, self._tops, self._heights = ([0.0] * len(row) for _ in range(3))
        top = 0.0
        for numbers in rows:
            for line in self._break_row(numbers):
                self._spread(line)
                height = max(self._sizes[number][1] for number in line)
                for number in line:
                    own = self._sizes[number][1]
                    self._tops[number] = top + (height - own) / 2 if own else top
                    self._heights[number] = own or height
                top += height + _ROW_GAP
        self.height = max(top - _ROW_GAP, 0.0)

    def _break_row(self, numbers: list[int]) -> list[list[int]]:
        """Break a row into lines that are not too wide to look at."""
        lines: list[list[int]] = []
        used = 0.0
        for number in numbers:
            width = self._sizes[number][0] + _COLUMN_GAP
            if not lines or used + width > _WIDEST_ROW:
                lines.append([])
                used = 0.0
            lines[-1].append(number)
            used += width
        return lines

    def _spread(self, numbers: list[int]) -> None:
        """Put members side by side below what they consume; sources stand to the right."""
        wanted = {
            number: self._wanted_centre(number) for number in numbers if not self._is_source[number]
        }
        numbers.sort(key=lambda number: (number not in wanted, wanted.get(number, 0.0)))
        x = 0.0
        for position, number in enumerate(numbers):
            half = self._sizes[number][0] / 2
            centre = wanted.get(number, x + half)
            self._centres[number] = centre if position == 0 else max(centre, x + half)
            x = self._centres[number] + half + _COLUMN_GAP
        if wanted:  # members were pushed to the right only: move all back by the average
            shift = sum(wanted[number] - self._centres[number] for number in wanted) / len(wanted)
            for number in numbers:
                self._centres[number] += shift

    def _wanted_centre(self, number: int) -> float:
        """Return the centre below what a member consumes.

        If it consumes only what stands aside, that is to the left, which leaves the way down free.
        """
        before = self._before[number]
        flow = [self._centres[earlier] for earlier in before if not self._is_aside[earlier]]
        if flow:
            return sum(flow) / len(flow)
        left = min(self._centres[earlier] - self._sizes[earlier][0] / 2 for earlier in before)
        return left - _COLUMN_GAP / 2 - self._sizes[number][0] / 2

    def _measure(self) -> None:
        """Set positions and bends relative to the leftmost box."""
        halves = [size[0] / 2 for size in self._sizes]
        sides = [centre - half for centre, half in zip(self._centres, halves, strict=True)]
        left = min(sides, default=0.0)
        ends = [centre + half for centre, half in zip(self._centres, halves, strict=True)]
        self.width = max(ends, default=0.0) - left
        numbers = range(len(self.members))
        self.positions = [(sides[number] - left, self._tops[number]) for number in numbers]
        self.bends = {
            (self.members[source], self.members[target]): [
                (self._centres[number] - left, y)
                for number in lane
                for y in (self._tops[number], self._tops[number] + self._heights[number])
            ]
            for (source, target), lane in self._lanes.items()
        }
