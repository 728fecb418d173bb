"""What a caller may ask of torch's exporter, and what comes back from it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.baseline.trace import Trace
from modelexport.baseline.tracer_warnings import TracerNote


class ExportOptions(msgspec.Struct, frozen=True):
    """The arguments that go to `torch.onnx.export` as they are."""

    optimize: bool = True
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_shapes: Any = None
    external_data: bool | None = None
    verbose: bool = False
    with_graph_text: bool = False


class Baseline(msgspec.Struct, frozen=True):
    """A baseline as torch wrote it: its bytes (in memory, or in a file), and the evidence.

    `data` are the bytes of the `.onnx` file; `files` are the external data files beside it, by
    the names that the bytes refer to. `graph_text` is the exporter's own graph, for people, if
    it was asked for. `tracer_notes` say what a tracer fixed to the example inputs.
    """

    data: memoryview
    files: Mapping[str, Path]
    trace: Trace
    dropped_outputs: tuple[str, ...] = ()
    graph_text: str | None = None
    tracer_notes: tuple[TracerNote, ...] = ()


def mapped(path: Path) -> memoryview:
    """The bytes of a file without reading them into memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
