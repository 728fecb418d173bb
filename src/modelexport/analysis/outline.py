"""The module tree as lines of text: shown modules in the order of execution, equal siblings in one line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import msgspec


class TreeModule(Protocol):
    """What the tree needs to know of a module."""

    @property
    def tag(self) -> str | None: ...
    @property
    def class_(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def execution_order(self) -> int | None: ...


class Line(msgspec.Struct, frozen=True):
    """One line of the tree: `text` is drawn, `paths` are the modules that it stands for."""

    text: str
    depth: int
    paths: tuple[str, ...]


def outline(modules: Mapping[str, TreeModule]) -> list[Line]:
    """The lines of the whole tree."""
    return _Outline(modules).lines()


def shortened(lines: list[Line], most: int) -> list[Line]:
    """Only as many levels of a tree as give no more lines than that."""
    if len(lines) <= most:
        return lines
    depth = max(line.depth for line in lines)
    while depth > 1 and sum(line.depth <= depth for line in lines) > most:
        depth -= 1
    return [line for line in lines if line.depth <= depth][:most]


class _Outline:
    def __init__(self, modules: Mapping[str, TreeModule]) -> None:
        self.modules = modules
        self.children = _shown_children(modules)
        self.signature = self._signatures()

    def _signatures(self) -> dict[str, int]:
        """A number for each shown module, the same for those that look the same with all below them."""
        numbers: dict[Hashable, int] = {}
        found: dict[str, int] = {}
        for path in sorted(self.children, key=lambda p: -(self.modules[p].tag or "").count("/")):
            record = self.modules[path]
            below = tuple(found[child] for child in self.children[path])
            key = (record.class_, record.status, record.nodes, below)
            found[path] = numbers.setdefault(key, len(numbers))
        return found

    def lines(self) -> list[Line]:
        """A part of a tree may have several tops; each goes by its module path, the root by its class."""
        inner = {child for children in self.children.values() for child in children}
        lines: list[Line] = []
        for top in (path for path in self.children if path not in inner):
            lines.append(Line(top or self._label([top]), 0, (top,)))
            self._add(top, "", 1, lines)
        return lines

    def _add(self, path: str, lead: str, depth: int, lines: list[Line]) -> None:
        runs = self._runs(self.children[path])
        for place, run in enumerate(runs):
            last = place == len(runs) - 1
            branch, below = ("└── ", "    ") if last else ("├── ", "│   ")
            lines.append(Line(lead + branch + self._label(run), depth, tuple(run)))
            self._add(run[0], lead + below, depth + 1, lines)

    def _runs(self, paths: list[str]) -> list[list[str]]:
        """Numbered siblings in a row that look the same, together."""
        runs: list[list[str]] = []
        previous: int | None = None
        for path in paths:
            numbered = path.rpartition(".")[2].isdecimal()
            signature = self.signature[path] if numbered else None
            if signature is not None and signature == previous:
                runs[-1].append(path)
            else:
                runs.append([path])
            previous = signature
        return runs

    def _label(self, run: list[str]) -> str:
        first, last = (
            (self.modules[path].tag or "").rpartition("/")[2] for path in (run[0], run[-1])
        )
        return first if len(run) == 1 else f"{first} … {last}  x{len(run)}"


def _shown_children(modules: Mapping[str, TreeModule]) -> dict[str, list[str]]:
    """The shown modules directly below each shown one, in the order of execution."""
    by_tag = {record.tag: path for path, record in modules.items() if record.tag is not None}
    ordered = sorted(by_tag.values(), key=lambda path: execution_order(path, modules[path]))
    children: dict[str, list[str]] = {path: [] for path in ordered}
    for path in ordered:
        above, slash, _ = (modules[path].tag or "").rpartition("/")
        parent = by_tag.get(above)
        if parent is not None and slash:
            children[parent].append(path)
    return children


def execution_order(path: str, record: TreeModule) -> tuple[bool, int, str]:
    """Sorts modules as they ran first; those that did not run come last."""
    return record.execution_order is None, record.execution_order or 0, path
