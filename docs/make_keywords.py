"""Write src/modelexport/keywords.py: the options as keywords that a type checker knows.

python docs/make_keywords.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from generated import DOCS, type_name, write
from modelexport.options import MODEL_KEYWORDS, SOURCE_KEYWORDS, Option

HEAD = '''"""Keyword types of the functions that export, written by docs/make_keywords.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from modelexport.options import SourceOptions, StrPath
'''
EXPLICIT = ("strategy", "optimize", "verbose")
"""Parameters that `export_model` has besides its keywords."""


def pages() -> dict[Path, str]:
    """Return the text of the file by its path."""
    for_models = [option for option in MODEL_KEYWORDS if option.name not in EXPLICIT]
    parts = [
        HEAD,
        _typed_dict("ModelKeywords", "TypedDict, total=False", "`export_model`", for_models),
        _typed_dict(
            "ExporterKeywords",
            "ModelKeywords, total=False",
            "`HierarchyExporter.export`",
            [option for option in MODEL_KEYWORDS if option.name in EXPLICIT],
        )
        + "    verbose: bool\n",
        _typed_dict("SourceKeywords", "TypedDict, total=False", "`export_source`", SOURCE_KEYWORDS),
    ]
    return {DOCS.parent / "src" / "modelexport" / "keywords.py": "\n\n".join(parts)}


def _typed_dict(name: str, bases: str, owner: str, options: Iterable[Option]) -> str:
    lines = [
        f"    {keyword}: {_keyword_type(option)}\n"
        for option in options
        for keyword in (option.name, *option.spelling.aliases)
    ]
    return f'class {name}({bases}):\n    """Options of {owner}."""\n\n{"".join(lines)}'


def _keyword_type(option: Option) -> str:
    """Return the type that a caller may pass, which is wider than that of the record."""
    name = re.sub(r"\btuple\[(\w+), \.\.\.\]", r"Sequence[\1]", type_name(option.type))
    name = name.replace("dict[", "Mapping[")
    if option.spelling.is_path:
        return name.replace("str", "StrPath")
    if option.spelling.single is not None:
        return f"{name} | {name.removeprefix('Mapping[str, ').removesuffix(']')}"
    return name


if __name__ == "__main__":
    write(pages())
