"""What became of each module: it has nodes, was absorbed by the exporter, or did not run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from modelexport.attribution.evidence import Attribution, Facts


class Status(enum.StrEnum):
    """`nodes`: the module or one below it has nodes. `absorbed`: it ran and none is left. `unused`: it did not run."""

    NODES = "nodes"
    ABSORBED = "absorbed"
    UNUSED = "unused"


def module_status(facts: Facts, attributions: Sequence[Attribution | None]) -> dict[str, Status]:
    """The status of every module; a container that is never called itself goes by what it contains."""
    ran = _with_ancestors(facts, {call.path for call in facts.trace.log.calls})
    for path in facts.tree:  # what cannot be seen to run goes by the module around it
        if facts.tree[path].opaque and facts.tree.parent(path) in ran:
            ran.add(path)
    holding = _with_ancestors(facts, {answer.path for answer in attributions if answer is not None})
    bodies = _only_in_bodies(facts, attributions, ran)
    status: dict[str, Status] = {}
    for path in facts.tree:
        if path in holding:
            status[path] = Status.NODES
        elif path in ran or path in bodies:
            status[path] = Status.ABSORBED
        else:
            status[path] = Status.UNUSED
    return status


def node_counts(facts: Facts, attributions: Sequence[Attribution | None]) -> dict[str, int]:
    """How many nodes each module has, those of the modules below it included."""
    counts = dict.fromkeys(facts.tree, 0)
    for answer in attributions:
        if answer is not None:
            counts[answer.path] += 1
    for path in reversed(list(facts.tree)):
        parent = facts.tree.parent(path)
        if parent is not None:
            counts[parent] += counts[path]
    return counts


def _with_ancestors(facts: Facts, paths: set[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for above in facts.tree.lineage(path):
            if above in found:
                break
            found.add(above)
    return found


def _only_in_bodies(facts: Facts, attributions: Sequence[Attribution | None], ran: set[str]) -> set[str]:
    """Modules without weights below one that runs only in a nested body, where no hook can see a call."""
    nodes = facts.graph.nodes
    inside = {a.path for a, node in zip(attributions, nodes, strict=True) if a is not None and node.enclosing >= 0}
    hosts = _with_ancestors(facts, inside) - ran
    weights = facts.tree.subtree_parameters() if hosts else {}
    found: set[str] = set()
    for path in facts.tree:
        parent = facts.tree.parent(path)
        if parent is not None and (parent in hosts or parent in found) and path not in hosts and not weights[path]:
            found.add(path)
    return found
