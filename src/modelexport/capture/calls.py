"""The calls of one capture: which module ran when, and in which call each operation ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec


class Call(msgspec.Struct, frozen=True):
    """One run of one module's forward.

    Calls are numbered in the order they began, so the calls made inside this one are exactly those
    from its own number up to `end`.
    """

    path: str
    """The path of the module."""
    index: int
    """The number of this call among the calls of the same module, from 0."""
    parent: int
    """The number of the call that this one was made in, -1 for none."""
    end: int
    """The number of the first call that began after this one had ended."""
    returned: tuple[str, ...] = ()
    """The trace's names of the returned tensors and numbers in order, "" for one without a name."""
    finish: int = 0
    """The position of the trace when the call ended."""


class CallLog(msgspec.Struct, frozen=True):
    """All calls of one capture, and the call in which each traced operation ran."""

    calls: tuple[Call, ...] = ()
    operation_calls: Mapping[str, int] = {}
    """By the trace's name of an operation, the number of its innermost call."""

    def count(self) -> Counter[str]:
        """Return how often each module ran."""
        return Counter(call.path for call in self.calls)

    def only_calls(self) -> dict[str, int]:
        """Return the number of the call of each module that ran just once."""
        counts = self.count()
        return {c.path: number for number, c in enumerate(self.calls) if counts[c.path] == 1}

    def within(self, inner: int, outer: int) -> bool:
        """Tell whether a call was made inside another one, or is that call.

        Args:
            inner: The number of the call that may be inside.
            outer: The number of the call around it.

        Returns:
            True if `inner` is `outer` or began before `outer` ended.
        """
        return outer <= inner < self.calls[outer].end

    def enclosing(self, number: int, path: str) -> int | None:
        """Find the call of a module that a call was made in.

        Args:
            number: The number of the inner call.
            path: The path of the module whose call is wanted.

        Returns:
            The number of the innermost such call, `number` itself included; None if there is none.
        """
        while number >= 0:
            if self.calls[number].path == path:
                return number
            number = self.calls[number].parent
        return None


def assign_operations(
    spans: Sequence[tuple[int, int]], marks: Sequence[tuple[str, int]]
) -> dict[str, int]:
    """Give each operation the innermost call whose span holds its position.

    Args:
        spans: For each call, in the order the calls began, the position before its first
            operation and the position of its last.
        marks: The name and the position of each operation.

    Returns:
        The number of the call of each operation that ran in one.
    """
    operation_calls: dict[str, int] = {}
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
            operation_calls[operation] = open_calls[-1]
    return operation_calls
