"""Scope evidence: what the exporter recorded of where each node's operation ran."""

from __future__ import annotations

from collections.abc import Mapping

from modelexport.attribution.evidence import Facts
from modelexport.baseline.trace import Site


def by_scope(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Return the call in which each node's operation ran, for the nodes that the exporter recorded it of."""
    scopes = facts.trace.scopes
    found: dict[int, Site] = {}
    for index, node in enumerate(facts.graph.nodes):
        site = next((scopes[name] for name in node.outputs if name in scopes), None)
        if site is not None and index not in settled:
            found[index] = site
    return found
