"""Damage to JSON: values of other types, numbers without end, keys twice, nesting that is too deep."""

from __future__ import annotations

import copy
import json

from hypothesis import strategies as st

from fuzz.of_bytes import Draw, place

_DEEP = 100_000


class Object(list):
    """An object as a list of keys and values, since a key may stand there twice."""


class Raw(str):
    """What is written as it stands, valid JSON or not."""


ODD = tuple(
    map(
        Raw,
        (
            *(
                "null",
                "true",
                "false",
                "0",
                "-1",
                "1.5",
                "-0.0",
                "1e5",
                '""',
                '"x"',
                "[]",
                "{}",
                "[null]",
                '{"":0}',
            ),
            *(
                "NaN",
                "Infinity",
                "-Infinity",
                "1e999",
                "-1e999",
                "1" + "0" * 30,
                "-1" + "0" * 30,
                "9" * 5000,
            ),
            *(
                "9223372036854775807",
                "-9223372036854775808",
                "9223372036854775808",
                "18446744073709551616",
            ),
            *(
                r'"\ud800"',
                r'"\udfff\ud800"',
                r'"\u0000"',
                r'"\u001b[31m"',
                '"é漢😀"',
                r'"\u2028"',
                '"a/b"',
                '"../x"',
            ),
            *(
                "[" * _DEEP,
                "[" * _DEEP + "]" * _DEEP,
                '{"a":' * 1000 + "0" + "}" * 1000,
                '"' + "a" * 70_000 + '"',
            ),
            *("", "'x'", "// x", '"', "{,}", "tru"),
        ),
    )
)


def parsed(text: bytes) -> object:
    return json.loads(text, object_pairs_hook=Object)


def written(value: object) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Object):
        return "{" + ",".join(f"{written(key)}:{written(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def _replace(draw: Draw, holder: list, at: int, everything: list) -> None:
    _put(holder, at, draw(st.sampled_from(ODD)))


def _swap(draw: Draw, holder: list, at: int, everything: list) -> None:
    """A value from elsewhere in the text."""
    other, there = everything[place(draw, len(everything))]
    _put(holder, at, copy.deepcopy(_value(other, there)))


def _drop(draw: Draw, holder: list, at: int, everything: list) -> None:
    del holder[at]


def _double(draw: Draw, holder: list, at: int, everything: list) -> None:
    holder.insert(place(draw, len(holder) + 1), holder[at])


def _rename(draw: Draw, holder: list, at: int, everything: list) -> None:
    """Another key, where there is one: any of the text, or an odd one."""
    if isinstance(holder, Object):
        keys = [other[there][0] for other, there in everything if isinstance(other, Object)]
        key = (
            draw(st.sampled_from(keys)) if draw(st.booleans()) else Raw(draw(st.sampled_from(ODD)))
        )
        holder[at] = (key, holder[at][1])


_KINDS = (_replace, _replace, _swap, _drop, _double, _rename)


def damaged(draw: Draw, text: bytes) -> bytes:
    """One change somewhere in a text; what is no JSON, or too deep already, comes back as it was."""
    try:
        top = [parsed(text)]
        everything = _places(top)
        holder, at = everything[_anywhere(draw, everything)]
        draw(st.sampled_from(_KINDS))(draw, holder, at, everything)
        return "".join(map(written, top)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return text


def _anywhere(draw: Draw, everything: list) -> int:
    """Long lists hide what is said once, so half of the time it is one of the first values."""
    return place(draw, min(len(everything), 40) if draw(st.booleans()) else len(everything))


def _places(holder: list) -> list[tuple[list, int]]:
    """Every value by what holds it, and where; outer ones first."""
    found = [(holder, at) for at in range(len(holder))]
    for inner, at in found:
        value = _value(inner, at)
        if isinstance(value, list):
            found += [(value, place) for place in range(len(value))]
    return found


def _value(holder: list, at: int) -> object:
    return holder[at][1] if isinstance(holder, Object) else holder[at]


def _put(holder: list, at: int, value: object) -> None:
    holder[at] = (holder[at][0], value) if isinstance(holder, Object) else value
