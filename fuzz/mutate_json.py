"""Mutate JSON: values of other types, huge numbers, duplicate keys, deep nesting."""

from __future__ import annotations

import copy
import json

from hypothesis import strategies as st

from fuzz.mutate_bytes import Draw, pick_index

_DEEP = 100_000


class Object(list):
    """A JSON object as a list of keys and values, since a key may occur twice."""


class Raw(str):
    """Text that is written as it is, valid JSON or not."""


_SIMPLE = (
    *("null", "true", "false", "0", "-1", "1.5", "-0.0", "1e5"),
    *('""', '"x"', "[]", "{}", "[null]", '{"":0}'),
)
_NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999"),
    *("1" + "0" * 30, "-1" + "0" * 30, "9" * 5000),
    *("9223372036854775807", "-9223372036854775808"),
    *("9223372036854775808", "18446744073709551616"),
)
_STRINGS = (
    *(r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', r'"\u001b[31m"'),
    *('"é漢😀"', r'"\u2028"', '"a/b"', '"../x"'),
)
_LARGE = (
    "[" * _DEEP,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * 1000 + "0" + "}" * 1000,
    '"' + "a" * 70_000 + '"',
)
_INVALID = ("", "'x'", "// x", '"', "{,}", "tru")
ODD = tuple(map(Raw, (*_SIMPLE, *_NUMBERS, *_STRINGS, *_LARGE, *_INVALID)))
"""Values that a reader may not expect."""

Slot = tuple[list, int]
"""A list or object, and the index of a value in it."""


def decode(text: bytes) -> object:
    """Parse JSON, keeping duplicate keys."""
    return json.loads(text, object_pairs_hook=Object)


def encode(value: object) -> str:
    """Write a value as JSON."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, Object):
        return "{" + ",".join(f"{encode(key)}:{encode(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def _replace(draw: Draw, holder: list, at: int, slots: list[Slot]) -> None:
    _set_value(holder, at, draw(st.sampled_from(ODD)))


def _copy(draw: Draw, holder: list, at: int, slots: list[Slot]) -> None:
    """Replace a value by a copy of another one."""
    other = slots[pick_index(draw, len(slots))]
    _set_value(holder, at, copy.deepcopy(_get_value(*other)))


def _drop(draw: Draw, holder: list, at: int, slots: list[Slot]) -> None:
    del holder[at]


def _double(draw: Draw, holder: list, at: int, slots: list[Slot]) -> None:
    holder.insert(pick_index(draw, len(holder) + 1), holder[at])


def _rename(draw: Draw, holder: list, at: int, slots: list[Slot]) -> None:
    """Replace the key of an object by another key of the text, or by an odd one."""
    if isinstance(holder, Object):
        keys = [other[index][0] for other, index in slots if isinstance(other, Object)]
        key = (
            draw(st.sampled_from(keys)) if draw(st.booleans()) else Raw(draw(st.sampled_from(ODD)))
        )
        holder[at] = (key, holder[at][1])


_MUTATIONS = (_replace, _replace, _copy, _drop, _double, _rename)


def mutate(draw: Draw, text: bytes) -> bytes:
    """Apply one mutation to a JSON text; return other text, and text that is too deep, as it is."""
    try:
        top = [decode(text)]
        slots = _find_slots(top)
        holder, at = slots[_pick_slot(draw, slots)]
        draw(st.sampled_from(_MUTATIONS))(draw, holder, at, slots)
        return "".join(map(encode, top)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return text


def _pick_slot(draw: Draw, slots: list[Slot]) -> int:
    """Draw one of the first values half of the time: long lists hide values that occur once."""
    return pick_index(draw, min(len(slots), 40) if draw(st.booleans()) else len(slots))


def _find_slots(holder: list) -> list[Slot]:
    """Return the slot of every value, outer values first."""
    slots = [(holder, at) for at in range(len(holder))]
    for inner, at in slots:
        value = _get_value(inner, at)
        if isinstance(value, list):
            slots += [(value, index) for index in range(len(value))]
    return slots


def _get_value(holder: list, at: int) -> object:
    return holder[at][1] if isinstance(holder, Object) else holder[at]


def _set_value(holder: list, at: int, value: object) -> None:
    holder[at] = (holder[at][0], value) if isinstance(holder, Object) else value
