"""The record of one export: what was asked, what was done, how long each step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from modelexport.tagged.sidecar import Sidecar


class ExportReport(msgspec.Struct, frozen=True):
    """What an export did. As JSON it is read with `report["summary"]`, `["files"]`, `["statistics"]`, `["timings"]`."""

    requested: str
    """The strategy that was asked for."""
    strategy: str
    """The strategy that was used."""
    exporter: str
    """`dynamo` or `torchscript`."""
    fallback_reason: str | None
    """Why dynamo could not, where `auto` went on with torchscript."""
    onnx_path: Path
    sidecar_path: Path
    data_paths: tuple[Path, ...]
    """The files with the weights, where they are not inside the model."""
    hierarchy: Sidecar
    """The whole map, as the sidecar has it."""
    timings: dict[str, float]
    """Seconds by step."""
    notes: tuple[str, ...] = ()
    """What torch's tracer warned of, a line each: values of the example inputs that the file keeps as constants."""
    report_path: Path | None = None
    """The page of `with_report`."""
    graphml_path: Path | None = None
    """The GraphML, where one was asked for and written."""
    graphml_data_path: Path | None = None
    """Its weights, where they are apart."""
    graphml_error: str | None = None
    """Why the GraphML could not be written; the model is exported nevertheless."""

    @property
    def nodes(self) -> int:
        """How many nodes the file has."""
        return self.hierarchy.statistics.nodes

    @property
    def coverage(self) -> float:
        """The share of nodes that have a tag, counted on the nodes of the file."""
        return self.hierarchy.statistics.coverage

    @property
    def fallback_message(self) -> str | None:
        """What a fallback means, in one line; None if the first exporter did it."""
        if self.fallback_reason is None:
            return None
        return (
            f"dynamo could not export this model ({self.fallback_reason}); {self.exporter} was used, "
            "which fixes branches and loops to the example inputs "
            '(strategy="fx" or --no-fallback makes this an error)'
        )

    @property
    def dropped_outputs(self) -> tuple[str, ...]:
        """What the model returned and ONNX cannot hold, as it is not a tensor."""
        return self.hierarchy.export.dropped_outputs

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        statistics = self.hierarchy.statistics
        return {
            "summary": {
                "success": True,
                "requested_strategy": self.requested,
                "final_strategy": self.strategy,
                "exporter": self.exporter,
                "fallback_reason": self.fallback_reason,
                "nodes": self.nodes,
                "coverage": self.coverage,
                "tags": statistics.tags,
                "dropped_outputs": list(self.dropped_outputs),
                "notes": list(self.notes),
                "graphml_error": self.graphml_error,
            },
            "files": {
                "onnx": str(self.onnx_path),
                "sidecar": str(self.sidecar_path),
                "data": [str(path) for path in self.data_paths],
                "report": _text(self.report_path),
                "graphml": _text(self.graphml_path),
                "graphml_data": _text(self.graphml_data_path),
            },
            "statistics": msgspec.to_builtins(statistics),
            "timings": dict(self.timings),
        }

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


class Steps:
    """Times the steps of an export and tells a listener when each begins."""

    def __init__(self, listener: Callable[[str], None] | None = None) -> None:
        self.timings: dict[str, float] = {}
        self._listener = listener

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        if self._listener is not None:
            self._listener(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start
