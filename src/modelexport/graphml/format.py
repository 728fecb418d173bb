"""The GraphML format: version, keys, kinds of nodes, paths. docs/graphml.md describes each key."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from modelexport.errors import ArgumentError
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.onnx_file.model_file import StrPath
from modelexport.options import PARAMETER_MODES

FORMAT_VERSION = "1.1"

GRAPHML = "http://graphml.graphdrawing.org/xmlns"
YED = "http://www.yworks.com/xml/graphml"

# Values of the key `kind`. They are part of the format, also where the code has another word.
MODEL, MODULE, SUBGRAPH, FUNCTION, OPERATOR = "model", "module", "body", "function", "operator"
INPUT, OUTPUT, INITIALIZER, SPARSE = "input", "output", "initializer", "sparse_initializer"
INITIALIZERS = frozenset({INITIALIZER, SPARSE})
TERMINALS = INITIALIZERS | {INPUT, OUTPUT}

_STRING, _INT = "string", "int"

GRAPH_KEYS = {"format_version": _STRING, "source": _STRING}
NODE_KEYS = {
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
EDGE_KEYS = {
    "tensor": _STRING,
    "type": _STRING,
    "shape": _STRING,
    "source_output": _INT,
    "target_input": _INT,
}


WRITE_AGAIN = "write it again with export-graphml"
"""The hint for a damaged file."""

_NOT_XML = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_SUBGRAPH_SCOPE = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


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

    Args:
        text: A name; bytes for one that is not UTF-8, as protobuf gives it.

    Returns:
        The name as the GraphML file has it.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def subgraph_scope(index: int, position: int) -> str:
    """Return the key `scope` of the subgraph at a position among those of an operator."""
    return f"{index}/{position}"


def parse_subgraph_scope(scope: str) -> tuple[int, int] | None:
    """Return the operator and the position of a subgraph; None for any other scope."""
    match = _SUBGRAPH_SCOPE.fullmatch(scope)
    return None if match is None else (int(match[1]), int(match[2]))


def function_scope(position: int) -> str:
    """Return the key `scope` of the local function at a position in the model."""
    return f"function/{position}"


def checksum(message: bytes, values: str) -> str:
    """Return the key `check`: a short digest of the keys `onnx` and `values` of a node."""
    return hashlib.blake2b(message + b"\0" + values.encode(), digest_size=8).hexdigest()
