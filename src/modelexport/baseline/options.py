"""What a caller may ask of torch's exporter, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.baseline.trace import Trace

Buffer = bytes | memoryview


class ExportOptions(msgspec.Struct, frozen=True):
    """The arguments that go to `torch.onnx.export` as they are."""

    optimize: bool = True
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_shapes: Any = None
    external_data: bool | None = None
    verbose: bool = False
    jit_graph: Path | None = None
    fx_graph: Path | None = None


class Baseline(msgspec.Struct, frozen=True):
    """A baseline as torch wrote it: its bytes (in memory, or in a file), and the evidence.

    `open` gives the bytes of the `.onnx` file without a copy; `files` are the external data
    files beside it, by the names that the bytes refer to.
    """

    open: Callable[[], Buffer]
    files: Mapping[str, Path]
    trace: Trace
    dropped_outputs: tuple[str, ...] = ()
