"""Dataflow evidence: a node with none of its own serves those around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelexport.attribution.evidence import Facts
from modelexport.baseline.trace import Site


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
    sites = [known[other] for other in around if other in known]
    if sites:
        known[index] = meet(facts, sites)


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
