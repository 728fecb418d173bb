"""What became of each module: it has nodes, was absorbed by the exporter, or did not run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from modelexport.attribution.evidence import Attribution, Facts


class Status(enum.StrEnum):
    """`nodes`: the module or one below it has nodes.

    `absorbed`: it ran, and neither it nor a module below it has nodes. `unused`: it did not run.
    """

    NODES = "nodes"
    ABSORBED = "absorbed"
    UNUSED = "unused"


def module_status(facts: Facts, attributions: Sequence[Attribution | None]) -> dict[str, Status]:
    """The status of every module; a container that is never called itself goes by what it contains."""
    ran = _with_ancestors(facts, {call.path for call in facts.trace.log.calls} | facts.trace.ran_in_bodies)
    for path in facts.tree:  # what cannot be seen to run goes by the module around it
        if facts.tree[path].opaque and (not path or facts.tree.parent(path) in ran):
            ran.add(path)
    holding = _with_ancestors(facts, {answer.path for answer in attributions if answer is not None})
    status: dict[str, Status] = {}
    for path in facts.tree:
        if path in holding:
            status[path] = Status.NODES
        elif path in ran:
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
