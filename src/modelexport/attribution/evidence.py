"""Evidence: the ways to find the module of a node."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping

import msgspec

from modelexport.capture.trace import Site, Trace
from modelexport.graph.flat import Graph
from modelexport.modules.tree import ModuleTree, is_within

# Nodes are identified by their index in the graph throughout this file, and a node is settled once
# some evidence has found its module.


class Facts(msgspec.Struct, frozen=True):
    """Everything that evidence may be drawn from."""

    graph: Graph
    tree: ModuleTree
    trace: Trace


Finder = Callable[[Facts, Mapping[int, Site]], Mapping[int, Site]]
"""Given the facts and the sites of the settled nodes, return the sites of others.

The functions called `by_…` are of this kind.
"""


class Evidence(msgspec.Struct, frozen=True):
    """One step of a strategy's chain: the name recorded for its answers, and how it finds them."""

    method: str
    """The `hierarchy_method` of the nodes that it settles."""
    find: Finder
    """Gets the facts and the sites of the settled nodes by index; returns the sites of others."""


def by_scope(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Find the call in which each node's operation ran, where the exporter recorded it."""
    return {
        index: site
        for index in range(len(facts.graph.nodes))
        if index not in settled and (site := _recorded_site(facts, index)) is not None
    }


def _recorded_site(facts: Facts, index: int) -> Site | None:
    scopes = facts.trace.scopes
    return next((scopes[name] for name in facts.graph.nodes[index].outputs if name in scopes), None)


def by_parameter(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Find the module whose parameter a node consumes beside a computed value.

    Exporters merge equal initializers, so an initializer may have the name of another module's
    parameter. The modules whose parameters of this shape are not in the file are candidates too,
    and the one nearest to the neighbours of the node is taken; where that does not decide, there
    is no answer. A node that consumes initializers only prepares them for others, and is no
    evidence of who needs them.
    """
    owners = _agreed_owners(facts, settled)
    only_calls = facts.trace.log.only_calls()
    sites: dict[int, Site] = {}
    for index, path in owners.items():
        recorded = _recorded_site(facts, index)
        if recorded is not None and recorded.path == path:
            sites[index] = recorded
        # A recorded scope that is neither around nor inside the owner contradicts the name.
        elif recorded is None or is_within(path, recorded.path) or is_within(recorded.path, path):
            sites[index] = Site(path, only_calls.get(path, -1))
    return sites


def by_parameter_in_use(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Find the module as `by_parameter` does, if it ran.

    A module whose parameter another module consumes itself has no nodes.
    """
    ran = {call.path for call in facts.trace.log.calls}
    return {index: site for index, site in by_parameter(facts, settled).items() if site.path in ran}


def _agreed_owners(facts: Facts, settled: Mapping[int, Site]) -> dict[int, str]:
    """Return the one module that owns the initializers of each node, where it can be decided."""
    candidates = _owner_candidates(facts, settled)
    owners: dict[int, str] = {}
    for index, choices in candidates.items():
        common = set.intersection(*choices)
        if len(common) == 1:
            owners[index] = common.pop()
    known = ChainMap({index: Site(path) for index, path in owners.items()}, dict(settled))
    for index, choices in candidates.items():
        if index not in owners:
            path = _nearest(facts, index, set.union(*choices), known)
            if path is not None:
                owners[index] = path
                known[index] = Site(path)
    return owners


def _owner_candidates(facts: Facts, settled: Mapping[int, Site]) -> dict[int, list[set[str]]]:
    """Return for each node the modules that may own each of the initializers it consumes."""
    initializers = set(facts.graph.initializers)
    constant = _constant_values(facts, initializers)
    unnamed = _unnamed_owners(facts, initializers)

    def owners_of(name: str) -> set[str]:
        owner = facts.tree.owner(name)
        if owner is None:
            return set()
        shape = facts.tree.tensor_shapes.get(name)
        return {owner} | (unnamed.get(shape, set()) if shape is not None else set())

    candidates: dict[int, list[set[str]]] = {}
    for index, node in enumerate(facts.graph.nodes):
        if index not in settled and any(name not in constant for name in node.inputs):
            choices = [owners_of(name) for name in node.inputs if name in initializers]
            if any(choices):
                candidates[index] = [choice for choice in choices if choice]
    return candidates


def _constant_values(facts: Facts, initializers: set[str]) -> set[str]:
    """Return the values that are computed from initializers only, and these."""
    constant = set(initializers)
    for node in facts.graph.nodes:
        if node.inputs and all(name in constant for name in node.inputs):
            constant.update(node.outputs)
    return constant


def _unnamed_owners(facts: Facts, initializers: set[str]) -> dict[tuple[int, ...], set[str]]:
    """Return by shape the modules with a parameter or buffer that no initializer is named after."""
    unnamed: dict[tuple[int, ...], set[str]] = {}
    for name, shape in facts.tree.tensor_shapes.items():
        owner = facts.tree.owner(name)
        if name not in initializers and owner is not None:
            unnamed.setdefault(shape, set()).add(owner)
    return unnamed


def _nearest(
    facts: Facts, index: int, candidates: set[str], settled: Mapping[int, Site]
) -> str | None:
    """Return the candidate with the deepest ancestor in common with a neighbour; None for a tie."""
    around = [settled[other].path for other in _settled_neighbours(facts, index, settled)]
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


_MAX_VISITED = 64
"""How many nodes to visit in search of settled ones."""


def _settled_neighbours(facts: Facts, index: int, settled: Mapping[int, Site]) -> set[int]:
    """Return the first settled nodes before and after a node, within its own subgraph."""
    enclosing = facts.graph.nodes[index].enclosing
    neighbours: set[int] = set()
    for step in (facts.graph.producers_of, facts.graph.consumers_of):
        pending, seen = list(step(index)), {index}
        while pending and len(seen) < _MAX_VISITED:
            other = pending.pop()
            if other in seen or facts.graph.nodes[other].enclosing != enclosing:
                continue
            seen.add(other)
            if other in settled:
                neighbours.add(other)
            else:
                pending.extend(step(other))
    return neighbours


def by_dataflow(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Find the common ancestor of a node's consumers, else of its producers.

    A node in a subgraph takes the module of the enclosing node, and a node of a local function the
    common ancestor of the nodes that call the function.
    """
    known: dict[int, Site] = dict(settled)
    nodes = facts.graph.nodes
    # Consumers come after a node and producers before it: in these orders one pass each is enough.
    for index in reversed(range(len(nodes))):
        _take_common_site(facts, known, index, facts.graph.consumers_of(index))
    for index in range(len(nodes)):
        _take_common_site(facts, known, index, facts.graph.producers_of(index))
    for index, node in enumerate(nodes):
        if index not in known and node.enclosing in known:
            known[index] = known[node.enclosing]
    _take_callers_site(facts, known)
    return {index: site for index, site in known.items() if index not in settled}


def _take_common_site(
    facts: Facts, known: dict[int, Site], index: int, around: Iterable[int]
) -> None:
    """Give a node without a site the lowest module that contains those of the nodes around it."""
    node = facts.graph.nodes[index]
    if index in known or node.function or node.enclosing >= 0:
        return
    sites = [site for other in around if (site := _site_around(facts, known, other)) is not None]
    if sites:
        known[index] = _common_site(facts, sites)


def _site_around(facts: Facts, known: Mapping[int, Site], index: int) -> Site | None:
    """Return the site of a node, or of the nearest node around it that has one."""
    while index >= 0 and index not in known:
        index = facts.graph.nodes[index].enclosing
    return known.get(index)


def _take_callers_site(facts: Facts, known: dict[int, Site]) -> None:
    """Give the nodes of a function the lowest module that contains those of its calls."""
    callers: dict[str, list[Site]] = {}
    for index, node in enumerate(facts.graph.nodes):
        if node.calls_function and index in known:
            callers.setdefault(node.calls_function, []).append(known[index])
    for index, node in enumerate(facts.graph.nodes):
        if index not in known and node.function in callers:
            known[index] = _common_site(facts, callers[node.function])


def _common_site(facts: Facts, sites: list[Site]) -> Site:
    """Return the lowest module that contains all sites, and its earliest call around them."""
    path = sites[0].path
    for site in sites[1:]:
        path = facts.tree.common_ancestor(path, site.path)
    log = facts.trace.log
    calls = [log.enclosing(site.call, path) for site in sites if site.call >= 0]
    return Site(path, min((call for call in calls if call is not None), default=-1))


def by_agreement(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Find the module of a node's consumers, only where all are settled and have the same one."""
    agreed: dict[int, Site] = {}
    for index in reversed(range(len(facts.graph.nodes))):
        if index in settled:
            continue
        sites = {settled.get(i) or agreed.get(i) for i in facts.graph.consumers_of(index)}
        site = sites.pop() if len(sites) == 1 else None
        if site is not None:
            agreed[index] = site
    return agreed


def by_root(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Give every node that is not settled to the model itself."""
    return {index: Site("") for index in range(len(facts.graph.nodes)) if index not in settled}
