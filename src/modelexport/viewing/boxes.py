"""The boxes of a picture: the calls of modules, subgraphs and local functions, nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from modelexport.graph.flat import Graph
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import ModuleRecord, NodeTag

ROOT = 0
"""The box of the model itself, which holds the main graph."""


class Box(msgspec.Struct, frozen=True, gc=False):
    """A box that holds nodes and other boxes."""

    parent: int
    """The box around it; -1 for the root."""
    module: str | None
    """The path of the module that it shows or lies in; None in a file without a map."""
    call: int | None = None
    """Which call of the module, where it ran more than once and its calls are known."""
    kind: str = "module"
    """`module`, `subgraph` or `function`."""
    node: int = -1
    """The node that has the subgraph, or calls the function; -1 for the box of a module."""
    label: str = ""
    """The label of the subgraph, or the key of the function."""


class Boxes:
    """The boxes of a model, and the box of every node.

    A module that ran several times has a box for each call. A module that never ran, such as a
    `ModuleList`, has none: it is part of the names of its children. In a subgraph, only modules
    below the module around it have boxes. The nodes of a local function are in a box of the first
    node that calls it.

    Args:
        graph: The nodes of the model.
        tags: The tag of each.
        records: The module records.

    Attributes:
        boxes: All boxes, a box after the one around it.
        of_node: The index of each node's box.
    """

    def __init__(
        self,
        graph: Graph,
        tags: Sequence[NodeTag | None],
        records: Mapping[str, ModuleRecord],
    ) -> None:
        self.boxes: list[Box] = [Box(-1, "" if any(tags) else None)]
        self.of_node: list[int] = []
        self._index = ModuleIndex(records, tags)
        self._records = records
        self._owners = {tag.hierarchy_module for tag in tags if tag is not None}
        self._known: dict[tuple[int, str, int | None], int] = {}
        self._nested: dict[tuple[int, int], int] = {}
        self._callers: dict[str, int] = {}
        self._function_boxes: dict[str, int] = {}
        for index, (node, tag) in enumerate(zip(graph.nodes, tags, strict=True)):
            base = ROOT
            if node.enclosing >= 0:
                base = self._nested[node.enclosing, node.subgraph_number]
            elif node.function:
                base = self._function_box(node.function)
            box = base if tag is None else self._box(base, tag)
            self.of_node.append(box)
            self._callers.setdefault(node.calls_function, index)
            module = self.boxes[box].module if tag is None else tag.hierarchy_module
            for number, subgraph in enumerate(graph.subgraphs.get(index, ())):
                call = None if tag is None else tag.hierarchy_call
                self._nested[index, number] = self._add(
                    Box(box, module, call, "subgraph", index, subgraph.label)
                )

    def _add(self, box: Box) -> int:
        self.boxes.append(box)
        return len(self.boxes) - 1

    def _function_box(self, key: str) -> int:
        """Return the box of a local function, which lies in that of the first call."""
        known = self._function_boxes.get(key)
        if known is None:
            caller = self._callers.get(key, -1)
            around = self.of_node[caller] if caller >= 0 else ROOT
            box = Box(around, self.boxes[around].module, None, "function", caller, key)
            known = self._function_boxes[key] = self._add(box)
        return known

    def _box(self, base: int, tag: NodeTag) -> int:
        """Return the box of a node's module inside the graph that the node is in."""
        path, call = tag.hierarchy_module, tag.hierarchy_call
        around = self.boxes[base].module
        if path == around or (around and not path.startswith(f"{around}.")):
            return base
        known = self._known.get((base, path, call))
        if known is not None:
            return known
        box = base
        for outer in self._steps(path, around or ""):
            number = call if outer == path else self._index.call_within(path, call, outer)
            record = self._records.get(outer)
            number = number if record is not None and record.calls > 1 else None
            inner = self._known.get((box, outer, number))
            if inner is None:
                inner = self._known[box, outer, number] = self._add(Box(box, outer, number))
            box = inner
        self._known[base, path, call] = box
        return box

    def _steps(self, path: str, around: str) -> list[str]:
        """List the modules between two that have boxes, from the outside in, with the last."""
        names = path[len(around) + 1 :].split(".") if around else path.split(".")
        steps = []
        for end in range(1, len(names) + 1):
            step = ".".join((*((around,) if around else ()), *names[:end]))
            record = self._records.get(step)
            if step == path or step in self._owners or record is None or record.calls:
                steps.append(step)
        return steps
