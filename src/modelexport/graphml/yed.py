"""The graphics that yEd reads: shapes, groups, lines, their colours by kind and by depth."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from modelexport.graphml.dialect import (
    BODY,
    FUNCTION,
    INITIALIZER,
    INPUT,
    MODEL,
    MODULE,
    OPERATOR,
    OUTPUT,
    SPARSE,
)
from modelexport.graphml.layout import HEADER, PADDING

Place = tuple[float, float, float, float]

_SHAPES = {
    OPERATOR: ("roundrectangle", "#FFFFFF", "#3C4A5A"),
    INPUT: ("parallelogram", "#CDEBC5", "#4B8B3B"),
    OUTPUT: ("parallelogram2", "#FFD9B0", "#B8651B"),
    INITIALIZER: ("rectangle", "#E4E4E4", "#9A9A9A"),
    SPARSE: ("rectangle", "#D5DCE4", "#8A96A3"),
    MODEL: ("rectangle", "#FFFDE7", "#B0A95F"),
}
_BY_DEPTH = ("#EEF3F8", "#DCE9F5", "#E3F1E5", "#FBF1DC", "#F1E6F7", "#DDF1F1")
_BY_KIND = {BODY: "#FFF6CC", FUNCTION: "#ECE7DF", OPERATOR: "#FFFFFF"}
_FONT = (
    'fontFamily="Dialog" fontStyle="plain" hasLineColor="false" textColor="#1C2733" visible="true"'
)


def shape(box: Place, kind: str, label: str) -> str:
    """A node without members."""
    form, fill, border = _SHAPES[kind]
    return (
        f'<y:ShapeNode>{_geometry(box)}<y:Fill color="{fill}" transparent="false"/>'
        f'<y:BorderStyle color="{border}" type="line" width="1.0"/>'
        f'<y:NodeLabel alignment="center" autoSizePolicy="content" fontSize="12" {_FONT} '
        f'hasBackgroundColor="false" modelName="internal" modelPosition="c">{escape(label)}</y:NodeLabel>'
        f'<y:Shape type="{form}"/></y:ShapeNode>'
    )


def group(
    boxes: tuple[Place, Place], closed: bool, kind: str, depth: int, label: str, *, empty: bool
) -> str:
    """A node with members: once open and once closed, one of which is shown."""
    fill = _BY_DEPTH[(depth - 1) % len(_BY_DEPTH)] if kind == MODULE else _BY_KIND[kind]
    faces = "".join(
        _face(box, boxes[1], fill, state, label, empty)
        for box, state in zip(boxes, (False, True), strict=True)
    )
    return f'<y:ProxyAutoBoundsNode><y:Realizers active="{int(closed)}">{faces}</y:Realizers></y:ProxyAutoBoundsNode>'


def _face(box: Place, closed_box: Place, fill: str, closed: bool, label: str, empty: bool) -> str:
    inset = f'bottom="{PADDING:.0f}" left="{PADDING:.0f}" right="{PADDING:.0f}" top="{PADDING:.0f}"'
    position = "c" if closed else "t"
    return (
        f'<y:GroupNode>{_geometry(box)}<y:Fill color="{fill}" transparent="false"/>'
        f'<y:BorderStyle color="#6F8196" type="{"dashed" if empty else "line"}" width="1.0"/>'
        f'<y:NodeLabel alignment="center" autoSizePolicy="content" borderDistance="4.0" fontSize="13" {_FONT} '
        f'hasBackgroundColor="false" modelName="internal" modelPosition="{position}">{escape(label)}</y:NodeLabel>'
        f'<y:Shape type="roundrectangle"/>'
        f'<y:State closed="{str(closed).lower()}" closedHeight="{closed_box[3]:.1f}" '
        f'closedWidth="{closed_box[2]:.1f}" innerGraphDisplayEnabled="false"/>'
        f'<y:Insets {inset}/><y:BorderInsets bottom="0" left="0" right="0" top="{HEADER:.0f}"/></y:GroupNode>'
    )


def edge(label: str, bends: Iterable[tuple[float, float]]) -> str:
    """A line with an arrow, and the shape of the tensor on it."""
    points = "".join(f'<y:Point x="{x:.1f}" y="{y:.1f}"/>' for x, y in bends)
    told = ""
    if label:
        told = (
            f'<y:EdgeLabel alignment="center" fontSize="9" {_FONT} hasBackgroundColor="false" '
            f'modelName="centered" modelPosition="center">{escape(label)}</y:EdgeLabel>'
        )
    return (
        f'<y:PolyLineEdge><y:Path sx="0.0" sy="0.0" tx="0.0" ty="0.0">{points}</y:Path>'
        '<y:LineStyle color="#7B8794" type="line" width="1.0"/><y:Arrows source="none" target="standard"/>'
        f'{told}<y:BendStyle smoothed="false"/></y:PolyLineEdge>'
    )


def _geometry(box: Place) -> str:
    x, y, width, height = box
    return f'<y:Geometry height="{height:.1f}" width="{width:.1f}" x="{x:.1f}" y="{y:.1f}"/>'
