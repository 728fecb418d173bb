"""The graphics that yEd reads: shapes, groups and lines, coloured by kind and by depth."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from modelexport.graphml.format import (
    FUNCTION,
    INITIALIZER,
    INPUT,
    MODEL,
    MODULE,
    OPERATOR,
    OUTPUT,
    SPARSE,
    SUBGRAPH,
)
from modelexport.graphml.layout import HEADER, PADDING, Box

_SHAPES = {
    OPERATOR: ("roundrectangle", "#FFFFFF", "#3C4A5A"),
    INPUT: ("parallelogram", "#CDEBC5", "#4B8B3B"),
    OUTPUT: ("parallelogram2", "#FFD9B0", "#B8651B"),
    INITIALIZER: ("rectangle", "#E4E4E4", "#9A9A9A"),
    SPARSE: ("rectangle", "#D5DCE4", "#8A96A3"),
    MODEL: ("rectangle", "#FFFDE7", "#B0A95F"),
}
_MODULE_FILLS = ("#EEF3F8", "#DCE9F5", "#E3F1E5", "#FBF1DC", "#F1E6F7", "#DDF1F1")
_GROUP_FILLS = {SUBGRAPH: "#FFF6CC", FUNCTION: "#ECE7DF", OPERATOR: "#FFFFFF"}
_FONT = (
    'fontFamily="Dialog" fontStyle="plain" hasLineColor="false" textColor="#1C2733" visible="true"'
)
_INSETS = f'bottom="{PADDING:.0f}" left="{PADDING:.0f}" right="{PADDING:.0f}" top="{PADDING:.0f}"'


def draw_shape(box: Box, kind: str, label: str) -> str:
    """Draw a node without members.

    Args:
        box: Where it is.
        kind: The kind of node.
        label: Its label.

    Returns:
        The element for the key of yEd's node graphics.
    """
    form, fill, border = _SHAPES[kind]
    return (
        f'<y:ShapeNode>{_geometry(box)}<y:Fill color="{fill}" transparent="false"/>'
        f'<y:BorderStyle color="{border}" type="line" width="1.0"/>'
        f'<y:NodeLabel alignment="center" autoSizePolicy="content" fontSize="12" {_FONT} '
        'hasBackgroundColor="false" modelName="internal" modelPosition="c">'
        f'{escape(label)}</y:NodeLabel><y:Shape type="{form}"/></y:ShapeNode>'
    )


def draw_group(
    boxes: tuple[Box, Box], closed: bool, kind: str, depth: int, label: str, *, empty: bool
) -> str:
    """Draw a group in its open and its closed form; yEd shows one of them.

    Args:
        boxes: Where the open and the closed group are.
        closed: Whether the closed one is shown.
        kind: The kind of group.
        depth: How deep it is nested.
        label: Its label.
        empty: Whether it has no members.

    Returns:
        The element for the key of yEd's node graphics.
    """
    fill = _MODULE_FILLS[(depth - 1) % len(_MODULE_FILLS)] if kind == MODULE else _GROUP_FILLS[kind]
    border = "dashed" if empty else "line"
    faces = "".join(
        f'<y:GroupNode>{_geometry(box)}<y:Fill color="{fill}" transparent="false"/>'
        f'<y:BorderStyle color="#6F8196" type="{border}" width="1.0"/>'
        '<y:NodeLabel alignment="center" autoSizePolicy="content" borderDistance="4.0" '
        f'fontSize="13" {_FONT} hasBackgroundColor="false" modelName="internal" '
        f'modelPosition="{position}">{escape(label)}</y:NodeLabel>'
        '<y:Shape type="roundrectangle"/>'
        f'<y:State closed="{state}" closedHeight="{boxes[1].height:.1f}" '
        f'closedWidth="{boxes[1].width:.1f}" innerGraphDisplayEnabled="false"/>'
        f"<y:Insets {_INSETS}/>"
        f'<y:BorderInsets bottom="0" left="0" right="0" top="{HEADER:.0f}"/></y:GroupNode>'
        for box, state, position in zip(boxes, ("false", "true"), ("t", "c"), strict=True)
    )
    return (
        f'<y:ProxyAutoBoundsNode><y:Realizers active="{int(closed)}">{faces}</y:Realizers>'
        "</y:ProxyAutoBoundsNode>"
    )


def draw_edge(label: str, bends: Iterable[tuple[float, float]]) -> str:
    """Draw a line with an arrow.

    Args:
        label: The text on the line.
        bends: The points that it passes.

    Returns:
        The element for the key of yEd's edge graphics.
    """
    points = "".join(f'<y:Point x="{x:.1f}" y="{y:.1f}"/>' for x, y in bends)
    text = ""
    if label:
        text = (
            f'<y:EdgeLabel alignment="center" fontSize="9" {_FONT} hasBackgroundColor="false" '
            f'modelName="centered" modelPosition="center">{escape(label)}</y:EdgeLabel>'
        )
    return (
        f'<y:PolyLineEdge><y:Path sx="0.0" sy="0.0" tx="0.0" ty="0.0">{points}</y:Path>'
        '<y:LineStyle color="#7B8794" type="line" width="1.0"/>'
        f'<y:Arrows source="none" target="standard"/>{text}'
        '<y:BendStyle smoothed="false"/></y:PolyLineEdge>'
    )


def _geometry(box: Box) -> str:
    x, y, width, height = box
    return f'<y:Geometry height="{height:.1f}" width="{width:.1f}" x="{x:.1f}" y="{y:.1f}"/>'
