"""Write generated files, and generated parts between two marks of a page."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

DOCS = Path(__file__).parent


def between_marks(page: str, name: str, text: str) -> str:
    """Replace the text between the marks `<!-- name -->` and `<!-- end of name -->` of a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"expected one part called {name}, got {page.count(begin)}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def write(pages: dict[Path, str]) -> None:
    """Write the files that changed, and print their names."""
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(DOCS.parent)}")


@functools.cache
def attribute_docs(kind: type) -> dict[str, str]:
    """Return the strings below the attributes in the source of a class."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for attribute, following in pairwise(body):
        if isinstance(attribute, ast.AnnAssign) and isinstance(following, ast.Expr):
            text = ast.literal_eval(following.value)
            docs[ast.unparse(attribute.target)] = " ".join(text.split())
    return docs


def attribute_types(kind: type) -> dict[str, str]:
    """Return the types of the fields of a record, as they are written in its source."""
    names = getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):  # fields may be inherited
        types |= vars(base).get("__annotations__", {})
    return {name: getattr(types[name], "__forward_arg__", types[name]) for name in names}


def type_name(kind: Any) -> str:
    """Write a type as source code does, without the modules of its parts."""
    if get_origin(kind) is Union:
        return " | ".join(map(type_name, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in get_args(kind))}]"
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return re.sub(r"\b(collections\.abc|typing|modelexport\.options)\.", "", name)


def table_row(*cells: str) -> str:
    """Format the row of a Markdown table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
