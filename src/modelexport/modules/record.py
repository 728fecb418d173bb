"""The record of one module and the tag of one node, as the map holds them."""

from __future__ import annotations

import enum

import msgspec


class ModuleRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    """One module, shown or hidden."""

    tag: str | None
    """Null for a hidden module."""
    class_: str
    """The qualified class; `class` in JSON."""
    shown: bool
    """Whether it has a tag of its own."""
    status: str
    """`nodes`, `absorbed` or `unused`."""
    calls: int
    """How often it ran."""
    execution_order: int | None
    """The number of its first call; null if it did not run."""
    forward_args: tuple[str, ...]
    """The names of the arguments of `forward`."""
    parameters: tuple[str, ...]
    """The names of all weights in it, from its own path on."""
    direct_parameters: tuple[str, ...]
    """The names of the weights that it holds itself."""
    children: tuple[str, ...]
    """The names of the modules in it."""
    aliases: tuple[str, ...]
    """Other paths of the same object."""
    nodes: int
    """How many nodes it has, with those of the modules below it."""
    results: tuple[tuple[str | None, ...], ...] = ()
    """For each call the tensors and numbers it returned, by their names in the file; null for what is not there."""
    called_in: tuple[int, ...] = ()
    """For each call the call of the module above it that it was part of, -1 for none; empty if that ran only once."""
    parameter_count: int | msgspec.UnsetType = msgspec.UNSET
    """The elements of its parameters in PyTorch and of those below it, each parameter object once."""
    more_aliases: int | msgspec.UnsetType = msgspec.UNSET
    """How many further names it has; only there if `aliases` is cut, as it is for modules shared at many levels."""


class ModuleStatus(enum.StrEnum):
    """`nodes`: the module or one below it has nodes.

    `absorbed`: it ran, and neither it nor a module below it has nodes. `unused`: it did not run.
    """

    NODES = "nodes"
    ABSORBED = "absorbed"
    UNUSED = "unused"


class Method(enum.StrEnum):
    """Why a node has its tag, as written in `hierarchy_method`."""

    SCOPE = "scope"
    PARAMETER = "parameter"
    DATAFLOW = "dataflow"
    ROOT = "root"


AUXILIARY = frozenset({Method.DATAFLOW.value, Method.ROOT.value})
"""Nodes found by these methods have no evidence of their own."""


class NodeTag(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a node's doc_string says."""

    hierarchy_tags: tuple[str, ...]
    """The node's own tag first, then, sorted, the tags of other modules that read its outputs."""
    hierarchy_path: str
    """The node's tag: that of its module, or of the nearest shown module above it."""
    hierarchy_count: int
    """The number of `hierarchy_tags`."""
    hierarchy_method: str
    """The evidence: `scope`, `parameter`, `dataflow`, `root`, or a plugin's own word."""
    hierarchy_module: str
    """The exact path of its module, shown or hidden; the root is empty."""
    hierarchy_call: int | None = None
    """Which call of the module, from 0, where it ran more than once."""
    hierarchy_covers: tuple[str, ...] = ()
    """The paths of all modules whose operations are in the node, sorted, where they are several."""
    doc: str | None = None
    """A doc_string that the node had before."""
