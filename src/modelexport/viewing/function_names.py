"""Name the functions that groups of nodes become: short, unique, and readable in a viewer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from modelexport.modules.lookup import ModuleIndex
from modelexport.viewing.grouping import Group

_UNSAFE = re.compile(r"\W", re.ASCII)
_JOINT = "__"
_MOST_LEVELS = 16
"""How many of the modules above one are looked at for its name."""
_LONGEST = 120


def name_functions(groups: Sequence[Group], modules: ModuleIndex) -> list[str]:
    """Return a name for the function of each group, of letters, digits and underscores only.

    It is the last segment of the module's tag, after those segments above it by which the module
    differs from others with the same last segment: `BertLayer_0__BertAttention`. The number of a
    call or a part follows where a module has several. There is no dot, because Netron shows only
    what comes after the last one.
    """
    paths = dict.fromkeys(group.call[0] for group in groups)
    readable = _distinguish({path: _segments(path, modules) for path in paths})
    names: list[str] = []
    used: set[str] = set()
    next_number: dict[str, int] = {}
    for group in groups:
        path, call = group.call
        name = readable[path]
        name += "" if call is None else f"{_JOINT}call_{call}"
        name += "" if group.part is None else f"{_JOINT}part_{group.part}"
        unique, number = name, next_number.get(name, 2)
        while unique in used:
            unique, number = f"{name}_{number}", number + 1
        next_number[name] = number
        used.add(unique)
        names.append(unique)
    return names


def _segments(path: str, modules: ModuleIndex) -> list[str]:
    """Return the segments of a module's tag below the root; a hidden module adds its name."""
    shown = path
    while shown and modules.tags.get(shown) is None:
        shown = shown.rpartition(".")[0]
    tag = modules.tags.get(shown) or ""
    segments = tag.split("/")[2:] if shown else []
    if shown != path:
        segments.append(path[len(shown) + 1 :] if shown else path)
    return [_UNSAFE.sub("_", segment) for segment in segments] or ["module"]


def _distinguish(segments: dict[str, list[str]]) -> dict[str, str]:
    """Return a name for each module: its last segment, and what tells it from its namesakes."""
    namesakes: dict[str, list[str]] = {}
    for path, own in segments.items():
        namesakes.setdefault(own[-1], []).append(path)
    names = {}
    for last, paths in namesakes.items():
        levels = _differing_levels(segments[path] for path in paths)
        for path in paths:
            own = segments[path]
            above = [own[-level] for level in reversed(levels) if level <= len(own)]
            name = _JOINT.join((*above, last))[-_LONGEST:]
            names[path] = f"_{name}" if name[0].isdigit() else name
    return names


def _differing_levels(lines: Iterable[list[str]]) -> list[int]:
    """Return the levels above the last, counted from the end, at which segments differ."""
    lines = list(lines)
    deepest = min(max(map(len, lines)), _MOST_LEVELS) if len(lines) > 1 else 0
    return [
        level
        for level in range(2, deepest + 1)
        if len({line[-level] if level <= len(line) else None for line in lines}) > 1
    ]
