"""Name the functions that groups of nodes become: short, unique, and readable in a viewer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from modelexport.modules.lookup import ModuleIndex
from modelexport.viewing.grouping import Group

_UNSAFE = re.compile(r"\W", re.ASCII)
_MOST_LEVELS = 16
"""How many of the modules above one are looked at for its name."""
_LONGEST = 120


def name_functions(groups: Sequence[Group], modules: ModuleIndex) -> list[str]:
    """Return a name for the function of each group, of letters, digits and underscores only.

    It is the class of the module, followed by what distinguishes it within that class:
    `BertAttention_0` is that of `BertLayer.0`. The number of a call or a part follows where a
    module has several. Netron shows only what comes after the last dot of a name, and of a long
    name only the beginning and the end.
    """
    paths = dict.fromkeys(group.call[0] for group in groups)
    readable = _distinguish({path: _segments(path, modules) for path in paths})
    names: list[str] = []
    used: set[str] = set()
    next_number: dict[str, int] = {}
    for group in groups:
        path, call = group.call
        name = readable[path]
        name += "" if call is None else f"_call{call}"
        name += "" if group.part is None else f"_part{group.part}"
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
    segments = (modules.tags.get(shown) or "").split("/")[2:] if shown else []
    if shown != path:
        segments.append(path[len(shown) + 1 :] if shown else path)
    return segments or [path]


def _distinguish(segments: dict[str, list[str]]) -> dict[str, str]:
    """Return a name for each module: its class, and what distinguishes it within that class."""
    of_class: dict[str, list[str]] = {}
    for path, own in segments.items():
        of_class.setdefault(_split(own[-1])[0], []).append(path)
    names = {}
    for kind, paths in of_class.items():
        for path, label in zip(paths, _labels([segments[path] for path in paths]), strict=True):
            name = _UNSAFE.sub("_", "_".join((kind, *filter(None, label))))[:_LONGEST]
            names[path] = f"_{name}" if name[:1].isdigit() else name
    return names


def _labels(lines: Sequence[list[str]]) -> list[tuple[str, ...]]:
    """Return what distinguishes modules of one class, given the segments of each.

    That is the suffix of each segment, such as the `0` of `BertLayer.0`, except at levels where all
    modules are below the same one. If that is not enough, the class is added at some levels.
    """
    deepest = min(max(map(len, lines)) - 1, _MOST_LEVELS)
    columns = [[line[n] if n < len(line) - 1 else "" for line in lines] for n in range(deepest)]
    differing = [column for column in columns if len(set(column)) > 1]
    own = [_split(line[-1])[1] for line in lines]
    suffixes = [[_split(value)[1] for value in column] for column in differing]
    labels = list(zip(*suffixes, own, strict=True))
    if len({tuple(filter(None, label)) for label in labels}) == len(labels):
        return labels
    # Where the modules at a level are of several classes, a suffix alone says too little.
    mixed = [len({_split(value)[0] for value in column if value}) > 1 for column in differing]
    chosen = [
        column if is_mixed else short
        for column, short, is_mixed in zip(differing, suffixes, mixed, strict=True)
    ]
    return list(zip(*chosen, own, strict=True))


def _split(segment: str) -> tuple[str, str]:
    """Return the class and the suffix of a segment."""
    kind, _, suffix = segment.partition(".")
    return kind, suffix
