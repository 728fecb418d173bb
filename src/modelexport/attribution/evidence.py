"""Evidence: the ways to find the module of a node."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping

import msgspec

from modelexport.capture.trace import Site, Trace
from modelexport.graph.flat import Graph
from modelexport.modules.tree import ModuleTree, is_within


class Facts(msgspec.Struct, frozen=True):
    """Everything that evidence may be drawn from."""

    graph: Graph
    tree: ModuleTree
    trace: Trace


Finder = Callable[[Facts, Mapping[int, Site]], Mapping[int, Site]]
"""Given the facts and the nodes settled so far, the sites of nodes that are not settled yet."""


class Evidence(msgspec.Struct, frozen=True):
    """One step of a strategy's chain: the name recorded for its answers, and how it finds them."""

    method: str
    """What nodes found by it have as `hierarchy_method`."""
    find: Finder
    """Gets the facts and the nodes settled so far, by their place in the graph; returns the sites of others."""


class Attribution(msgspec.Struct, frozen=True):
    """The answer for one node: the exact module, which of its calls, and why."""

    path: str
    call: int | None
    method: str
    covers: tuple[str, ...] = ()
    """The modules whose operations are in the node, sorted, where they are several."""


def by_scope(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Return the call in which each node's operation ran, for the nodes that the exporter recorded it of."""
    scopes = facts.trace.scopes
    found: dict[int, Site] = {}
    for index, node in enumerate(facts.graph.nodes):
        site = next((scopes[name] for name in node.outputs if name in scopes), None)
        if site is not None and index not in settled:
            found[index] = site
    return found


_REACH = 64
"""How many unsettled nodes to pass in search of a settled one."""


def by_parameter(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The module whose weights a node reads beside an activation.

    Exporters merge equal weights, so the name of a weight may be that of another module's. The
    modules that lost such a weight are candidates too, and the one nearest to the node's
    neighbours is taken; where that does not decide, there is no answer. Nodes that read weights
    alone prepare them for others, and say nothing about who needs them.
    """
    weights = set(facts.graph.initializers)
    derived = _weight_derived(facts, weights)
    lost = _lost_tensors(facts, weights)
    votes: dict[int, list[set[str]]] = {}
    for index, node in enumerate(facts.graph.nodes):
        if index not in settled and any(name not in derived for name in node.inputs):
            candidates = [_candidates(facts, name, lost) for name in node.inputs if name in weights]
            candidates = [choice for choice in candidates if choice]
            if candidates:
                votes[index] = candidates
    found = {index: Site(path) for index, path in _unanimous(votes)}
    known = ChainMap(found, dict(settled))
    for index, candidates in votes.items():
        if index not in found:
            path = _nearest(facts, index, set.union(*candidates), known)
            if path is not None:
                found[index] = Site(path)
    only_call = facts.trace.log.only_calls()
    confirmed: dict[int, Site] = {}
    for index, site in found.items():
        recorded = _recorded(facts, index)
        if recorded is None or recorded.path != site.path:
            recorded = (
                Site(site.path, only_call.get(site.path, -1)) if _agrees(recorded, site) else None
            )
        if recorded is not None:
            confirmed[index] = recorded
    return confirmed


def by_parameter_in_use(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The same, for modules that ran: one whose weights another module reads itself has made nothing."""
    ran = {call.path for call in facts.trace.log.calls}
    return {index: site for index, site in by_parameter(facts, settled).items() if site.path in ran}


def _weight_derived(facts: Facts, weights: set[str]) -> set[str]:
    """Tensors computed from weights alone."""
    derived = set(weights)
    for node in facts.graph.nodes:
        if node.inputs and all(name in derived for name in node.inputs):
            derived.update(node.outputs)
    return derived


def _lost_tensors(facts: Facts, weights: set[str]) -> dict[tuple[int, ...], set[str]]:
    """By shape, the modules with a parameter or buffer that is not in the file under its own name."""
    lost: dict[tuple[int, ...], set[str]] = {}
    for name, shape in facts.tree.tensor_shapes.items():
        owner = facts.tree.owner(name)
        if name not in weights and owner is not None:
            lost.setdefault(shape, set()).add(owner)
    return lost


def _candidates(facts: Facts, weight: str, lost: Mapping[tuple[int, ...], set[str]]) -> set[str]:
    owner = facts.tree.owner(weight)
    if owner is None:
        return set()
    shape = facts.tree.tensor_shapes.get(weight)
    return {owner} | (lost.get(shape, set()) if shape is not None else set())


def _unanimous(votes: Mapping[int, list[set[str]]]) -> Iterable[tuple[int, str]]:
    for index, candidates in votes.items():
        common = set.intersection(*candidates)
        if len(common) == 1:
            yield index, next(iter(common))


def _nearest(
    facts: Facts, index: int, candidates: set[str], settled: Mapping[int, Site]
) -> str | None:
    """The one candidate that shares the deepest ancestor with the settled nodes around; None if two do."""
    around = [settled[other].path for other in _settled_around(facts, index, settled)]
    if not around:
        return None
    tree = facts.tree
    ranked = sorted(
        (
            (max(len(tree.lineage(tree.common_ancestor(path, other))) for other in around), path)
            for path in candidates
        ),
        reverse=True,
    )
    if len(ranked) > 1 and ranked[0][0] == ranked[1][0]:
        return None
    return ranked[0][1]


def _settled_around(facts: Facts, index: int, settled: Mapping[int, Site]) -> set[int]:
    """The first settled nodes met on the ways out of a node, within its own body."""
    body = facts.graph.nodes[index].enclosing
    met: set[int] = set()
    for step in (facts.graph.writers, facts.graph.readers):
        pending, seen = list(step(index)), {index}
        while pending and len(seen) < _REACH:
            other = pending.pop()
            if other in seen or facts.graph.nodes[other].enclosing != body:
                continue
            seen.add(other)
            if other in settled:
                met.add(other)
            else:
                pending.extend(step(other))
    return met


def _recorded(facts: Facts, index: int) -> Site | None:
    scopes = facts.trace.scopes
    return next((scopes[name] for name in facts.graph.nodes[index].outputs if name in scopes), None)


def _agrees(recorded: Site | None, site: Site) -> bool:
    """A recorded scope outside the module's own line speaks against the weight's name."""
    return (
        recorded is None
        or is_within(site.path, recorded.path)
        or is_within(recorded.path, site.path)
    )


def by_dataflow(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The common ancestor of a node's readers, else of its writers; in a body, the enclosing node's module."""
    known: dict[int, Site] = dict(settled)
    nodes = facts.graph.nodes
    for index in reversed(range(len(nodes))):
        _settle(facts, known, index, facts.graph.readers(index))
    for index in range(len(nodes)):
        _settle(facts, known, index, facts.graph.writers(index))
    for index, node in enumerate(nodes):
        if index not in known and node.enclosing in known:
            known[index] = known[node.enclosing]
    _fill_functions(facts, known)
    return {index: site for index, site in known.items() if index not in settled}


def by_agreement(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The module of a node's readers, only where all of them are settled and are the same."""
    found: dict[int, Site] = {}
    for index in reversed(range(len(facts.graph.nodes))):
        if index in settled:
            continue
        readers = [settled.get(i) or found.get(i) for i in facts.graph.readers(index)]
        sites = {site for site in readers if site is not None}
        if len(sites) == 1 and None not in readers:
            found[index] = sites.pop()
    return found


def by_root(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The whole model, for what nothing else explains."""
    return {index: Site("") for index in range(len(facts.graph.nodes)) if index not in settled}


def _settle(facts: Facts, known: dict[int, Site], index: int, around: Iterable[int]) -> None:
    node = facts.graph.nodes[index]
    if index in known or node.function or node.enclosing >= 0:
        return
    sites = [site for other in around if (site := _site_around(facts, known, other)) is not None]
    if sites:
        known[index] = meet(facts, sites)


def _site_around(facts: Facts, known: Mapping[int, Site], index: int) -> Site | None:
    """Return the site of a node, or of the nearest node around it that has one."""
    while index >= 0 and index not in known:
        index = facts.graph.nodes[index].enclosing
    return known.get(index)


def _fill_functions(facts: Facts, known: dict[int, Site]) -> None:
    """The nodes of a local function serve all who call it."""
    callers: dict[str, list[Site]] = {}
    for index, node in enumerate(facts.graph.nodes):
        if node.calls_function and index in known:
            callers.setdefault(node.calls_function, []).append(known[index])
    for index, node in enumerate(facts.graph.nodes):
        if index not in known and node.function in callers:
            known[index] = meet(facts, callers[node.function])


def meet(facts: Facts, sites: list[Site]) -> Site:
    """The lowest module that contains all sites, and the earliest of its calls that they lie in."""
    path = sites[0].path
    for site in sites[1:]:
        path = facts.tree.common_ancestor(path, site.path)
    log = facts.trace.log
    calls = [log.enclosing(site.call, path) for site in sites if site.call >= 0]
    numbers = [number for number in calls if number is not None]
    return Site(path, min(numbers, default=-1))
