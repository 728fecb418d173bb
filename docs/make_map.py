"""Write the code map of architecture.md: every source file with its first sentence.

python docs/make_map.py
"""

from __future__ import annotations

import ast
from pathlib import Path

from generated import DOCS, between_marks, write

SOURCE = DOCS.parent / "src" / "modelexport"


def pages() -> dict[Path, str]:
    """Return the page with its code map."""
    page = DOCS / "architecture.md"
    return {page: between_marks(page.read_text(), "code map", _map())}


def _map() -> str:
    rooms = sorted(path for path in SOURCE.iterdir() if (path / "__init__.py").exists())
    parts = [_table("src/modelexport/", "", sorted(SOURCE.glob("*.py")))]
    for room in rooms:
        files = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
        parts.append(_table(f"{room.name}/", _first_line(room / "__init__.py"), files))
    return "\n\n".join(parts)


def _table(title: str, summary: str, files: list[Path]) -> str:
    heading = f"**{title}**" + (f" {summary}" if summary else "")
    rows = [f"| `{path.name}` | {_first_line(path)} |" for path in files]
    return "\n".join([heading, "", "| file | what it is for |", "|---|---|", *rows])


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    write(pages())
