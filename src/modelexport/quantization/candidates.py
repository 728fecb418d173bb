"""Candidates: the modules that are quantized or left in float as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.tree import join_path
from modelexport.onnx_file.digests import record_digest
from modelexport.quantization.select import find_nodes
from modelexport.tagged.model import TaggedModel

_FEW = 4
"""The number of modules with nodes to convert that the default depth has at least."""


class Candidate(NamedTuple):
    """The nodes of one module; or those outside its submodules, if `own`."""

    path: str
    own: bool
    nodes: frozenset[int]

    @property
    def title(self) -> str:
        """The module, as messages name it."""
        name = self.path or "(root)"
        return f"{name} (own nodes)" if self.own else name

    @property
    def key(self) -> str:
        """A key that is unique among the modules of a file, for recorded results."""
        return f"{self.title} {record_digest(sorted(self.nodes))}"


def split_modules(
    model: TaggedModel, within: Iterable[int], converted: Set[int], depth: int | None
) -> tuple[int, list[Candidate]]:
    """Divide nodes among the modules at a depth; nodes of modules above it are apart.

    A container that does not run, such as a `ModuleList`, is no level of its own.

    Args:
        model: The file.
        within: The indices of the nodes.
        converted: Those that are converted.
        depth: The depth; None for the shallowest with several modules with nodes to convert, or
            the one with the most of them.

    Returns:
        The depth, and all modules in file order.
    """
    paths = {i: "" if (tag := model.effective_tags[i]) is None else tag.hierarchy_module
             for i in within}  # fmt: skip
    deepest = max((path.count(".") + 1 for path in paths.values()), default=1)
    best: tuple[int, list[Candidate]] = (1, [])
    most = 0
    for level in [depth] if depth is not None else range(1, deepest + 1):
        candidates = _at_depth(model, paths, level)
        count = sum(not each.own and not converted.isdisjoint(each.nodes) for each in candidates)
        if depth is not None or count > most:
            best, most = (level, candidates), count
        if most >= _FEW:
            break
    return best


def _at_depth(model: TaggedModel, paths: dict[int, str], depth: int) -> list[Candidate]:
    groups: dict[tuple[str, bool], set[int]] = {}
    for index, path in paths.items():
        top = _ancestor(model, path, depth)
        groups.setdefault((path if top is None else top, top is None), set()).add(index)
    # A module above the depth that has no submodules with nodes stands for itself.
    parents = {""} if len(groups) > 1 else set()
    for path, _ in groups:
        parents.update(path[:dot] for dot, char in enumerate(path) if char == ".")
    return [
        Candidate(path, is_above and path in parents, frozenset(nodes))
        for (path, is_above), nodes in groups.items()
    ]


def _ancestor(model: TaggedModel, path: str, depth: int) -> str | None:
    """Return the module at a depth that contains a module; None if that one lies above it."""
    above, level = "", 0
    for name in path.split(".") if path else ():
        above = join_path(above, name)
        record = model.modules.get(above)
        level += record is None or record.calls > 0
        if level == depth:
            return above
    return None


def matching_modules(model: TaggedModel, patterns: Sequence[str]) -> list[Candidate]:
    """List the modules that patterns name, each with all nodes below it."""
    index = ModuleIndex(model.modules, model.effective_tags)
    paths: dict[str, None] = {}
    for pattern in patterns:
        resolution = index.resolve(pattern)
        if resolution.path is not None:
            paths[resolution.path] = None
        else:
            named = {p for p, tag in index.tags.items() if resolution.covers(p, tag)}
            paths.update(dict.fromkeys(p for p in index.tags if p in named))
    candidates = []
    for path in paths:
        if not model.modules or model.modules[path].nodes:
            candidates.append(Candidate(path, False, frozenset(find_nodes(model, path))))
    return candidates
