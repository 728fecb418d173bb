"""The record of one module and the tag of one node, as the map holds them."""

from __future__ import annotations

import enum

import msgspec


class ModuleRecord(msgspec.Struct, frozen=True, gc=False, rename={"class_": "class"}):
    """One module, shown or hidden."""

    tag: str | None
    """Its tag; null for a hidden module."""
    class_: str
    """The qualified class; `class` in JSON."""
    shown: bool
    """Whether it has a tag of its own."""
    status: str
    """`nodes`, `absorbed` or `unused`."""
    calls: int
    """How many times it ran."""
    execution_order: int | None
    """The rank of its first call among those of all modules; null if it did not run."""
    forward_args: tuple[str, ...]
    """The names of the arguments of `forward`."""
    parameters: tuple[str, ...]
    """The names of its parameters and of those below it, relative to its path."""
    direct_parameters: tuple[str, ...]
    """The names of its own parameters."""
    children: tuple[str, ...]
    """The names of its children."""
    aliases: tuple[str, ...]
    """Other paths of the same object."""
    nodes: int
    """The number of its nodes, those of the modules below it included."""
    results: tuple[tuple[str | None, ...], ...] = ()
    """For each call the names of the values it returned; null for one that is not in the file."""
    called_in: tuple[int, ...] = ()
    """For each call the enclosing call of its parent, -1 for none; empty if the parent ran once."""
    parameter_count: int | msgspec.UnsetType = msgspec.UNSET
    """The elements of its parameters and of those below it, each parameter object once."""
    flops: int | msgspec.UnsetType = msgspec.UNSET
    """The floating-point operations of its calls in one run, with those of the modules below it, as
    torch counts them; absent without `--flops`."""
    more_aliases: int | msgspec.UnsetType = msgspec.UNSET
    """How many aliases are not listed; absent where all are.

    The list is cut for modules that are shared at many levels."""


class ModuleStatus(enum.StrEnum):
    """What became of a module in the export.

    `nodes`: it or a module below it has nodes. `absorbed`: it ran, and neither it nor a module
    below it has nodes. `unused`: it did not run.
    """

    NODES = "nodes"
    ABSORBED = "absorbed"
    UNUSED = "unused"


class Method(enum.StrEnum):
    """The evidence for a node's module, as written in `hierarchy_method`."""

    SCOPE = "scope"
    PARAMETER = "parameter"
    DATAFLOW = "dataflow"
    ROOT = "root"
    VALUE = "value"
    FUSION = "fusion"


AUXILIARY = frozenset({Method.DATAFLOW.value, Method.ROOT.value})
"""The methods of nodes that have no evidence of their own."""


class Attribution(msgspec.Struct, frozen=True, gc=False):
    """The answer for one node: the exact module, which of its calls, and why."""

    path: str
    call: int | None
    method: str
    covers: tuple[str, ...] = ()
    """The modules whose operations the node implements, sorted, if they are several."""


class NodeTag(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The tag of a node, as its doc_string holds it."""

    hierarchy_tags: tuple[str, ...]
    """The node's own tag first, then, sorted, those of other modules that consume its outputs."""
    hierarchy_path: str
    """The node's tag: that of its module, or of the nearest shown module above it."""
    hierarchy_count: int
    """The number of `hierarchy_tags`."""
    hierarchy_method: str
    """The evidence: `scope`, `parameter`, `dataflow`, `root`, that of a plugin; after `retag` also
    `value` and `fusion`."""
    hierarchy_module: str
    """The exact path of its module, shown or hidden; the root is empty."""
    hierarchy_call: int | None = None
    """Which call of the module, from 0, where it ran more than once."""
    hierarchy_covers: tuple[str, ...] = ()
    """The paths of the modules whose operations the node implements, sorted, if several."""
    doc: str | None = None
    """A doc_string that the node had before."""
    kept: bool = False
    """Whether the node had this very tag before it was retagged, so that `strip` leaves it."""
