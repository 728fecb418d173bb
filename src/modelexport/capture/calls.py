"""The calls of one capture: which module ran when, and which call made each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Call(msgspec.Struct, frozen=True):
    """One run of one module's forward.

    Calls are numbered in the order they began, so the calls made inside this one are
    exactly those from its own number up to `end`. `returned` are the trace's names for the tensors
    and numbers that it gave back, in their order; empty where the trace has none. `finish` is how
    far the trace had come by then.
    """

    path: str
    index: int
    parent: int
    end: int
    returned: tuple[str, ...] = ()
    finish: int = 0


class CallLog(msgspec.Struct, frozen=True):
    """All calls of one capture, and which of them made each traced operation."""

    calls: tuple[Call, ...] = ()
    made_by: Mapping[str, int] = {}

    def count(self) -> dict[str, int]:
        """How often each module ran."""
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[call.path] = counts.get(call.path, 0) + 1
        return counts

    def first_order(self) -> dict[str, int]:
        """The number of each module's first call."""
        order: dict[str, int] = {}
        for number, call in enumerate(self.calls):
            order.setdefault(call.path, number)
        return order

    def only_calls(self) -> dict[str, int]:
        """The number of the call of each module that ran just once."""
        counts, order = self.count(), self.first_order()
        return {path: number for path, number in order.items() if counts[path] == 1}

    def within(self, inner: int, outer: int) -> bool:
        return outer <= inner < self.calls[outer].end

    def enclosing(self, number: int, path: str) -> int | None:
        """The call of `path` that this call was made in (itself included)."""
        while number >= 0:
            if self.calls[number].path == path:
                return number
            number = self.calls[number].parent
        return None


def assign_operations(
    spans: Sequence[tuple[int, int]], marks: Sequence[tuple[str, int]]
) -> dict[str, int]:
    """Give each operation the innermost call whose span (start, end] holds its mark.

    `spans` are in order of their call's beginning, `marks` are (operation, position).
    """
    made_by: dict[str, int] = {}
    open_calls: list[int] = []
    upcoming = 0
    for operation, position in sorted(marks, key=lambda mark: mark[1]):
        while upcoming < len(spans) and spans[upcoming][0] < position:
            while open_calls and spans[open_calls[-1]][1] <= spans[upcoming][0]:
                open_calls.pop()
            open_calls.append(upcoming)
            upcoming += 1
        while open_calls and spans[open_calls[-1]][1] < position:
            open_calls.pop()
        if open_calls:
            made_by[operation] = open_calls[-1]
    return made_by
