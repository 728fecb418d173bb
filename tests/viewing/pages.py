"""Read a page as a program would: its data, and what its picture shows."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelexport.graph.flat import Graph

Columns = dict[str, Any]


def read_page(path: Path) -> Columns:
    """Return the data of a page."""
    found = re.search(r'<script id="data" type="text/plain">([A-Za-z0-9+/=]*)<', path.read_text())
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


class PageModel:
    """The model of a page's data, with the columns decoded."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        texts = columns["texts"]
        nodes, modules, boxes = columns["nodes"], columns["modules"], columns["boxes"]
        self.paths: list[str] = []
        for parent, name in zip(modules.get("parent", ()), modules.get("name", ()), strict=True):
            above = self.paths[parent] if parent >= 0 else ""
            self.paths.append(f"{above}.{texts[name]}" if above else texts[name])
        self.ops = [texts[index] for index in nodes["op"]]
        self.node_modules = [
            self.paths[index] if index >= 0 else None for index in sums(nodes["module"])
        ]
        self.node_boxes = sums(nodes["box"])
        self.inputs = split(sums(nodes["inputs"]), nodes["inputCount"])
        self.outputs = split(sums(nodes["outputs"]), nodes["outputCount"])
        self.box_modules = [
            self.paths[index] if index >= 0 else None for index in sums(boxes["module"])
        ]
        self.count = len(boxes["node"])
        parents = sums(boxes["parent"])
        self.parent = [
            self.count + node if node >= 0 else parent
            for node, parent in zip(boxes["node"], parents, strict=True)
        ] + self.node_boxes
        self.values = self._value_names()

    def _value_names(self) -> list[str]:
        values, names = self.columns["values"], self.columns["nodes"]["name"]
        producer = {value: node for node, each in enumerate(self.outputs) for value in each}
        return [
            names[producer[index]] + name if begins else name
            for index, (name, begins) in enumerate(
                zip(values["name"], values["begins"], strict=True)
            )
        ]

    def around(self, box: int) -> Iterator[int]:
        """Iterate over a box and those around it."""
        while box >= 0:
            yield box
            box = self.parent[box]


def sums(deltas: list[int]) -> list[int]:
    return list(itertools.accumulate(deltas))


def split(items: list[int], counts: list[int]) -> list[list[int]]:
    source = iter(items)
    return [list(itertools.islice(source, count)) for count in counts]


FRAMES = """(() => {
  const p = modelexportPage.inspect().panes[0].picture;
  const frames = [...p.builder.frames].map(([box, frame]) => ({
    box,
    items: frame.inner.content.items.map(i => ({
      key: i.key, kind: i.kind, boxes: i.boxes, subject: i.subject, chips: i.chips })),
    links: frame.inner.content.links,
    entering: frame.inner.content.entering, leaving: frame.inner.content.leaving,
    drawn: frame.inner.links.map(l => ({ values: l.values, from: l.from, to: l.to })) }));
  const shown = new Set(p.drawing.drawn.filter(d => d.open).map(d => d.item.boxes[0]));
  const folded = [];
  for (let n = 0; n < p.model.nodeCount; n++) {
    if (p.builder.contents.isFolded(n)) folded.push(n);
  }
  return { frames: frames.filter(f => shown.has(f.box)), folded };
})()"""


class Picture:
    """What a page has drawn: the items and links of every open box."""

    def __init__(self, model: PageModel, shown: dict[str, Any]) -> None:
        self.model = model
        self.folded = set(shown["folded"])
        self.frames = {frame["box"]: frame for frame in shown["frames"]}
        self.links = {
            box: {value: link for link in frame["links"] for value in link["values"]}
            for box, frame in self.frames.items()
        }
        self.item_of = {
            box: {inner: i for i, item in enumerate(frame["items"]) for inner in item["boxes"]}
            for box, frame in self.frames.items()
        }

    def places(self, box: int) -> list[tuple[int, int]]:
        """Return the open boxes around a box, innermost first, with the item that holds it."""
        result = []
        chain = list(self.model.around(box))
        for inner, outer in itertools.pairwise(chain):
            if outer in self.frames:
                result.append((outer, self.item_of[outer].get(inner, -1)))
        return result

    def check_nodes(self, graph: Graph) -> None:
        """Check that every node is drawn once: in one item, or as a constant in its consumers."""
        for node in range(len(graph.nodes)):
            places = self.places(self.model.count + node)
            innermost = places[0]
            if node in self.folded and innermost[1] < 0:
                box = self.frames[innermost[0]]
                readers = self._readers(node)
                chips = [item["chips"] for item in box["items"] if set(item["boxes"]) & readers]
                assert chips, graph.nodes[node]
                assert all(chips), graph.nodes[node]
            else:
                assert all(item >= 0 for _, item in places), graph.nodes[node]
        for frame in self.frames.values():
            boxes = [box for item in frame["items"] for box in item["boxes"]]
            assert len(boxes) == len(set(boxes))

    def _readers(self, node: int) -> set[int]:
        model = self.model
        values = set(model.outputs[node])
        return {model.count + n for n, inputs in enumerate(model.inputs) if values & set(inputs)}

    def check_edges(self) -> int:
        """Check that every edge is drawn, through all borders, and that nothing else is."""
        model = self.model
        producer = {value: node for node, each in enumerate(model.outputs) for value in each}
        wanted: dict[tuple[int, int], set[int]] = {}
        edges = 0
        for node, inputs in enumerate(model.inputs):
            for value in set(inputs):
                source = producer.get(value)
                if source is None:
                    places = self._input_places(value)
                else:
                    places = [] if self._is_line(source) else self.places(model.count + source)
                if places:
                    self._follow(value, places, model.count + node, wanted)
                    edges += 1
        for graph in model.columns["graphs"]:
            for value in graph["outputs"]:
                source = producer.get(value)
                if source is not None and graph["box"] in self.frames:
                    self._follow_output(value, source, graph["box"], wanted)
                    edges += 1
        self._check_nothing_else(wanted)
        return edges

    def _input_places(self, value: int) -> list[tuple[int, int]]:
        """Return where an input of a graph is drawn, if it is one and its graph is open."""
        for graph in self.model.columns["graphs"]:
            if value in graph["inputs"] and graph["box"] in self.frames:
                items = self.frames[graph["box"]]["items"]
                pill = next(
                    i
                    for i, item in enumerate(items)
                    if item["kind"] == "input" and item["subject"] == value
                )
                return [(graph["box"], pill), *self.places(graph["box"])]
        return []

    def _is_line(self, node: int) -> bool:
        """Return whether a node is drawn as a line in the boxes that read it."""
        return node in self.folded and self.model.node_boxes[node] in self.frames

    def _follow(
        self,
        value: int,
        above: list[tuple[int, int]],
        target: int,
        wanted: dict[tuple[int, int], set[int]],
    ) -> None:
        below = dict(self.places(target))
        for box, item in above:
            if box not in below:
                link = self.links[box][value]
                assert link["from"] == item
                assert link["leaves"]
                wanted.setdefault((box, value), set()).add(-1)
                continue
            if below[box] != item:
                assert self.links[box][value]["from"] == item
                assert below[box] in self.links[box][value]["to"]
                wanted.setdefault((box, value), set()).add(below[box])
            break
        for box, item in below.items():
            if box in dict(above):
                break
            assert self.links[box][value]["from"] == -1
            assert item in self.links[box][value]["to"]
            wanted.setdefault((box, value), set()).add(item)

    def _follow_output(
        self, value: int, source: int, graph: int, wanted: dict[tuple[int, int], set[int]]
    ) -> None:
        for box, item in self.places(self.model.count + source):
            link = self.links[box][value]
            assert link["from"] == item
            if box == graph:
                ends = [self.frames[box]["items"][i] for i in link["to"]]
                assert any(e["kind"] == "output" and e["subject"] == value for e in ends)
                return
            assert link["leaves"]
            wanted.setdefault((box, value), set()).add(-1)

    def _check_nothing_else(self, wanted: dict[tuple[int, int], set[int]]) -> None:
        for box, links in self.links.items():
            items = self.frames[box]["items"]
            for value, link in links.items():
                for end in link["to"]:
                    is_output = items[end]["kind"] == "output"
                    nested = items[end]["kind"] == "subgraph" or self._has_graph(items[end])
                    assert is_output or nested or end in wanted.get((box, value), set())
            drawn = {v for link in self.frames[box]["drawn"] for v in link["values"]}
            assert drawn == {v for v, link in links.items() if link["to"] or link["leaves"]}

    def _has_graph(self, item: dict[str, Any]) -> bool:
        """Return whether a nested graph in the item may return a value from outside of it."""
        boxes = {graph["box"] for graph in self.model.columns["graphs"]} - {0}
        return any(set(self.model.around(box)) & set(item["boxes"]) for box in boxes)
