"""The values that callers give to options: their types, and the messages about them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.options import SOURCE_KEYWORDS, SourceOptions, flags_of, options_of

_Record = TypeVar("_Record", bound=msgspec.Struct)

_EXPECTED: dict[Any, str] = {
    bool: "True or False",
    bool | None: "True, False or None",
    bool | Literal["keep-namespace"]: 'True, False or "keep-namespace"',
    float: "a number",
    int | None: "a whole number",
    int | str | None: 'a number of bytes or a size such as "4 GiB"',
    str: "a string",
    str | None: "a string",
    str | tuple[str, ...] | None: 'a name or a list of names, such as ["Block"]',
    Sequence[str] | None: 'a list of names, such as ["input_ids"]',
    dict[str, tuple[int, ...]]: "a shape such as (1, 128), or one for each input name",
    dict[str, dict[int, str]]: 'axes by input name, such as {"input_ids": {0: "batch"}}',
    Callable[[str], None] | None: "a function that takes a string",
    SourceOptions | None: "a SourceOptions record",
}
"""What a field of each type accepts, in the words of a message."""
_QUOTED = (str, bytes, bool, int, float, tuple, list, dict, type(None))
"""Types whose values are short enough to be quoted; of others the type is named."""


def convert_options(given: Mapping[str, Any], record: type[_Record]) -> _Record:
    """Build a record of options, each value checked against the type of its field.

    Args:
        given: The values by field name, as `resolve_names` returns them.
        record: The record to build.

    Raises:
        ArgumentError: A value that the record needs is missing.
        ArgumentTypeError: A value has the wrong type.
    """
    paths = {option.name for option in options_of(record) if option.spelling.is_path}
    converted = {}
    for field in msgspec.structs.fields(record):
        kind = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        if field.name in given:
            expected = "a path" if field.name in paths else _EXPECTED.get(kind)
            converted[field.name] = _convert(field.name, given[field.name], kind, expected)
        elif field.required:
            raise ArgumentError(f"{field.name} is missing", hint=f"add {field.name}")
    return record(**converted)


def check_flag(name: str, value: object) -> bool:
    """Check a value that turns something on or off.

    Raises:
        ArgumentTypeError: It is neither True nor False.
    """
    flag: bool = _convert(name, value, bool, _EXPECTED[bool])
    return flag


def check_function(name: str, value: object) -> None:
    """Check that a value can be called, or is None.

    Raises:
        ArgumentTypeError: It cannot be called.
    """
    _convert(name, value, Callable[[str], None] | None, "a function that takes a string")


def _convert(name: str, value: Any, kind: Any, expected: str | None) -> Any:
    if expected is None:  # any value
        return value
    if kind == Callable[[str], None] | None:
        if value is None or callable(value):
            return value
    else:
        try:
            return msgspec.convert(_as_builtin(value), kind, str_keys=True)
        except (msgspec.ValidationError, RecursionError):  # a value may be nested deeply
            pass
    got = reprlib.repr(value) if type(value) in _QUOTED else describe_type(value)
    raise ArgumentTypeError(f"{spell_option(name)} must be {expected}, got {got}")


def _as_builtin(value: Any) -> Any:
    """Return the scalars of numpy and torch, and views of dicts, as types that msgspec knows."""
    if isinstance(value, str | bytes | msgspec.Struct):
        return value
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _as_builtin(part) for key, part in value.items()}
    return tuple(map(_as_builtin, value)) if isinstance(value, Iterable) else value


_AS_FLAGS: ContextVar[bool] = ContextVar("options are named as flags", default=False)


@contextmanager
def name_options(*, as_flags: bool) -> Iterator[None]:
    """Name options by their flags or by their keywords in messages, until the block ends."""
    token = _AS_FLAGS.set(as_flags)
    try:
        yield
    finally:
        _AS_FLAGS.reset(token)


def spell_option(name: str) -> str:
    """Name an option as the caller writes it: a flag on the command line, a keyword in Python."""
    if not _AS_FLAGS.get():
        return name
    flag = f"--{name.replace('_', '-')}"
    return next((flags_of(one)[0] for one in SOURCE_KEYWORDS if one.name == name), flag)
