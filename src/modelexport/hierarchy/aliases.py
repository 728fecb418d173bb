"""The names of modules that are shared: each has one for every way from the root to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from modelexport.hierarchy.tree import join

MOST_ALIASES = 100
"""Names beyond those that a module has in its parents' own paths are listed up to this many in all."""
_MOST_COUNTED = 2**53 - 1
"""The greatest whole number that every JSON reader takes; nested sharing doubles the names at each level."""

Link = tuple[str, str]
"""The path of a parent, and the name that it has for the child."""


class Aliases(NamedTuple):
    """The names of a module beside its path, sorted, and how many more it has."""

    listed: tuple[str, ...] = ()
    more: int = 0


def find_aliases(links: Mapping[str, Sequence[Link]], order: Iterable[str]) -> dict[str, Aliases]:
    """Return the aliases of each module; `order` has parents before their children, the root first.

    Takes time linear in the links, because a module with more names passes only some of them on.
    """
    names: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for path in order:
        above = links.get(path, ())
        direct = dict.fromkeys((path, *(join(parent, name) for parent, name in above)))
        further = (join(other, name) for parent, name in above for other in names[parent][1 : MOST_ALIASES + 1])
        names[path] = [*direct, *islice(further, max(0, MOST_ALIASES + 1 - len(direct)))]
        counts[path] = min(sum(counts[parent] for parent, _ in above) or 1, _MOST_COUNTED)
    return {path: Aliases(tuple(sorted(found[1:])), max(0, counts[path] - len(found))) for path, found in names.items()}
