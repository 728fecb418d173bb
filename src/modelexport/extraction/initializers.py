"""Copy the initializers of an extracted model."""

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

_PAGE, _LARGE, _STEP = 4096, 1 << 20, 64
"""Runtimes map large weights straight from the file, if they begin on a page."""


class InitializerSource(NamedTuple):
    """Where the weights of a source are: its bytes, the initializers in it, and its path.

    `fields` is None for a small source, of which everything was read.
    """

    data: wire.Buffer
    fields: Sequence[wire.Field] | None
    path: Path

    def inside(self, place: int | None, tensor: onnx.TensorProto) -> wire.Buffer:
        """A tensor as an initializer: as it stands in the main graph of the file, or its copy where that is whole."""
        if place is None or self.fields is None or external_location(tensor) is not None:
            return wire.initializer(tensor.SerializeToString())
        field = self.fields[place]
        return self.data[field.start : field.end]


def write_extracted(
    piece: ExtractedModel, weights: InitializerSource, target: Path
) -> tuple[Path, ...]:
    """Write the piece, its sidecar and, where the source has its weights outside, their data file: all or none.

    Returns what was written, the model last. What an earlier piece of that name had beside it and this one has not is
    taken away.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(piece.proto)
    with ExitStack() as stack:
        stage = stack.enter_context(transaction(target.parent))
        files = stack.enter_context(DataFiles(weights.path))
        data, sidecar = target.with_name(f"{target.name}.data"), sidecar_path(target)
        apart = list(external_tensors(proto))
        written: list[Path] = []
        if apart:
            stage.place(stage.write("data", _laid_out(apart, files, data.name)), data.name)
            written.append(data)
        if piece.sidecar is not None:
            stage.place(stage.write("sidecar", [encode_sidecar(piece.sidecar)]), sidecar.name)
            written.append(sidecar)
        stage.place(stage.write("model", _bytes(proto, piece, weights)), target.name)
        for left_over in {data, sidecar}.difference(written):
            stage.remove(left_over.name)
        stage.commit()
    return (*written, target)


def load_initializers(piece: ExtractedModel, weights: InitializerSource) -> onnx.ModelProto:
    """The piece with all its weights in it."""
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(b"".join(_bytes(piece.proto, piece, weights)))
    except DecodeError as error:
        raise FormatError(
            "the piece does not fit into one model", hint="write it to a file"
        ) from error
    with DataFiles(weights.path) as files:
        for tensor in external_tensors(proto):
            tensor.raw_data = bytes(files.values(tensor))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return proto


def _bytes(
    proto: onnx.ModelProto, piece: ExtractedModel, weights: InitializerSource
) -> list[wire.Buffer]:
    """The model as bytes, weights that lie inside the source as slices of it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.initializer[:]
    pairs = zip(piece.weights, proto.graph.initializer, strict=True)
    added = [weights.inside(place, tensor) for place, tensor in pairs]
    return wire.with_initializers(bare.SerializeToString(), added)


def _laid_out(
    tensors: list[onnx.TensorProto], files: DataFiles, name: str
) -> Iterator[wire.Buffer]:
    """The values of these tensors one after the other; each tensor is told its new place."""
    known: dict[tuple[str, ...], tuple[int, int]] = {}
    end = 0
    for tensor in tensors:
        old = tuple(f"{entry.key}={entry.value}" for entry in tensor.external_data)
        if old not in known:
            values = files.values(tensor)
            gap = -end % (_PAGE if len(values) >= _LARGE else _STEP)
            yield bytes(gap)
            yield values
            known[old] = (end + gap, len(values))
            end += gap + len(values)
        offset, length = known[old]
        del tensor.external_data[:]
        for key, value in (("location", name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
