"""Mutate bytes, whatever their format."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy], object]

BOUNDARIES = tuple(
    number.to_bytes(size, order, signed=number < 0)
    for size in (1, 2, 4, 8)
    for number in (0, 1, -1, (1 << 8 * size - 1) - 1, -(1 << 8 * size - 1))
    for order in ("little", "big")
)
"""Encoded integers at the limits of their types."""


def pick_index(draw: Draw, size: int) -> int:
    """Draw an index into a sequence of this size."""
    return draw(st.integers(0, max(size - 1, 0)))


def _pick_range(draw: Draw, size: int) -> tuple[int, int]:
    """Draw a start and an end: mostly a few bytes apart, sometimes far."""
    start = pick_index(draw, size)
    length = draw(st.integers(1, 16)) if draw(st.booleans()) else pick_index(draw, size)
    return start, min(start + length, size)


def _flip(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = pick_index(draw, len(data))
    flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[at : at + 1])
    return data[:at] + flipped + data[at + 1 :]


def _overwrite(draw: Draw, data: bytes, other: bytes) -> bytes:
    at, new = pick_index(draw, len(data)), draw(st.sampled_from(BOUNDARIES))
    return data[:at] + new + data[at + len(new) :]


def _insert(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = pick_index(draw, len(data) + 1)
    return data[:at] + draw(st.binary(min_size=1, max_size=16)) + data[at:]


def _delete(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = _pick_range(draw, len(data))
    return data[:start] + data[end:]


def _duplicate(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = _pick_range(draw, len(data))
    return data[:end] + data[start:end] * draw(st.sampled_from((1, 2, 50))) + data[end:]


def _truncate(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: pick_index(draw, len(data))]


def _splice(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: pick_index(draw, len(data))] + other[pick_index(draw, len(other)) :]


def _move(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = _pick_range(draw, len(data))
    rest = data[:start] + data[end:]
    at = pick_index(draw, len(rest) + 1)
    return rest[:at] + data[start:end] + rest[at:]


_MUTATIONS = (_flip, _overwrite, _insert, _delete, _duplicate, _truncate, _splice, _move)


def mutate(draw: Draw, data: bytes, other: bytes) -> bytes:
    """Apply one mutation; `other` is content of the same kind to splice from."""
    return draw(st.sampled_from(_MUTATIONS))(draw, data, other)
