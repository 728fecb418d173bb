"""Words of messages: a count with its noun."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Give a count with its noun, as in `1 node` and `1,200 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
