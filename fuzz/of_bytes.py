"""Damage to bytes, whatever they mean."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy], object]

INTERESTING = tuple(
    number.to_bytes(size, order, signed=number < 0)
    for size in (1, 2, 4, 8)
    for number in (0, 1, -1, (1 << 8 * size - 1) - 1, -(1 << 8 * size - 1))
    for order in ("little", "big")
)


def place(draw: Draw, size: int) -> int:
    """Where in something of this size."""
    return draw(st.integers(0, max(size - 1, 0)))


def stretch(draw: Draw, size: int) -> tuple[int, int]:
    """From where to where: mostly a few bytes, sometimes up to anywhere."""
    start = place(draw, size)
    length = draw(st.integers(1, 16)) if draw(st.booleans()) else place(draw, size)
    return start, min(start + length, size)


def _flip(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = place(draw, len(data))
    return (
        data[:at]
        + bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[at : at + 1])
        + data[at + 1 :]
    )


def _overwrite(draw: Draw, data: bytes, other: bytes) -> bytes:
    at, new = place(draw, len(data)), draw(st.sampled_from(INTERESTING))
    return data[:at] + new + data[at + len(new) :]


def _insert(draw: Draw, data: bytes, other: bytes) -> bytes:
    at = place(draw, len(data) + 1)
    return data[:at] + draw(st.binary(min_size=1, max_size=16)) + data[at:]


def _delete(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = stretch(draw, len(data))
    return data[:start] + data[end:]


def _duplicate(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = stretch(draw, len(data))
    return data[:end] + data[start:end] * draw(st.sampled_from((1, 2, 50))) + data[end:]


def _truncate(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: place(draw, len(data))]


def _splice(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: place(draw, len(data))] + other[place(draw, len(other)) :]


def _move(draw: Draw, data: bytes, other: bytes) -> bytes:
    start, end = stretch(draw, len(data))
    left = data[:start] + data[end:]
    at = place(draw, len(left) + 1)
    return left[:at] + data[start:end] + left[at:]


_KINDS = (_flip, _overwrite, _insert, _delete, _duplicate, _truncate, _splice, _move)


def damaged(draw: Draw, data: bytes, other: bytes) -> bytes:
    """One change; `other` is something of the same kind, of which a part may come in."""
    return draw(st.sampled_from(_KINDS))(draw, data, other)
