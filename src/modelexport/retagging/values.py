"""Run a model once and summarise every value of its main graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx
import onnx.numpy_helper

from modelexport.graph.flat import Graph
from modelexport.graph.inference import tensor_array
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import DataFiles, external_location, initializer_fields
from modelexport.retagging.sketch import Array, Sketch, sketch
from modelexport.verification.runtime import Session, SessionSettings

_RUN_ONCE = SessionSettings(packs_weights=False)
_MAX_BYTES = 1 << 29
"""The size of the values that one session returns: all of them are in memory at once."""
_ELEMENT_BYTES = 8
_MAX_VALUES = 4096
"""How many values one session returns, if their sizes are not known."""


class OpenFile(msgspec.Struct, frozen=True):
    """A model file that is open for reading."""

    path: Path
    data: wire.Buffer
    proto: onnx.ModelProto
    graph: Graph
    data_files: list[str]
    """The names of its data files."""


def sketch_values(file: OpenFile, feeds: Mapping[str, Array]) -> dict[str, Sketch]:
    """Run a model and summarise its inputs and the outputs of all nodes of its main graph.

    Args:
        file: The model.
        feeds: The inputs by name.

    Returns:
        The sketches by the name of the value.

    Raises:
        FormatError: ONNX Runtime rejects the model, or cannot run it on these inputs.
    """
    sketches = dict(_sketch_all(feeds))
    names = [
        name
        for node in file.graph.nodes
        if node.enclosing < 0 and not node.function
        for name in node.outputs
    ]
    declared = {value.name for value in file.proto.graph.output}
    for part in _split(names, _sizes(file.proto.graph, feeds)):
        added = [name for name in part if name not in declared]
        session = Session.with_outputs(file.data, file.path, added, _RUN_ONCE)
        sketches.update(_sketch_all(session.run(feeds)))
    return sketches


def _sizes(graph: onnx.GraphProto, feeds: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes in bytes of the values whose shapes the file states, given its inputs."""
    symbols = {
        dim.dim_param: size
        for value in graph.input
        if value.name in feeds
        for dim, size in zip(
            value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=False
        )
        if dim.dim_param
    }
    sizes = {}
    for value in (*graph.value_info, *graph.output):
        dims = [
            symbols.get(dim.dim_param, 0) if dim.dim_param else dim.dim_value
            for dim in value.type.tensor_type.shape.dim
        ]
        if all(dims) and value.type.tensor_type.HasField("shape"):
            sizes[value.name] = _ELEMENT_BYTES * math.prod(dims)
    return sizes


def _split(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Split values into parts that fit in memory; a value of unknown size counts as an average."""
    average = max(sum(sizes.values()) // max(len(sizes), 1), _MAX_BYTES // _MAX_VALUES)
    part: list[str] = []
    total = 0
    for name in names:
        size = sizes.get(name, average)
        if part and total + size > _MAX_BYTES:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    yield part


def _sketch_all(values: Mapping[str, Array]) -> Iterator[tuple[str, Sketch]]:
    for name, array in values.items():
        summary = sketch(array)
        if summary is not None:
            yield name, summary


def sketch_initializers(file: OpenFile, names: Collection[str]) -> dict[str, Sketch]:
    """Summarise initializers of the main graph.

    Args:
        file: The model.
        names: The names of the initializers.

    Returns:
        The sketches of those that are tensors of numbers, by name; none of damaged ones.
    """
    sketches: dict[str, Sketch] = {}
    with DataFiles(file.path) as data_files:
        fields = initializer_fields(file.data, file.path)
        for tensor, field in zip(file.proto.graph.initializer, fields, strict=True):
            if tensor.name in names:
                array = _read(file.data, field, tensor, data_files)
                if array is not None:
                    sketches.update(_sketch_all({tensor.name: array}))
    return sketches


def _read(
    data: wire.Buffer, field: wire.Field, tensor: onnx.TensorProto, files: DataFiles
) -> Array | None:
    whole = onnx.TensorProto.FromString(bytes(data[field.payload : field.end]))
    if external_location(tensor) is not None:
        whole.ClearField("external_data")
        whole.data_location = onnx.TensorProto.DEFAULT
        whole.raw_data = bytes(files.values(tensor))
    return tensor_array(whole)
