"""A GraphML file as an ordinary reader sees it, and as an editor changes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lxml import etree

G = "{http://graphml.graphdrawing.org/xmlns}"
Y = "{http://www.yworks.com/xml/graphml}"
Element = etree._Element
Box = tuple[float, float, float, float]


class Drawing:
    """The parsed file: nodes by their ids, and by their texts under the `attr.name` keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = etree.parse(path)
        self.root = self.tree.getroot()
        self.names = {
            key.get("id"): (key.get("for"), key.get("attr.name"))
            for key in self.root.findall(f"{G}key")
        }
        self.nodes = {node.get("id"): node for node in self.root.iter(f"{G}node")}
        self.edges = list(self.root.iter(f"{G}edge"))

    def texts(self, element: Element) -> dict[str, str]:
        """Return the texts of a node or edge under our keys."""
        return {
            self.names[data.get("key")][1]: data.text or ""
            for data in element.findall(f"{G}data")
            if self.names[data.get("key")][1]
        }

    def kind(self, element: Element) -> str:
        return self.texts(element).get("kind", "")

    def of_kind(self, kind: str) -> list[Element]:
        return [node for node in self.nodes.values() if self.kind(node) == kind]

    def find(self, **wanted: str) -> Element:
        """Return the one node with all these texts."""
        found = [n for n in self.nodes.values() if wanted.items() <= self.texts(n).items()]
        assert len(found) == 1, f"{len(found)} nodes have {wanted}"
        return found[0]

    def parent(self, node: Element) -> Element | None:
        above = node.getparent().getparent()
        return above if above.tag == f"{G}node" else None

    def set(self, element: Element, name: str, text: str | None) -> None:
        """Set the text under a key, or remove it."""
        scope = "edge" if element.tag == f"{G}edge" else "node"
        key = next(identity for identity, found in self.names.items() if found == (scope, name))
        for data in element.findall(f"{G}data"):
            if data.get("key") == key:
                element.remove(data)
        if text is not None:
            data = etree.Element(f"{G}data", key=key)
            data.text = text
            element.insert(0, data)

    def into(self, node: Element) -> list[Element]:
        """Return the edges that lead into a node, by input."""
        found = [edge for edge in self.edges if edge.get("target") == node.get("id")]
        return sorted(found, key=lambda edge: int(self.texts(edge).get("target_input", 99)))

    def remove(self, *elements: Element) -> None:
        """Remove elements as an editor does: a node takes its edges along."""
        for element in elements:
            if element.tag == f"{G}node":
                inside = {inner.get("id") for inner in element.iter(f"{G}node")}
                gone = [e for e in self.edges if inside & {e.get("source"), e.get("target")}]
                self.remove(*gone)
            element.getparent().remove(element)
        self.edges = list(self.root.iter(f"{G}edge"))

    def add_edge(self, source: Element, target: Element, **texts: str) -> Element:
        edge = etree.SubElement(self.root.find(f"{G}graph"), f"{G}edge")
        edge.set("id", f"new{len(self.edges)}")
        edge.set("source", source.get("id"))
        edge.set("target", target.get("id"))
        for name, text in texts.items():
            self.set(edge, name, text)
        self.edges.append(edge)
        return edge

    def add_node(self, identity: str, parent: Element | None = None, **texts: str) -> Element:
        graph = self.root.find(f"{G}graph") if parent is None else parent.find(f"{G}graph")
        node = etree.Element(f"{G}node", id=identity)
        graph.insert(0, node)
        for name, text in texts.items():
            self.set(node, name, text)
        self.nodes[identity] = node
        return node

    def save(self) -> Path:
        self.tree.write(self.path, encoding="utf-8", xml_declaration=True)
        return self.path

    def faces(self, node: Element) -> list[Element]:
        """Return the graphics of a node: one shape, or a group open and closed."""
        data = next(d for d in node.findall(f"{G}data") if d.get("key") == "nodegraphics")
        realizers = data.find(f"{Y}ProxyAutoBoundsNode/{Y}Realizers")
        return list(realizers) if realizers is not None else [data[0]]

    def is_closed(self, node: Element) -> bool:
        realizers = node.find(f"{G}data/{Y}ProxyAutoBoundsNode/{Y}Realizers")
        return realizers is not None and realizers.get("active") == "1"

    def box(self, node: Element, closed: bool | None = None) -> Box:
        """Return where a node is, as it is shown."""
        faces = self.faces(node)
        shown = self.is_closed(node) if closed is None else closed
        place = faces[int(shown) if len(faces) > 1 else 0].find(f"{Y}Geometry")
        return tuple(float(place.get(key)) for key in ("x", "y", "width", "height"))

    def graphs(self) -> Iterator[Element]:
        return self.root.iter(f"{G}graph")
