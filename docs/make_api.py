"""Writes api.md: the public names with their signatures and docstrings, and the records that they give.

python docs/make_api.py
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import modelexport
from generated import DOCS, attribute_docs, attribute_types, table_row, write
from modelexport import errors

GROUPS = {
    "Export": [
        "export_model",
        "HierarchyExporter",
        "UnifiedExporter",
        "ExportReport",
        "export_batch",
        "JobResult",
    ],
    "Read": ["load", "TaggedModel", "analyze", "validate", "compare", "strip"],
    "Work by module": ["extract", "partition", "extract_module_subgraph", "verify"],
    "GraphML": ["export_graphml", "import_onnx"],
    "Strategies": ["ExportStrategy", "recommend_strategy", "Strategy", "register_strategy"],
    "Errors": ["ModelExportError", "FallbackWarning", "ExtractionWarning"],
}
HEAD = """# API

All public names of `modelexport`, written from their docstrings by `make docs`. Importing the package is light: torch
is loaded by the first name that needs it. `load`, `analyze`, `validate`, `compare`, `strip`, `extract`, `partition`,
`extract_module_subgraph`, `export_graphml` and `import_onnx` never load it. A path may be a `str` or a `Path`.
"""


def pages() -> dict[Path, str]:
    return {DOCS / "api.md": "\n".join([HEAD, *_lines()]).rstrip() + "\n"}


def _lines() -> Iterator[str]:
    ungrouped = set(modelexport.__all__) - {name for names in GROUPS.values() for name in names}
    if ungrouped:
        raise ValueError(f"GROUPS does not say where to put {', '.join(sorted(ungrouped))}")
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            yield from _described(name, getattr(modelexport, name))
    yield "### All errors\n"
    yield f"```\n{inspect.cleandoc(errors.__doc__ or '').partition(chr(10))[2].strip()}\n```\n"
    yield "## Records\n"
    yield "What the functions return is made of these. They cannot be changed; `msgspec.json.encode` writes JSON.\n"
    for record in sorted(_records(), key=lambda record: record.__name__):
        yield from _described(record.__name__, record)


def _described(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if isinstance(thing, type) and thing.__name__ != name:
        yield f"Another name of [{thing.__name__}](#{thing.__name__.lower()}).\n"
        return
    if not isinstance(thing, type):
        yield f"```\n{_signature(name, thing)}\n```\n"
    elif (
        not attribute_types(thing)
        and not issubclass(thing, enum.Enum)
        and "__init__" in vars(thing)
    ):
        yield f"```\n{_signature(name, thing.__init__)}\n```\n"
    yield inspect.cleandoc(thing.__doc__ or "") + "\n"
    if isinstance(thing, type):
        yield from _members(thing)


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield "".join(f"- `{member.name}` = `{member.value!r}`\n" for member in kind)
        return
    rows = [table_row(f"`{name}`", f"`{told}`", meaning) for name, told, meaning in _rows(kind)]
    if rows:
        yield "\n".join(["| | type | |", "|---|---|---|", *rows]) + "\n"
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and value.__doc__ and not name.startswith("_"):
            yield f"```\n{_signature(name, value)}\n```\n\n{inspect.cleandoc(value.__doc__)}\n"


def _rows(kind: type) -> Iterator[tuple[str, str, str]]:
    """Fields and properties of a class: name, type, meaning."""
    for name, told in attribute_types(kind).items():
        yield name, told, attribute_docs(kind).get(name, "")
    for name, value in vars(kind).items():
        getter = _getter(value)
        if getter is not None and not name.startswith("_"):
            yield name, getter.__annotations__["return"], " ".join((getter.__doc__ or "").split())


def _getter(value: object) -> Any:
    """The function behind a property."""
    return getattr(value, "fget", None) or (
        value.func if isinstance(value, functools.cached_property) else None
    )


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = [p.replace(default=_plain(p.default)) for p in parameters]
    line = f"{name}{signature.replace(parameters=shown)}".replace("'", "").replace('"', "'")
    line = line.removesuffix(" -> None") if name[0].isupper() else line
    if len(line) <= 100:
        return line
    starred = next((at for at, p in enumerate(shown) if p.kind is p.KEYWORD_ONLY), None)
    words = [str(p).replace("'", "").replace('"', "'") for p in shown]
    if starred is not None:
        words.insert(starred, "*")
    returned = line.rpartition(")")[2]
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"


class _Default:
    """A default value as it is written in a call."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f'"{self.value}"' if isinstance(self.value, str) else repr(self.value)


def _plain(value: object) -> object:
    return value if value is inspect.Parameter.empty else _Default(value)


def _records() -> set[type]:
    """All records of the package that the public names lead to, and are not public themselves."""
    public = [getattr(modelexport, name) for name in modelexport.__all__]
    seen: set[Any] = set()
    pending = [kind for thing in public for kind in _mentioned(thing)]
    while pending:
        kind = pending.pop()
        if kind not in seen and kind not in public:
            seen.add(kind)
            pending += _mentioned(kind)
    return seen


def _mentioned(thing: Any) -> set[type]:
    """The records in what a function returns, or in the attributes of a class."""
    if not isinstance(thing, type):
        return _in_hint(_hints(thing).get("return"))
    hints = [_hints(thing).get(name) for name in attribute_types(thing)]
    for value in vars(thing).values():
        getter = _getter(value) or value
        if inspect.isfunction(getter):
            hints.append(_hints(getter).get("return"))
    return {kind for hint in hints for kind in _in_hint(hint)}


def _hints(thing: Any) -> dict[str, Any]:
    return typing.get_type_hints(thing, vars(sys.modules[thing.__module__]))


def _in_hint(hint: Any) -> set[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        ours = hint.__module__.startswith("modelexport")
        return (
            {hint}
            if ours and (issubclass(hint, msgspec.Struct | enum.Enum) or hasattr(hint, "_fields"))
            else set()
        )
    return {kind for part in typing.get_args(hint) for kind in _in_hint(part)}


if __name__ == "__main__":
    write(pages())
