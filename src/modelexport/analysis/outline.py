"""Draw the module tree as text: shown modules in execution order, equal siblings in one line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import msgspec


class TreeModule(Protocol):
    """The properties of a module that the tree shows."""

    @property
    def tag(self) -> str | None:
        """The tag, or None for a hidden module."""

    @property
    def class_(self) -> str:
        """The qualified name of the class."""

    @property
    def status(self) -> str:
        """Whether it has nodes, was absorbed or is unused."""

    @property
    def nodes(self) -> int:
        """The number of nodes of the module and of all below it."""

    @property
    def execution_order(self) -> int | None:
        """When it first ran, or None if it did not."""


class Line(msgspec.Struct, frozen=True):
    """One line of the tree: `text` is drawn, `paths` are the modules that it stands for."""

    text: str
    depth: int
    paths: tuple[str, ...]


def outline(modules: Mapping[str, TreeModule], collapse: bool = True) -> list[Line]:
    """Draw the tree of the shown modules, of a whole model or a selection with several roots.

    Args:
        modules: The modules by path.
        collapse: Whether equal siblings share a line.
    """
    return _Outline(modules, collapse).lines()


def shorten(lines: list[Line], most: int) -> list[Line]:
    """Drop the lowest levels of a tree until at most `most` lines are left."""
    if len(lines) <= most:
        return lines
    depth = max(line.depth for line in lines)
    while depth > 1 and sum(line.depth <= depth for line in lines) > most:
        depth -= 1
    return [line for line in lines if line.depth <= depth][:most]


def execution_order(path: str, record: TreeModule) -> tuple[bool, int, str]:
    """Return a sort key for the order of first calls; modules that did not run come last."""
    return record.execution_order is None, record.execution_order or 0, path


class _Outline:
    def __init__(self, modules: Mapping[str, TreeModule], collapse: bool) -> None:
        self.modules = modules
        self._collapse = collapse
        self.children = _shown_children(modules)
        self.signature = self._signatures()

    def _signatures(self) -> dict[str, int]:
        """Number the shown modules so that those with equal subtrees have equal numbers."""
        numbers: dict[Hashable, int] = {}
        signatures: dict[str, int] = {}
        # Deepest tags first, so that all children have a number before their parent.
        for path in sorted(self.children, key=lambda p: -(self.modules[p].tag or "").count("/")):
            record = self.modules[path]
            below = tuple(signatures[child] for child in self.children[path])
            key = (record.class_, record.status, record.nodes, below)
            signatures[path] = numbers.setdefault(key, len(numbers))
        return signatures

    def lines(self) -> list[Line]:
        """Draw all roots; the model's own goes by its class, others by their module path."""
        inner = {child for children in self.children.values() for child in children}
        lines: list[Line] = []
        for root in self.children:
            if root not in inner:
                lines.append(Line(root or self._label([root]), 0, (root,)))
                self._add_children(root, "", 1, lines)
        return lines

    def _add_children(self, path: str, indent: str, depth: int, lines: list[Line]) -> None:
        runs = self._equal_runs(self.children[path])
        for number, run in enumerate(runs, start=1):
            branch, below = ("└── ", "    ") if number == len(runs) else ("├── ", "│   ")
            lines.append(Line(indent + branch + self._label(run), depth, tuple(run)))
            self._add_children(run[0], indent + below, depth + 1, lines)

    def _equal_runs(self, paths: list[str]) -> list[list[str]]:
        """Group consecutive numbered siblings with equal subtrees."""
        runs: list[list[str]] = []
        previous: int | None = None
        for path in paths:
            is_numbered = self._collapse and path.rpartition(".")[2].isdecimal()
            signature = self.signature[path] if is_numbered else None
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
    """Return the shown modules directly below each shown one, in execution order."""
    by_tag = {record.tag: path for path, record in modules.items() if record.tag is not None}
    ordered = sorted(by_tag.values(), key=lambda path: execution_order(path, modules[path]))
    children: dict[str, list[str]] = {path: [] for path in ordered}
    for path in ordered:
        above, slash, _ = (modules[path].tag or "").rpartition("/")
        parent = by_tag.get(above)
        if parent is not None and slash:
            children[parent].append(path)
    return children
