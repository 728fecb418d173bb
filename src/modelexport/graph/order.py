"""Topological order of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from modelexport.errors import FormatError


def topological_order(
    consumers: Sequence[Sequence[int]],
    priorities: Sequence[float] | None = None,
    *,
    strict: bool = False,
) -> list[int]:
    """Sort nodes topologically, and otherwise by priority.

    The order is stable: among the nodes whose producers all come before, the one with the lowest
    priority is next, then the one with the lowest number. Where every remaining node waits for
    another, as in a cycle, the one with the lowest priority is next. Takes time linear in the
    edges, and logarithmic in the nodes that are ready at once.

    Args:
        consumers: For each node those that consume its outputs; one may be listed repeatedly.
        priorities: A number for each node; its own number if None.
        strict: Whether a cycle is an error.

    Returns:
        The numbers of all nodes.

    Raises:
        FormatError: There is a cycle, and `strict` is set.
    """
    ranks = range(len(consumers)) if priorities is None else priorities
    waiting = [0] * len(consumers)
    for nodes in consumers:
        for consumer in nodes:
            waiting[consumer] += 1
    ready = [(ranks[node], node) for node, count in enumerate(waiting) if not count]
    heapify(ready)
    by_priority = iter(sorted(range(len(consumers)), key=ranks.__getitem__))
    done = [False] * len(consumers)
    order: list[int] = []
    while len(order) < len(consumers):
        if strict and not ready:
            raise FormatError(
                "the graph has a cycle", hint="no runtime can run it; export it again"
            )
        node = heappop(ready)[1] if ready else next(by_priority)
        if done[node]:
            continue
        done[node] = True
        order.append(node)
        for consumer in consumers[node]:
            waiting[consumer] -= 1
            if not waiting[consumer] and not done[consumer]:
                heappush(ready, (ranks[consumer], consumer))
    return order
