"""What evidence is: a named way to say which module made a node, and the facts it may use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import msgspec

from modelexport.baseline.trace import Site, Trace
from modelexport.graph import Graph
from modelexport.hierarchy.tree import ModuleTree


class Method(enum.StrEnum):
    """Why a node has its tag, as written in `hierarchy_method`."""

    SCOPE = "scope"
    PARAMETER = "parameter"
    DATAFLOW = "dataflow"
    ROOT = "root"


AUXILIARY = frozenset({Method.DATAFLOW.value, Method.ROOT.value})
"""Nodes found by these methods have no evidence of their own."""


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
