"""The module tree: paths, parents, parameters and aliases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from modelexport.modules.record import ModuleRecord


class ModuleInfo(msgspec.Struct, frozen=True):
    """One `nn.Module`, as far as it is known without running it."""

    path: str
    qualified_class: str
    children: tuple[str, ...]
    direct_parameters: tuple[str, ...]
    direct_buffers: tuple[str, ...]
    forward_args: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    parameter_count: int = 0
    """The elements of its parameters and of those below it, each parameter object once."""
    flops: int | None = None
    """The floating-point operations of its calls in one run, if they were counted."""
    more_aliases: int = 0
    """How many further aliases it has, where the list is cut."""
    opaque: bool = False
    """Whether it is compiled by torch.jit: it takes no hooks, so its calls cannot be recorded."""

    @property
    def class_name(self) -> str:
        """The class without its package."""
        return self.qualified_class.rpartition(".")[2]

    @property
    def from_torch(self) -> bool:
        """Whether the class is defined inside the torch package."""
        return self.qualified_class.partition(".")[0] == "torch"


class ModuleTree:
    """All modules of a model in the order of `named_modules()`; the root is the empty path.

    Args:
        modules: The modules by path.
        tensor_shapes: The shapes of parameters and buffers by dotted name.
    """

    def __init__(
        self, modules: Mapping[str, ModuleInfo], tensor_shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.modules: dict[str, ModuleInfo] = dict(modules)
        self.tensor_shapes: dict[str, tuple[int, ...]] = dict(tensor_shapes)
        self._ancestry = Ancestry(self.modules)
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

    def __getitem__(self, path: str) -> ModuleInfo:
        return self.modules[path]

    def parent(self, path: str) -> str | None:
        """Return the path of the parent of a module; None for the root."""
        return self._ancestry.parents.get(path)

    def canonical(self, path: str) -> str | None:
        """Return the path of the module that has this path or alias; None where none has."""
        return resolve_alias(path, self.modules, self._alias)

    def owner(self, tensor_name: str) -> str | None:
        """Return the path of the module that a parameter or buffer is an attribute of.

        Args:
            tensor_name: Its dotted name, which may go through an alias of the module.

        Returns:
            The path; None if there is no such module.
        """
        owner = self._owner.get(tensor_name)
        if owner is not None:
            return owner
        module, _, _ = tensor_name.rpartition(".")
        return None if module in self.modules else self.canonical(module)

    def lineage(self, path: str) -> list[str]:
        """List the paths of a module and its ancestors, from the module up to the root."""
        return list(reversed(self._ancestry.of(path)))

    def common_ancestor(self, first: str, second: str) -> str:
        """Return the path of the lowest module that contains two modules."""
        return first if first == second else self._ancestry.common((first, second))

    def subtree_parameters(self) -> dict[str, tuple[str, ...]]:
        """List, by module path, the sorted names that `named_parameters()` of a module has."""
        names = {path: list(module.direct_parameters) for path, module in self.modules.items()}
        for path in reversed(self.modules):
            parent = self.parent(path)
            if parent is not None:
                local = path[len(parent) + 1 :] if parent else path
                names[parent].extend(f"{local}.{name}" for name in names[path])
        return {path: tuple(sorted(parameters)) for path, parameters in names.items()}


def parameter_counts(
    children: Mapping[str, Sequence[str]], held: Mapping[str, Mapping[int, int]]
) -> dict[str, int]:
    """Count the elements of the parameters of each module and below, each parameter object once.

    Args:
        children: The children of each module, parents first, one object under one path.
        held: The sizes of each module's own parameters, by the identity of the object.
    """
    uses = Counter(["", *(child for paths in children.values() for child in paths)])
    slots = [identity for sizes in held.values() for identity in sizes]
    if max(uses.values()) > 1 or len(slots) > len(set(slots)):
        return {path: _count_once(path, children, held) for path in children}
    counts = {path: sum(held[path].values()) for path in children}
    for path in reversed(list(children)):
        counts[path] += sum(counts[child] for child in children[path])
    return counts


def _count_once(
    path: str, children: Mapping[str, Sequence[str]], held: Mapping[str, Mapping[int, int]]
) -> int:
    """Count below one module where modules or parameters are shared."""
    sizes: dict[int, int] = {}
    seen, pending = {path}, [path]
    while pending:
        module = pending.pop()
        sizes.update(held[module])
        new = [child for child in dict.fromkeys(children[module]) if child not in seen]
        seen.update(new)
        pending += new
    return sum(sizes.values())


def resolve_alias(name: str, paths: Container[str], aliases: Mapping[str, str]) -> str | None:
    """Return the path of the module that has a name, also one that no list of aliases has.

    Such a name is followed from the root down, because a child's names below its parent's own path
    are always listed.

    Args:
        name: A path or an alias.
        paths: The paths of all modules.
        aliases: The paths of modules by alias.
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
    """Return the dotted path of a child or a parameter of a module."""
    return f"{path}.{name}" if path else name


def is_within(path: str, ancestor: str) -> bool:
    """Return whether a module is another one or lies below it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


MOST_ALIASES = 100
"""How many aliases are listed, apart from those below a parent's own path, which always are."""
_MOST_COUNTED = 2**53 - 1
"""The greatest integer that every JSON reader accepts; nested sharing can exceed it."""

Link = tuple[str, str]
"""The path of a parent, and its name for the child."""


class Aliases(NamedTuple):
    """The aliases of a module, sorted, and how many are not listed."""

    listed: tuple[str, ...] = ()
    more: int = 0


def find_aliases(links: Mapping[str, Sequence[Link]], order: Iterable[str]) -> dict[str, Aliases]:
    """Find the aliases of each module, in time linear in the links.

    Args:
        links: The links to each module, by its path.
        order: The paths of all modules, the root first, parents before their children.
    """
    names: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for path in order:
        above = links.get(path, ())
        direct = dict.fromkeys((path, *(join_path(parent, name) for parent, name in above)))
        # A module with many names passes only some of them on, which keeps this linear.
        further = (
            join_path(other, name)
            for parent, name in above
            for other in names[parent][1 : MOST_ALIASES + 1]
        )
        names[path] = [*direct, *islice(further, max(0, MOST_ALIASES + 1 - len(direct)))]
        counts[path] = min(sum(counts[parent] for parent, _ in above) or 1, _MOST_COUNTED)
    return {
        path: Aliases(tuple(sorted(listed[1:])), max(0, counts[path] - len(listed)))
        for path, listed in names.items()
    }


class Ancestry:
    """The ancestors of modules; a path without a record is below the nearest one that has a record.

    Args:
        modules: The modules or their records by path.

    Attributes:
        parents: The path of the parent of each child.
    """

    def __init__(self, modules: Mapping[str, ModuleRecord] | Mapping[str, ModuleInfo]) -> None:
        self.parents: dict[str, str] = {
            join_path(path, child): path
            for path, record in modules.items()
            for child in record.children
        }
        self._known: dict[str, tuple[str, ...]] = {"": ("",)}

    def of(self, path: str) -> tuple[str, ...]:
        """List the paths of a module and its ancestors, from the root down to the module."""
        pending = []
        while path not in self._known:
            pending.append(path)
            path = self.parents.get(path, path.rpartition(".")[0])
        line = self._known[path]
        for path in reversed(pending):
            line = self._known[path] = (*line, path)
        return line

    def common(self, paths: Iterable[str]) -> str:
        """Return the path of the lowest module that contains all of some modules."""
        distinct = list(dict.fromkeys(paths))
        if len(distinct) == 1:
            return distinct[0]
        shared = ""
        for level in zip(*map(self.of, distinct), strict=False):
            if any(path != level[0] for path in level):
                break
            shared = level[0]
        return shared


def subtree_totals(own: Mapping[str, int], lineage: Ancestry) -> Counter[str]:
    """Sum counts, given by module path, over each module and everything below it."""
    totals: defaultdict[str, int] = defaultdict(int)
    for path, count in own.items():
        for above in lineage.of(path):
            totals[above] += count
    return Counter(totals)
