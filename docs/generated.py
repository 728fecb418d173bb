"""Parts of pages that scripts write: a whole file, or what stands between two marks in one."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def between_marks(page: str, name: str, text: str) -> str:
    """A page with the part between its marks `<!-- name -->` and `<!-- end of name -->` written anew."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has not one part called {name}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def write(pages: dict[Path, str]) -> None:
    """Write what differs, and say so."""
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(DOCS.parent)}")


@functools.cache
def attribute_docs(kind: type) -> dict[str, str]:
    """The strings that stand below the attributes in the source of a class."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for one, following in pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
            found[ast.unparse(one.target)] = " ".join(ast.literal_eval(following.value).split())
    return found


def attribute_types(kind: type) -> dict[str, str]:
    """The types of the fields of a record, as its source says them."""
    names = getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
    written: dict[str, Any] = {}
    for base in reversed(kind.__mro__):  # fields may be inherited
        written |= vars(base).get("__annotations__", {})
    return {name: getattr(written[name], "__forward_arg__", written[name]) for name in names}


def type_name(kind: Any) -> str:
    """Write a type as source code does, without the modules of its parts."""
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return re.sub(r"\b(collections\.abc|typing|modelexport\.options)\.", "", name)


def table_row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
