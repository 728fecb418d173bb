"""Write api.md: the public names with their signatures and docstrings, options and records.

python docs/make_api.py
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import modelexport
from generated import DOCS, attribute_docs, attribute_types, table_row, type_name, write
from modelexport import errors
from modelexport.options import Option, options_of

GROUPS = {
    "Export": [
        "export_model",
        "export_source",
        "export_generation",
        "HierarchyExporter",
        "UnifiedExporter",
        "ExportReport",
        "export_batch",
        "BatchJob",
        "JobResult",
    ],
    "Options": ["ExportOptions", "SourceOptions", "CallOptions"],
    "Generate": [
        "generate",
        "Generation",
        "GenerationFile",
        "GenerationPart",
        "GenerationInput",
        "InputRole",
        "TokenIds",
    ],
    "Read": ["load", "TaggedModel", "analyze", "validate", "compare", "strip"],
    "Work by module": [
        "list_modules",
        "extract",
        "partition",
        "extract_module_subgraph",
        "verify",
        "retag",
        "profile",
        "compare_profiles",
        "select",
        "annotate_layers",
        "quantize",
        "measure_sensitivity",
    ],
    "Look": ["view", "to_functions", "from_functions", "export_graphml", "import_onnx"],
    "Strategies": [
        "ExportStrategy",
        "recommend_strategy",
        "Strategy",
        "register_strategy",
        "Evidence",
        "Facts",
        "Graph",
        "ModuleTree",
        "Site",
        "Attribution",
        "Method",
    ],
}
EVIDENCE = ("SCOPE", "PARAMETER", "PARAMETER_IN_USE", "DATAFLOW", "AGREEMENT", "ROOT", "FULL_CHAIN")
KEYWORDS = ("ModelKeywords", "ExporterKeywords", "SourceKeywords")
HEAD = """# API

All public names of `modelexport`, written from their docstrings by `make docs`. Importing the
package does not load torch; the first name that needs it does. `load`, `analyze`, `validate`,
`compare`, `strip`, `list_modules`, `extract`, `partition`, `extract_module_subgraph`,
`view`, `to_functions`, `from_functions`, `export_graphml` and `import_onnx` never load it. A path
may be a `str` or a `Path`.
"""


def pages() -> dict[Path, str]:
    """Return the page by its path."""
    return {DOCS / "api.md": "\n".join([HEAD, *_lines()]).rstrip() + "\n"}


def _lines() -> Iterator[str]:
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            yield from _describe(name, getattr(modelexport, name))
    yield from _evidence()
    yield "## Errors\n"
    yield f"```\n{inspect.cleandoc(errors.__doc__ or '').partition(chr(10))[2].strip()}\n```\n"
    known = {name for names in (*GROUPS.values(), EVIDENCE, KEYWORDS) for name in names}
    rest = [name for name in modelexport.__all__ if name not in known]
    is_error = [name for name in rest if issubclass(getattr(modelexport, name), Exception)]
    for name in sorted(is_error, key=list(vars(errors)).index):
        yield from _describe(name, getattr(modelexport, name))
    yield "## Records\n"
    yield "Records that the functions return. They are frozen; `msgspec.json.encode` writes JSON.\n"
    for name in rest:
        if name not in is_error:
            yield from _describe(name, getattr(modelexport, name))
    yield "## Keyword types\n"
    yield "For functions of your own that pass options on, as `**options: Unpack[ModelKeywords]`.\n"
    for name in KEYWORDS:
        yield f"### {name}\n\n{getattr(modelexport, name).__doc__}\n"


def _evidence() -> Iterator[str]:
    """Describe the standard evidence."""
    for name in EVIDENCE:
        value = getattr(modelexport, name)
        yield f"### {name}\n"
        if isinstance(value, tuple):
            members = [member for member in EVIDENCE if getattr(modelexport, member) in value]
            names = ", ".join(f"`{member}`" for member in members)
            yield f"The chain of `fx` and `htp`: {names}.\n"
        else:
            summary = inspect.cleandoc(value.find.__doc__ or "").partition("\n\n")[0]
            yield f"Evidence `{value.method}`. {' '.join(summary.split())}\n"


def _describe(name: str, thing: Any) -> Iterator[str]:
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
    yield _markdown(thing.__doc__ or "") + "\n"
    if isinstance(thing, type):
        yield from _members(thing)


_SECTION = re.compile(r"(Args|Returns|Yields|Raises|Warns):")


def _markdown(docstring: str) -> str:
    """Convert a docstring in Google style to Markdown, with its sections as lists."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if _SECTION.fullmatch(line):
            section = line.removesuffix(":")
            lines += [f"**{section}**", ""]
        elif section and line.startswith("        ") and lines[-1]:
            lines[-1] += f" {line.strip()}"
        elif section in ("Args", "Raises", "Warns") and line:
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}")
        else:
            lines.append(line.strip() if section else line)
    return "\n".join(lines)


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield "".join(f"- `{member.name}` = `{member.value!r}`\n" for member in kind)
        return
    options = options_of(kind) if issubclass(kind, msgspec.Struct) else ()
    if options:
        yield "\n".join([_OPTIONS, "|---|---|---|---|", *map(_option_row, options)]) + "\n"
    names = {option.name for option in options}
    rows = [table_row(f"`{row[0]}`", f"`{row[1]}`", row[2]) for row in _rows(kind, names)]
    if rows:
        yield "\n".join(["| | type | |", "|---|---|---|", *rows]) + "\n"
    for name, value in vars(kind).items():
        if inspect.isfunction(value) and value.__doc__ and not name.startswith("_"):
            yield f"```\n{_signature(name, value)}\n```\n\n{_markdown(value.__doc__)}\n"


_OPTIONS = "| option | type | default | |"


def _option_row(option: Option) -> str:
    """Return the row of an option: its name and aliases, type, default and meaning."""
    kind = type_name(option.type)
    default = {} if option.default is None and "dict" in kind else option.default
    names = ", ".join(f"`{name}`" for name in (option.name, *option.spelling.aliases))
    meaning = re.sub(
        r"<\w+>\S*\w", r"`\g<0>`", option.description
    )  # else Markdown reads it as HTML
    return table_row(names, f"`{kind}`", f"`{default!r}`", meaning)


def _rows(kind: type, skipped: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and meaning of each field and property of a class."""
    for name, annotation in attribute_types(kind).items():
        if name not in skipped:
            yield name, annotation, attribute_docs(kind).get(name, "")
    for name, value in vars(kind).items():
        getter = _getter(value)
        if getter is not None and not name.startswith("_"):
            yield name, getter.__annotations__["return"], " ".join((getter.__doc__ or "").split())


def _getter(value: object) -> Any:
    """Return the function of a property, or None."""
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


if __name__ == "__main__":
    write(pages())
