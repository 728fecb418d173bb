"""Copy the initializers of an extracted model, in memory or to files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError

from modelexport.errors import FormatError
from modelexport.extraction.build import ExtractedModel
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import transaction
from modelexport.onnx_file.initializer_data import DataFiles
from modelexport.onnx_file.model_file import external_location, external_tensors
from modelexport.tagged.records import encode_sidecar, sidecar_path

_PAGE, _LARGE, _ALIGNMENT = 4096, 1 << 20, 64
"""Runtimes map large tensors straight from the file if they begin on a page."""


class InitializerSource(NamedTuple):
    """Where the initializers of a source are: its bytes, their fields in it, and its path.

    `fields` is None for a small source, which was parsed with all its data.
    """

    data: wire.Buffer
    fields: Sequence[wire.Field] | None
    path: Path

    def encode(self, index: int | None, tensor: onnx.TensorProto) -> wire.Buffer:
        """Encode an initializer as a field of a graph.

        Args:
            index: Its index in the main graph of the source, or None if it has its data.
            tensor: The initializer, possibly without its data.

        Returns:
            The bytes, sliced from the source if the data is there.
        """
        if index is None or self.fields is None or external_location(tensor) is not None:
            return wire.initializer(tensor.SerializeToString())
        field = self.fields[index]
        return self.data[field.start : field.end]


def write_extracted(
    model: ExtractedModel, source: InitializerSource, target: Path
) -> tuple[Path, ...]:
    """Write an extracted model, its sidecar and its data file: all or nothing.

    A sidecar or data file that an earlier model of this name had, and this one does not need, is
    removed.

    Args:
        model: The extracted model.
        source: Where its initializers are.
        target: The ONNX file to write.

    Returns:
        The files, the model last.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    with ExitStack() as stack:
        stage = stack.enter_context(transaction(target.parent))
        files = stack.enter_context(DataFiles(source.path))
        data, sidecar = target.with_name(f"{target.name}.data"), sidecar_path(target)
        external = list(external_tensors(proto))
        written: list[Path] = []
        if external:
            stage.publish(stage.write("data", _lay_out(external, files, data.name)), data.name)
            written.append(data)
        if model.sidecar is not None:
            stage.publish(stage.write("sidecar", [encode_sidecar(model.sidecar)]), sidecar.name)
            written.append(sidecar)
        stage.publish(stage.write("model", _encode(proto, model, source)), target.name)
        for left_over in {data, sidecar}.difference(written):
            stage.remove(left_over.name)
        stage.commit()
    return (*written, target)


def load_initializers(model: ExtractedModel, source: InitializerSource) -> onnx.ModelProto:
    """Copy the data of all initializers into an extracted model.

    Args:
        model: The extracted model.
        source: Where its initializers are.

    Returns:
        The complete model.

    Raises:
        FormatError: If the model is larger than a protobuf can be.
    """
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(b"".join(_encode(model.proto, model, source)))
    except DecodeError as error:
        raise FormatError(
            "the extracted model is larger than a protobuf can be", hint="write it to a file"
        ) from error
    with DataFiles(source.path) as files:
        for tensor in external_tensors(proto):
            tensor.raw_data = bytes(files.values(tensor))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return proto


def _encode(
    proto: onnx.ModelProto, model: ExtractedModel, source: InitializerSource
) -> list[wire.Buffer]:
    """Encode the model; initializers in the source file are slices of it, never parsed."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.initializer[:]
    pairs = zip(model.source_indices, proto.graph.initializer, strict=True)
    return wire.with_initializers(
        bare.SerializeToString(), [source.encode(index, tensor) for index, tensor in pairs]
    )


def _lay_out(tensors: list[onnx.TensorProto], files: DataFiles, name: str) -> Iterator[wire.Buffer]:
    """Yield the data of these tensors one after the other, and point each to its new location."""
    known: dict[tuple[str, ...], tuple[int, int]] = {}
    end = 0
    for tensor in tensors:
        old = tuple(f"{entry.key}={entry.value}" for entry in tensor.external_data)
        if old not in known:
            values = files.values(tensor)
            gap = -end % (_PAGE if len(values) >= _LARGE else _ALIGNMENT)
            yield bytes(gap)
            yield values
            known[old] = (end + gap, len(values))
            end += gap + len(values)
        offset, length = known[old]
        del tensor.external_data[:]
        for key, value in (("location", name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
