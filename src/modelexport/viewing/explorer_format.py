"""The JSON formats of Model Explorer: graphs, and data for their nodes.

The field names in JSON are those of `model_explorer.graph_builder` and `node_data_builder`.
"""

from __future__ import annotations

import re

import msgspec

_NOT_ON_CANVAS = re.compile(r"[^\x20-\x7e]|%")
_BREAKS_A_NAMESPACE = re.compile(r"[^\x20-\x7e]|[%/\\;]")
_BREAKS_A_NAME = re.compile(r"[^\x20-\x7e]|[%/\\;:]")
_LONGEST_LABEL = 60
_LONGEST_TEXT = 1000


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A line of the side panel."""

    key: str
    value: str


class MetadataItem(msgspec.Struct, frozen=True, gc=False):
    """The description of one input or output of a node."""

    id: str
    attrs: list[KeyValue]


class IncomingEdge(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An edge into a node."""

    source_node_id: str
    source_node_output_id: str
    target_node_input_id: str


class NodeStyle(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The colours of a node."""

    background_color: str
    border_color: str


class GraphNode(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """A box: an operator, or an input, initializer or output of a graph."""

    id: str
    """Unique in the whole file."""
    label: str
    namespace: str
    """The groups around it, separated by slashes."""
    subgraph_ids: list[str] = []
    attrs: list[KeyValue] = []
    incoming_edges: list[IncomingEdge] = []
    inputs_metadata: list[MetadataItem] = []
    outputs_metadata: list[MetadataItem] = []
    style: NodeStyle | None = None


class ExplorerGraph(msgspec.Struct, frozen=True, rename="camel"):
    """A graph: the main one, that of a subgraph, or that of a local function."""

    id: str
    nodes: list[GraphNode]
    group_node_attributes: dict[str, dict[str, str]]
    """The lines of the side panel for a group, by its namespace; for the graph by ``."""


class GraphCollection(msgspec.Struct, frozen=True):
    """The graphs of a model, as a file that Model Explorer opens."""

    label: str
    graphs: list[ExplorerGraph]


class NodeValue(msgspec.Struct, frozen=True, gc=False):
    """The value of one node."""

    value: float


class GradientStop(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A colour between the least value, at 0, and the greatest, at 1."""

    stop: float
    bg_color: str


class GraphNodeData(msgspec.Struct, frozen=True):
    """Values for the nodes of one graph, by their ids."""

    name: str
    results: dict[str, NodeValue]
    gradient: tuple[GradientStop, ...]


def canvas_text(text: str) -> str:
    """Return a label for the canvas, which has glyphs for printable ASCII only.

    Other characters are percent-encoded, and a long text is cut at its beginning.
    """
    encoded = _NOT_ON_CANVAS.sub(_percent, text)
    if len(encoded) > _LONGEST_LABEL:
        encoded = f"...{encoded[3 - _LONGEST_LABEL :]}"
    return encoded or "(no name)"


def group_text(name: str, class_name: str) -> str:
    """Return the label of a group, which is one segment of a namespace: `name: Class`.

    Model Explorer gives a meaning to slashes, backslashes and semicolons in a namespace. They are
    percent-encoded, so that different names have different labels.

    Args:
        name: The name of a module below the group around it; empty for the root.
        class_name: Its class; empty if it is not known.
    """
    parts = _BREAKS_A_NAME.sub(_percent, name), _BREAKS_A_NAMESPACE.sub(_percent, class_name)
    return ": ".join(filter(None, parts))


def panel_text(text: str) -> str:
    """Return a text for the side panel, cut if it is long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))
