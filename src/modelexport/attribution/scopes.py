"""Scope evidence: what the exporter recorded of where each tensor was made."""

from __future__ import annotations

from collections.abc import Mapping

from modelexport.attribution.evidence import Facts
from modelexport.baseline.trace import Site
from modelexport.hierarchy.calls import CallLog


def by_scope(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The call that made a node's outputs, or, where that was not recorded, the one that returned them."""
    returned_by = _first_to_return(facts)
    found: dict[int, Site] = {}
    for index, node in enumerate(facts.graph.nodes):
        if index in settled:
            continue
        for sources in (facts.trace.scopes, returned_by):
            site = next((sources[name] for name in node.outputs if name in sources), None)
            if site is not None:
                found[index] = site
                break
    return _release_fused(facts, found, returned_by)


def _first_to_return(facts: Facts) -> dict[str, Site]:
    """For each tensor that a module returned, the first call to do so: the innermost one."""
    trace = facts.trace
    first: dict[str, Site] = {}
    for number in trace.log.completion_order():
        for name in trace.returned.get(number, ()):
            if name in facts.graph.producer:
                first.setdefault(name, Site(trace.log.calls[number].path, number))
    return first


def _release_fused(facts: Facts, found: dict[int, Site], returned_by: Mapping[str, Site]) -> dict[int, Site]:
    """Take nodes away from a call whose own result is nowhere in the file.

    An exporter may fuse the last step of one module into another module's node. What is left of
    the first does not compute its output, so it cannot count as that module: it goes to the
    module that returned it, else to the caller. What the modules inside it made stays theirs.
    """
    log = facts.trace.log
    nodes_of: dict[int, list[int]] = {}
    for index, site in found.items():
        nodes_of.setdefault(site.call, []).append(index)
    occupied: set[int] = set()
    for number in reversed(range(len(log.calls))):
        call = log.calls[number]
        own = nodes_of.get(number, [])
        gone = facts.trace.returned.get(number) == ()
        fused = number in facts.trace.returned and not _holds_result(facts, found, number)
        if own and call.parent >= 0 and (gone or (fused and number not in occupied)):
            parent = Site(log.calls[call.parent].path, call.parent)
            for index in own:
                site = next((returned_by[n] for n in facts.graph.nodes[index].outputs if n in returned_by), parent)
                site = parent if site.call == number else site
                found[index] = site
                nodes_of.setdefault(site.call, []).append(index)
                _occupy(occupied, log, site.call)
        elif own:
            _occupy(occupied, log, number)
    return found


def _occupy(occupied: set[int], log: CallLog, number: int) -> None:
    """Every call around this one now has nodes inside it."""
    number = log.calls[number].parent
    while number >= 0 and number not in occupied:
        occupied.add(number)
        number = log.calls[number].parent


def _holds_result(facts: Facts, found: Mapping[int, Site], number: int) -> bool:
    """Whether a value that this call returned is read or written by a node made within it."""
    graph, log = facts.graph, facts.trace.log
    for name in facts.trace.returned[number]:
        touching = list(graph.consumers.get(name, ()))
        if name in graph.producer:
            touching.append(graph.producer[name])
        for index in touching:
            site = found.get(index)
            if site is not None and site.call >= 0 and log.within(site.call, number):
                return True
    return False
