"""Run a model once and summarise every value of its main graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec
import onnx
import onnx.numpy_helper

from modelexport.graph.flat import Graph
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import DataFiles, external_location, initializer_fields
from modelexport.retagging.sketch import Array, Sketch, sketch
from modelexport.verification.runtime import Session

_MOST_VALUES = 4096
"""How many values one session returns: all of them are in memory at once."""


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
    for start in range(0, max(len(names), 1), _MOST_VALUES):
        part = names[start : start + _MOST_VALUES]
        session = Session.with_outputs(
            file.data, file.path, [name for name in part if name not in declared]
        )
        wanted = set(part) | declared if start == 0 else set(part)
        values = session.run(feeds)
        sketches.update(_sketch_all({k: v for k, v in values.items() if k in wanted}))
    return sketches


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
        The sketches of those that are tensors of numbers, by name.
    """
    sketches: dict[str, Sketch] = {}
    with DataFiles(file.path) as data_files:
        fields = initializer_fields(file.data, file.path)
        for tensor, field in zip(file.proto.graph.initializer, fields, strict=True):
            if tensor.name in names:
                array = _read(file.data, field, tensor, data_files)
                sketches.update(_sketch_all({tensor.name: array}))
    return sketches


def _read(
    data: wire.Buffer, field: wire.Field, tensor: onnx.TensorProto, files: DataFiles
) -> Array:
    whole = onnx.TensorProto.FromString(bytes(data[field.payload : field.end]))
    if external_location(tensor) is not None:
        whole.ClearField("external_data")
        whole.data_location = onnx.TensorProto.DEFAULT
        whole.raw_data = bytes(files.values(tensor))
    return onnx.numpy_helper.to_array(whole)
