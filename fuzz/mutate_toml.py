"""Mutate TOML by lines: values of other types; keys and tables repeated, removed or moved."""

from __future__ import annotations

from hypothesis import strategies as st

from fuzz.mutate_bytes import Draw, pick_index

_STRINGS = (
    *('""', '"x"', "''", '"""', "'''\nx\n'''", '"\\ud800"', '"\\u0000"', '"../x"'),
    *('"é漢😀"', '"' + "a" * 70_000 + '"'),
)
_NUMBERS = (
    *("true", "0", "-1", "1.5", "nan", "-inf", "1e999", "9" * 5000),
    *("0x7fffffffffffffffffff", "1979-05-27", "07:32:00"),
)
_OTHERS = (
    *("[]", "{}", "[[]]", "[1, 'x']", "{a = 1, a = 2}", "[" * 100_000, "{a=" * 1000),
    *("", "x", "=", "# x"),
)
_ODD = (*_STRINGS, *_NUMBERS, *_OTHERS)
_TABLES = (
    *("[x]", "[[x]]", "[x.y.z]", "[[x.y]]", "[]", "[[", '["\\u0000"]'),
    "[" + ".".join("x" * 2000) + "]",
)


def mutate(draw: Draw, text: bytes) -> bytes:
    """Apply one mutation; return bytes that are not UTF-8 as they are."""
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError:
        return text
    at, other = pick_index(draw, len(lines)), pick_index(draw, len(lines))
    kind = draw(
        st.sampled_from(("value", "value", "swap", "key", "table", "drop", "double", "move"))
    )
    key, equals, value = lines[at].partition("=")
    if kind == "value":
        lines[at] = f"{key}= {draw(st.sampled_from(_ODD))}"
    elif kind == "swap":
        lines[at] = f"{key}={lines[other].partition('=')[2]}"
    elif kind == "key":
        lines[at] = f"{lines[other].partition('=')[0]}{equals}{value}"
    elif kind == "table":
        lines.insert(at, draw(st.sampled_from(_TABLES)))
    else:
        line = lines[at] if kind == "double" else lines.pop(at)
        if kind != "drop":
            lines.insert(other, line)
    return "\n".join(lines).encode("utf-8", "surrogatepass")
