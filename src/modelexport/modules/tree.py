"""The module tree: paths, parents, parameters and aliases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from modelexport.modules.record import ModuleRecord


class Module(msgspec.Struct, frozen=True):
    """What is known of one `nn.Module` without running it."""

    path: str
    qualified_class: str
    children: tuple[str, ...]
    direct_parameters: tuple[str, ...]
    direct_buffers: tuple[str, ...]
    forward_args: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    parameter_count: int = 0
    """The elements of its parameters and of those below it, each parameter object once."""
    more_aliases: int = 0
    """How many names it has beside its path and those aliases, where the list is cut."""
    opaque: bool = False
    """Compiled by torch.jit: it takes no hooks, so its calls cannot be seen."""

    @property
    def class_name(self) -> str:
        return self.qualified_class.rpartition(".")[2]

    @property
    def from_torch(self) -> bool:
        """Whether the class is defined inside the torch package."""
        return self.qualified_class.partition(".")[0] == "torch"


class ModuleTree:
    """All modules of a model in the order of `named_modules()`; the root is the empty path."""

    def __init__(
        self, modules: Mapping[str, Module], tensor_shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.modules = dict(modules)
        self.tensor_shapes = dict(tensor_shapes)
        self._parent = {
            path: parent for parent in self.modules for path in self._child_paths(parent)
        }
        self._alias = {
            alias: path for path, module in self.modules.items() for alias in module.aliases
        }
        self._owner = {
            join_path(path, name): path
            for path, module in self.modules.items()
            for name in (*module.direct_parameters, *module.direct_buffers)
        }

    def __len__(self) -> int:
        return len(self.modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __getitem__(self, path: str) -> Module:
        return self.modules[path]

    def _child_paths(self, path: str) -> Iterator[str]:
        return (
            join_path(path, name)
            for name in self.modules[path].children
            if join_path(path, name) in self.modules
        )

    def children(self, path: str) -> list[str]:
        return list(self._child_paths(path))

    def parent(self, path: str) -> str | None:
        return self._parent.get(path)

    def canonical(self, path: str) -> str | None:
        """The module's own path for any of its names, or None where no module has that name."""
        return resolve_alias(path, self.modules, self._alias)

    def owner(self, tensor_name: str) -> str | None:
        """The module that directly holds the parameter or buffer of this dotted name."""
        found = self._owner.get(tensor_name)
        if found is not None:
            return found
        module, _, _ = tensor_name.rpartition(".")
        return None if module in self.modules else self.canonical(module)

    def lineage(self, path: str) -> list[str]:
        """The module and its ancestors, from the module up to the root."""
        line = [path]
        while (parent := self._parent.get(line[-1])) is not None:
            line.append(parent)
        return line

    def common_ancestor(self, first: str, second: str) -> str:
        """The lowest module that contains both."""
        if first == second:
            return first
        above = set(self.lineage(first))
        return next(path for path in self.lineage(second) if path in above)

    def subtree_parameters(self) -> dict[str, tuple[str, ...]]:
        """For each module its parameters and those below it, named as `named_parameters()` names them."""
        names: dict[str, list[str]] = {
            path: list(m.direct_parameters) for path, m in self.modules.items()
        }
        for path in reversed(self.modules):
            parent = self._parent.get(path)
            if parent is not None:
                local = path[len(parent) + 1 :] if parent else path
                names[parent].extend(f"{local}.{name}" for name in names[path])
        return {path: tuple(sorted(found)) for path, found in names.items()}


def parameter_counts(
    children: Mapping[str, Sequence[str]], held: Mapping[str, Mapping[int, int]]
) -> dict[str, int]:
    """Count the elements of the parameters in each module and below it, each parameter object once.

    `children` are the modules right below each, parents first, one object under one path; `held` are the sizes of
    the parameters that each holds itself, by the identity of the object.
    """
    uses = Counter(["", *(child for found in children.values() for child in found)])
    slots = [identity for sizes in held.values() for identity in sizes]
    if max(uses.values()) > 1 or len(slots) > len(set(slots)):
        return {path: _counted_once(path, children, held) for path in children}
    counts = {path: sum(held[path].values()) for path in children}
    for path in reversed(list(children)):
        counts[path] += sum(counts[child] for child in children[path])
    return counts


def _counted_once(
    path: str, children: Mapping[str, Sequence[str]], held: Mapping[str, Mapping[int, int]]
) -> int:
    """Count below one module where modules or parameters are shared."""
    found: dict[int, int] = {}
    seen, pending = {path}, [path]
    while pending:
        at = pending.pop()
        found.update(held[at])
        new = [child for child in dict.fromkeys(children[at]) if child not in seen]
        seen.update(new)
        pending += new
    return sum(found.values())


def resolve_alias(name: str, paths: Container[str], aliases: Mapping[str, str]) -> str | None:
    """Return the path of the module with this name, listed or not; None where no module has it.

    A name that is not listed is followed from the root down: the names in parents' own paths all are.
    """
    if name in paths:
        return name
    if name in aliases:
        return aliases[name]
    path = ""
    for part in name.split("."):
        step = join_path(path, part)
        if step not in paths and step not in aliases:
            return None
        path = step if step in paths else aliases[step]
    return path


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_within(path: str, ancestor: str) -> bool:
    """Whether `path` is `ancestor` or lies below it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


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
        direct = dict.fromkeys((path, *(join_path(parent, name) for parent, name in above)))
        further = (
            join_path(other, name)
            for parent, name in above
            for other in names[parent][1 : MOST_ALIASES + 1]
        )
        names[path] = [*direct, *islice(further, max(0, MOST_ALIASES + 1 - len(direct)))]
        counts[path] = min(sum(counts[parent] for parent, _ in above) or 1, _MOST_COUNTED)
    return {
        path: Aliases(tuple(sorted(found[1:])), max(0, counts[path] - len(found)))
        for path, found in names.items()
    }


class Ancestry:
    """Parents of modules; paths that no record names hang on the nearest one above them, or on the root."""

    def __init__(self, modules: Mapping[str, ModuleRecord]) -> None:
        self._parent = {
            join_path(path, child): path
            for path, record in modules.items()
            for child in record.children
        }
        self._known: dict[str, tuple[str, ...]] = {"": ("",)}

    def of(self, path: str) -> tuple[str, ...]:
        """The module and all above it, from the root down."""
        pending = []
        while path not in self._known:
            pending.append(path)
            path = self._parent.get(path, path.rpartition(".")[0])
        line = self._known[path]
        for path in reversed(pending):
            line = self._known[path] = (*line, path)
        return line

    def common(self, paths: Iterable[str]) -> str:
        """The lowest module that holds all of these."""
        lines = [self.of(path) for path in dict.fromkeys(paths)]
        shared = ""
        for level in zip(*lines, strict=False):
            if any(path != level[0] for path in level):
                break
            shared = level[0]
        return shared


def subtree_totals(own: Mapping[str, int], lineage: Ancestry) -> Counter[str]:
    """For each module the sum over itself and everything below it."""
    whole: dict[str, int] = {}
    for path, count in own.items():
        for above in lineage.of(path):
            whole[above] = whole.get(above, 0) + count
    return Counter(whole)
