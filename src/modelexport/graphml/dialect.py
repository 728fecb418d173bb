"""The names that the GraphML has: version, keys, kinds of nodes. docs/graphml.md says what each means."""

from __future__ import annotations

from pathlib import Path

FORMAT_VERSION = "1.1"

GRAPHML = "http://graphml.graphdrawing.org/xmlns"
YED = "http://www.yworks.com/xml/graphml"

MODEL, MODULE, BODY, FUNCTION, OPERATOR = "model", "module", "body", "function", "operator"
INPUT, OUTPUT, INITIALIZER, SPARSE = "input", "output", "initializer", "sparse_initializer"
TERMINALS = frozenset({INPUT, OUTPUT, INITIALIZER, SPARSE})
WEIGHTS = frozenset({INITIALIZER, SPARSE})

_STRING, _INT = "string", "int"

ON_GRAPH = {"format_version": _STRING, "source": _STRING}
ON_NODES = {
    "kind": _STRING,
    "class": _STRING,
    "tag": _STRING,
    "module_path": _STRING,
    "execution_order": _INT,
    "operator": _STRING,
    "domain": _STRING,
    "name": _STRING,
    "attributes": _STRING,
    "outputs": _STRING,
    "evidence": _STRING,
    "call": _INT,
    "status": _STRING,
    "type": _STRING,
    "shape": _STRING,
    "scope": _STRING,
    "position": _INT,
    "onnx": _STRING,
    "bytes": _STRING,
    "values": _STRING,
    "check": _STRING,
    "format_version": _STRING,
    "parameters": _STRING,
    "topology": _STRING,
    "operators": _INT,
}
ON_EDGES = {
    "tensor": _STRING,
    "type": _STRING,
    "shape": _STRING,
    "source_output": _INT,
    "target_input": _INT,
}

WRITE_AGAIN = "write it again with export-graphml"
"""What to do about a file that is damaged."""

MODES = ("sidecar", "embedded", "reference")
"""Where the values of weights are: in the .onnxdata beside the GraphML, inside it, or in the original model."""


def graphml_path(onnx_path: Path) -> Path:
    """Where the GraphML of a model goes if nobody says."""
    return onnx_path.with_name(f"{onnx_path.stem}_hierarchical_graph.graphml")


def data_path(graphml: Path) -> Path:
    """The file that holds the values of a GraphML's weights."""
    return graphml.with_suffix(".onnxdata")
