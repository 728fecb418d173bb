"""Draw a GraphML file as SVG, as yEd shows it: `python docs/draw_graphml.py IN OUT`.

The geometry is read from the file. An edge into a closed group ends at the border of the group.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from lxml import etree

GRAPHML = "{http://graphml.graphdrawing.org/xmlns}"
YED = "{http://www.yworks.com/xml/graphml}"
MARGIN = 24.0

Box = tuple[float, float, float, float]


class NodeShape:
    """A node: the shape that is shown, and the closed group that hides it, if there is one."""

    def __init__(self, face: etree._Element, hidden_by: str | None) -> None:
        self.hidden_by = hidden_by
        geometry = face.find(f"{YED}Geometry")
        self.box: Box = tuple(float(geometry.get(key)) for key in ("x", "y", "width", "height"))
        self.fill = face.find(f"{YED}Fill").get("color")
        border = face.find(f"{YED}BorderStyle")
        self.border, self.dashed = border.get("color"), border.get("type") == "dashed"
        label = face.find(f"{YED}NodeLabel")
        self.label, self.at, self.size = (
            label.text or "",
            label.get("modelPosition"),
            float(label.get("fontSize")),
        )
        self.outline = face.find(f"{YED}Shape").get("type")


Point = tuple[float, float]


def read(path: Path) -> tuple[dict[str, NodeShape], list[tuple[str, str, str, tuple[Point, ...]]]]:
    """Read the nodes by id, outer ones first, and the edges with their labels and bends."""
    root = etree.parse(path).getroot()
    nodes: dict[str, NodeShape] = {}

    def add(graph: etree._Element, hidden_by: str | None) -> None:
        for node in graph.findall(f"{GRAPHML}node"):
            group = node.find(f".//{YED}Realizers") if node.get("yfiles.foldertype") else None
            face = (
                node.find(f"{GRAPHML}data/{YED}ShapeNode")
                if group is None
                else group[int(group.get("active"))]
            )
            identity = node.get("id")
            nodes[identity] = NodeShape(face, hidden_by)
            closed = group is not None and group.get("active") == "1"
            for inner in node.findall(f"{GRAPHML}graph"):
                add(inner, hidden_by or (identity if closed else None))

    add(root.find(f"{GRAPHML}graph"), None)
    edges = []
    for edge in root.iter(f"{GRAPHML}edge"):
        label = edge.find(f".//{YED}EdgeLabel")
        text = "" if label is None else label.text or ""
        bends = tuple(
            (float(point.get("x")), float(point.get("y"))) for point in edge.iter(f"{YED}Point")
        )
        edges.append((edge.get("source"), edge.get("target"), text, bends))
    return nodes, edges


def draw_outline(shape: NodeShape) -> str:
    """Draw the shape of a node."""
    x, y, width, height = shape.box
    style = f'fill="{shape.fill}" stroke="{shape.border}"' + (
        ' stroke-dasharray="4 3"' if shape.dashed else ""
    )
    if shape.outline.startswith("parallelogram"):
        lean = height / 4 if shape.outline == "parallelogram" else -height / 4
        left, right = max(lean, 0), max(-lean, 0)
        points = [
            (x + left, y),
            (x + width - right, y),
            (x + width - left, y + height),
            (x + right, y + height),
        ]
        return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" {style}/>'
    radius = 6 if shape.outline == "roundrectangle" else 0
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius}" {style}/>'
    )


def draw_label(shape: NodeShape) -> str:
    """Draw the label of a node."""
    x, y, width, height = shape.box
    lines = shape.label.split("\n")
    step = shape.size * 1.2
    first = (
        y + 16 if shape.at == "t" else y + height / 2 - step * (len(lines) - 1) / 2 + shape.size / 3
    )
    return "".join(
        f'<text x="{x + width / 2:.1f}" y="{first + number * step:.1f}" '
        f'font-size="{shape.size:.0f}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


def border_point(box: Box, towards: tuple[float, float]) -> tuple[float, float]:
    """Return where the line from a box's centre to a point leaves the box."""
    x, y, width, height = box
    cx, cy = x + width / 2, y + height / 2
    dx, dy = towards[0] - cx, towards[1] - cy
    scale = min(width / 2 / abs(dx) if dx else 1e9, height / 2 / abs(dy) if dy else 1e9, 1.0)
    return cx + dx * scale, cy + dy * scale


def draw_edge(first: Box, second: Box, label: str, bends: tuple[Point, ...]) -> str:
    """Draw an edge between two boxes."""
    centres = [(x + width / 2, y + height / 2) for x, y, width, height in (first, second)]
    begin = border_point(first, bends[0] if bends else centres[1])
    end = border_point(second, bends[-1] if bends else centres[0])
    points = [begin, *bends, end]
    text = ""
    if label:
        (x1, y1), (x2, y2) = points[(len(points) - 1) // 2], points[(len(points) - 1) // 2 + 1]
        x, y = (x1 + x2) / 2, (y1 + y2) / 2 + 3
        text = f'<text x="{x:.1f}" y="{y:.1f}" class="edge">{escape(label)}</text>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" marker-end="url(#arrow)"/>{text}'


def draw(path: Path) -> str:
    """Return a GraphML file as SVG."""
    nodes, edges = read(path)
    visible = {identity: shape for identity, shape in nodes.items() if shape.hidden_by is None}
    boxes = {identity: nodes[shape.hidden_by or identity].box for identity, shape in nodes.items()}
    lines = dict.fromkeys(
        (boxes[source], boxes[target], label, bends)
        for source, target, label, bends in edges
        if boxes[source] != boxes[target]
    )
    left, top = (min(shape.box[axis] for shape in visible.values()) - MARGIN for axis in (0, 1))
    right, bottom = (
        max(shape.box[axis] + shape.box[axis + 2] for shape in visible.values()) + MARGIN
        for axis in (0, 1)
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="{left:.0f} {top:.0f} {right - left:.0f} {bottom - top:.0f}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" fill="#1C2733">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8Z" fill="#7B8794"/></marker></defs>',
        "<style>polyline{stroke:#7B8794;fill:none} "
        ".edge{font-size:9px;fill:#55606B;text-anchor:middle}</style>",
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{right - left:.0f}" '
        f'height="{bottom - top:.0f}" fill="#FFFFFF"/>',
        *map(draw_outline, visible.values()),
        *(draw_edge(*ends) for ends in lines),
        *map(draw_label, visible.values()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])))
