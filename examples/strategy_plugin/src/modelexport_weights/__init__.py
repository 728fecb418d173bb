"""A strategy that follows the weights: which module has to be in memory for a node to run?

A node that reads weights or constants belongs to the module that made it. A node that reads none belongs where its
values come from: to the last module with weights before it. An activation is then counted to the layer in front of it,
which is what quantizers fuse, and where a model is cut that does not fit into one memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelexport import Strategy
from modelexport.attribution.evidence import Evidence, Facts, by_scope
from modelexport.attribution.strategies import ROOT
from modelexport.capture.trace import Site


def by_weights(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """What the exporter recorded, for nodes that read an initializer."""
    held = set(facts.graph.initializers)
    nodes = facts.graph.nodes
    return {
        index: site
        for index, site in by_scope(facts, settled).items()
        if held.intersection(nodes[index].inputs)
    }


def by_upstream(facts: Facts, settled: Mapping[int, Site]) -> dict[int, Site]:
    """The module of the last of the nodes that a node reads from; a file has its nodes in an order that runs."""
    known = dict(settled)
    for index in range(len(facts.graph.nodes)):
        before = [writer for writer in facts.graph.writers(index) if writer in known]
        if index not in known and before:
            known[index] = known[max(before)]
    return {index: site for index, site in known.items() if index not in settled}


WEIGHTS = Strategy(
    name="weights",
    exporter="dynamo",
    chain=(Evidence("weights", by_weights), Evidence("upstream", by_upstream), ROOT),
    description="every node goes to the module whose weights it needs",
)
