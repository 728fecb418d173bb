"""Overlays as Model Explorer's node data: values of modules, given to their nodes.

Model Explorer has values for nodes only, and sums them up for the group of a module. A node takes
part in the value of the innermost module around it that has one:

- `max`: each node has the value of that module, so that the maximum of a group is the module's.
- `sum`: the nodes of a module have equal shares of its value, so that the sum of a group is the
  value of the module with those below it. The share of a single node is an average, not a
  measurement, and the name of the data says so.

The value of every module with those below it is in the side panel of its group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from modelexport.modules.tree import Ancestry
from modelexport.viewing.explorer_format import GradientStop, GraphNodeData, NodeValue
from modelexport.viewing.overlays import Overlay

_GRADIENT = (
    GradientStop(0, "#fff8e6"),
    GradientStop(0.5, "#f6a15b"),
    GradientStop(1, "#c2281d"),
)


class ModuleValues:
    """The lines of the side panel with the values that overlays have for a module."""

    def __init__(self, overlays: Sequence[Overlay] = ()) -> None:
        self._values = [(overlay, overlay.with_submodules()) for overlay in overlays]

    def of(self, path: str) -> dict[str, str]:
        """Return a line for each overlay that has a value for a module."""
        return {
            overlay.name: f"{values[path]:.6g} {overlay.unit}".rstrip()
            for overlay, values in self._values
            if path in values
        }


def node_data(
    module_of: Mapping[str, Mapping[str, str]], lineage: Ancestry, overlay: Overlay
) -> dict[str, GraphNodeData]:
    """Give the values of modules to their nodes.

    Args:
        module_of: The module path of each node by its id, for each graph by its id.
        lineage: The ancestors of modules.
        overlay: The values.

    Returns:
        The data of each graph by its id.
    """
    finite = {path: value for path, value in overlay.values.items() if math.isfinite(value)}
    paths = {path for nodes in module_of.values() for path in nodes.values()}
    nearest = {path: _nearest(lineage.of(path), finite) for path in paths}
    counts = Counter(nearest[path] for nodes in module_of.values() for path in nodes.values())
    name = f"{overlay.name} {overlay.unit}".rstrip()
    values = finite
    if overlay.aggregate == "sum":
        name += ", evenly within a module"
        values = {path: value / counts[path] for path, value in finite.items() if counts[path]}
    return {
        graph: GraphNodeData(
            name,
            {
                node: NodeValue(values[owner])
                for node, path in nodes.items()
                if (owner := nearest[path]) is not None
            },
            _GRADIENT,
        )
        for graph, nodes in module_of.items()
    }


def _nearest(lineage: Sequence[str], values: Mapping[str, float]) -> str | None:
    """Return the innermost module of a lineage, which starts at the root, that has a value."""
    return next((path for path in reversed(lineage) if path in values), None)
