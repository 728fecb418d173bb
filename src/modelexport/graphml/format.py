"""The GraphML format: keys, kinds of nodes, paths, and the graphics that yEd reads.

docs/graphml.md describes each key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import msgspec

from modelexport.errors import ArgumentError
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.onnx_file.model_file import StrPath
from modelexport.options import PARAMETER_MODES

FORMAT_VERSION = "1.1"
GRAPHML = "http://graphml.graphdrawing.org/xmlns"
YED = "http://www.yworks.com/xml/graphml"


class Kind(StrEnum):
    """The values of the key `kind`; the format keeps its words where the code has others."""

    MODEL = "model"
    MODULE = "module"
    SUBGRAPH = "body"
    FUNCTION = "function"
    OPERATOR = "operator"
    INPUT = "input"
    OUTPUT = "output"
    INITIALIZER = "initializer"
    SPARSE = "sparse_initializer"


INITIALIZERS = frozenset({Kind.INITIALIZER, Kind.SPARSE})
TERMINALS = INITIALIZERS | {Kind.INPUT, Kind.OUTPUT}

_INTEGERS = {"execution_order", "call", "position", "operators", "source_output", "target_input"}
_NODE_KEYS = (
    "kind class tag module_path execution_order operator domain name attributes outputs evidence "
    "call status type shape scope position onnx bytes values check format_version parameters "
    "topology operators"
)
KEYS = {
    domain: {name: "int" if name in _INTEGERS else "string" for name in names.split()}
    for domain, names in (
        ("graph", "format_version source"),
        ("node", _NODE_KEYS),
        ("edge", "tensor type shape source_output target_input"),
    )
}
"""The names of the keys of graphs, nodes and edges, each with its type."""

WRITE_AGAIN = "write it again with export-graphml"
"""The hint for a damaged file."""
_NOT_XML = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

PADDING, HEADER = 18.0, 30.0
_SHAPES: dict[str, tuple[str, str, str]] = {
    Kind.OPERATOR: ("roundrectangle", "#FFFFFF", "#3C4A5A"),
    Kind.INPUT: ("parallelogram", "#CDEBC5", "#4B8B3B"),
    Kind.OUTPUT: ("parallelogram2", "#FFD9B0", "#B8651B"),
    Kind.INITIALIZER: ("rectangle", "#E4E4E4", "#9A9A9A"),
    Kind.SPARSE: ("rectangle", "#D5DCE4", "#8A96A3"),
    Kind.MODEL: ("rectangle", "#FFFDE7", "#B0A95F"),
}
_MODULE_FILLS = ("#EEF3F8", "#DCE9F5", "#E3F1E5", "#FBF1DC", "#F1E6F7", "#DDF1F1")
_GROUP_FILLS: dict[str, str] = {
    Kind.SUBGRAPH: "#FFF6CC",
    Kind.FUNCTION: "#ECE7DF",
    Kind.OPERATOR: "#FFFFFF",
}
_FONT = (
    'fontFamily="Dialog" fontStyle="plain" hasLineColor="false" textColor="#1C2733" visible="true"'
)
_INSETS = f'bottom="{PADDING:.0f}" left="{PADDING:.0f}" right="{PADDING:.0f}" top="{PADDING:.0f}"'


class Parameters(msgspec.Struct, frozen=True):
    """The key `parameters`: where the values of initializers are, and how many there are."""

    mode: str
    file: str | None = None
    weights: int = 0


class StoredValues(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An entry of the key `values`: the tensor field that is stored elsewhere, and its location."""

    field: str
    length: int
    sha256: str
    at: str = ""
    offset: int | None = None
    file: str | None = None


def graphml_path(onnx_path: Path) -> Path:
    """Return the default path of a model's GraphML file."""
    return onnx_path.with_name(f"{onnx_path.stem}_hierarchical_graph.graphml")


def data_path(graphml: Path) -> Path:
    """Return the path of the file with the values of a GraphML file's initializers."""
    return graphml.with_suffix(".onnxdata")


def check_graphml(source: Path, output_path: StrPath | None, parameters: str) -> Path:
    """Check that the GraphML file of a model can be written.

    Args:
        source: The model file.
        output_path: The GraphML file; None for the default path beside the model.
        parameters: Where the values of initializers go, one of `PARAMETER_MODES`.

    Returns:
        The path of the GraphML file.

    Raises:
        ArgumentError: If the mode is unknown, the output would overwrite the model, XML cannot
            hold a file name, or a reference would not lie beside the model.
        FileError: If the path is not one of a .graphml file in an existing folder.
    """
    target = check_output_path(
        graphml_path(source) if output_path is None else output_path, suffix=".graphml"
    )
    for path in (source, target):
        if escape_name(path.name) != path.name:
            raise ArgumentError(
                f"XML cannot hold the name {escape_name(path.name)!r}", hint="rename the file"
            )
    if source.resolve() in (target.resolve(), data_path(target).resolve()):
        raise ArgumentError(
            f"output {target} would overwrite the input {source}", hint="choose another output"
        )
    check_mode(parameters)
    folder = source.parent.resolve()
    if parameters == "reference" and {target.parent.resolve(), source.resolve().parent} != {folder}:
        raise ArgumentError(
            f"{target} is not beside {source.name} itself, whose initializers it would refer to",
            hint="write it into the model's folder, or choose sidecar or embedded",
        )
    return target


def check_mode(parameters: str) -> None:
    """Raise an ArgumentError for a parameter mode that is not one of `PARAMETER_MODES`."""
    if parameters not in PARAMETER_MODES:
        raise ArgumentError(
            f"there is no parameter mode {parameters!r}",
            hint=f"known: {', '.join(PARAMETER_MODES)}",
        )


def escape_name(text: str | bytes) -> str:
    """Write characters that XML cannot hold, or that editors change, as their codes.

    Protobuf gives a name that is not UTF-8 as bytes.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def subgraph_scope(index: int, position: int) -> str:
    """Return the key `scope` of the subgraph at a position among those of an operator."""
    return f"{index}/{position}"


def function_scope(position: int) -> str:
    """Return the key `scope` of the local function at a position in the model."""
    return f"function/{position}"


def checksum(message: bytes, values: str) -> str:
    """Return the key `check`: a short digest of the keys `onnx` and `values` of a node."""
    return hashlib.blake2b(message + b"\0" + values.encode(), digest_size=8).hexdigest()


class Box(NamedTuple):
    """A rectangle: its upper left corner and its size."""

    x: float
    y: float
    width: float
    height: float


def draw_shape(box: Box, kind: str, label: str) -> str:
    """Return the node graphics of an element."""
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
    """Return the node graphics of a group, open and closed; yEd shows one of them.

    Args:
        boxes: Where the open and the closed group are.
        closed: Whether the closed one is shown.
        kind: The kind of group.
        depth: How deep it is nested.
        label: Its label.
        empty: Whether it has no members.
    """
    fill = _GROUP_FILLS.get(kind) or _MODULE_FILLS[(depth - 1) % len(_MODULE_FILLS)]
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
    """Return the edge graphics of a line with an arrow and a label, which passes some points."""
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
