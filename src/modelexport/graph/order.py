"""Topological order of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def running_order(readers: Sequence[Sequence[int]], firsts: Sequence[float]) -> list[int]:
    """Numbers, each after those that it reads from, lower `firsts` first; where that goes round, by `firsts` alone.

    `readers` has for each number those that read from it.
    """
    waits = [0] * len(readers)
    for found in readers:
        for reader in found:
            waits[reader] += 1
    ready = [(firsts[number], number) for number, count in enumerate(waits) if not count]
    heapify(ready)
    left = iter(sorted(range(len(readers)), key=firsts.__getitem__))
    done = [False] * len(readers)
    order: list[int] = []
    while len(order) < len(readers):
        number = heappop(ready)[1] if ready else next(left)
        if done[number]:
            continue
        done[number] = True
        order.append(number)
        for reader in readers[number]:
            waits[reader] -= 1
            if not waits[reader] and not done[reader]:
                heappush(ready, (firsts[reader], reader))
    return order
