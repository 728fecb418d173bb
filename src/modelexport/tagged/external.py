"""Moves a model's weights into one external data file, written once."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from onnx import TensorProto, external_data_helper

from modelexport.tagged import wire
from modelexport.tagged.files import external_location, mapped

_SMALLEST = 1024
"""Below this a weight stays in the model: as torch does, and as readers of shapes expect."""


def gather_weights(data: wire.Buffer, files: Mapping[str, Path], data_file: Path) -> bytes:
    """The model's bytes with every large weight in `data_file`, whether it was inside or in one of `files`."""
    with data_file.open("wb") as out, ExitStack() as stack:
        opened = {name: stack.enter_context(mapped(path)) for name, path in files.items()}

        def move(field: wire.Field) -> bytes | None:
            if field.end - field.body < 64:
                return None
            tensor = TensorProto.FromString(wire.tensor_without_values(data, field))
            values = _values(data, field, tensor, opened)
            if values is None or len(values) <= _SMALLEST:
                return None
            offset = _append(out, values)
            tensor.raw_data = b""
            external_data_helper.set_external_data(tensor, data_file.name, offset, len(values))
            tensor.ClearField("raw_data")
            return bytes(tensor.SerializeToString())

        return b"".join(wire.replace_initializers(data, move))


def _values(
    data: wire.Buffer, field: wire.Field, tensor: TensorProto, opened: Mapping[str, wire.Buffer]
) -> wire.Buffer | None:
    """A tensor's raw bytes; None where they are not stored as such."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return wire.raw_data(data, field)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    held = opened[external_location(tensor) or ""]
    start = int(entries.get("offset", 0))
    return held[start : start + int(entries.get("length", len(held) - start))]


def _append(out: BinaryIO, values: wire.Buffer) -> int:
    """Write at the next page, so that a reader can map the values."""
    offset = -(-out.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    out.seek(offset)
    out.write(values)
    return offset
