"""A strategy that maps each node to the module whose initializers it depends on.

A node that consumes initializers belongs to the module that made it. Any other node belongs to the
last module with initializers before it. An activation then belongs to the layer in front of it,
which is what quantizers fuse.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelexport import ROOT, SCOPE, Evidence, Facts, Site, Strategy


def find_by_weights(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Return what the exporter recorded, for nodes that consume an initializer."""
    initializers = set(facts.graph.initializers)
    nodes = facts.graph.nodes
    return {
        index: site
        for index, site in SCOPE.find(facts, settled).items()
        if initializers.intersection(nodes[index].inputs)
    }


def find_upstream(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """Return the module of the last producer of each node's inputs.

    The nodes of a file are sorted topologically, so that one pass settles them all.
    """
    known = dict(settled)
    for index in range(len(facts.graph.nodes)):
        producers = [node for node in facts.graph.producers_of(index) if node in known]
        if index not in known and producers:
            known[index] = known[max(producers)]
    return {index: site for index, site in known.items() if index not in settled}


WEIGHTS = Strategy(
    name="weights",
    exporter="dynamo",
    chain=(Evidence("weights", find_by_weights), Evidence("upstream", find_upstream), ROOT),
    description="map every node to the module whose initializers it depends on",
)
