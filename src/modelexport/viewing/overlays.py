"""Overlays: results by module, read from the JSON of other commands, to colour a picture with."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from modelexport.errors import FileError, FormatError
from modelexport.modules.tree import Ancestry
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.tagged.records import UNREADABLE

_HINT = (
    "pass the JSON that profile, verify, quantize --sensitivity or analyze writes with "
    "--output-format json"
)


class Overlay(msgspec.Struct, frozen=True):
    """A number for each of some modules.

    Attributes:
        name: What is shown.
        unit: The unit of the numbers; may be empty.
        aggregate: How the numbers of submodules combine: `sum` or `max`.
        values: The numbers by module path. Those of a `sum` are without the submodules.
    """

    name: str
    unit: str
    aggregate: str
    values: dict[str, float]

    def with_submodules(self) -> dict[str, float]:
        """Return the numbers of modules together with those of the modules below them."""
        lineage = Ancestry({})
        combine = max if self.aggregate == "max" else operator.add
        totals: dict[str, float] = {}
        for path, value in self.values.items():
            if not math.isfinite(value):
                continue
            for outer in lineage.of(path):
                totals[outer] = combine(totals[outer], value) if outer in totals else value
        return totals


def read_overlays(source: StrPath | msgspec.Struct) -> list[Overlay]:
    """Read the overlays in the result of a command.

    Args:
        source: The result that `profile`, `verify`, `measure_sensitivity` or `analyze` returned, or
            a file with its JSON.

    Raises:
        FileError: The file cannot be read.
        FormatError: It is not a result with numbers by module.
    """
    if isinstance(source, msgspec.Struct):
        name, result = f"a {type(source).__name__}", msgspec.to_builtins(source, enc_hook=str)
    else:
        name, result = str(source), _read_result(as_path(source))
    for field, read in _READERS.items():
        if field in result:
            try:
                overlays = [each for each in read(result) if each.values]
            except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise FormatError(f"{name} is damaged: {error!r}", hint=_HINT) from error
            if overlays:
                return overlays
            raise FormatError(f"{name} has no numbers by module", hint=_HINT)
    raise FormatError(f"{name} is not the result of a known command", hint=_HINT)


def _read_result(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise FormatError(f"{path} is not the result of a command: {error}", hint=_HINT) from error


def _profile(result: dict[str, Any]) -> list[Overlay]:
    values = _values(result["modules"], "path", lambda row: row["own_ms"])
    return [Overlay("latency", "ms", "sum", values)]


def _verification(result: dict[str, Any]) -> list[Overlay]:
    values = _values(result["modules"], "module", lambda row: row["max_abs"])
    return [Overlay("difference from PyTorch", "", "max", values)]


def _sensitivity(result: dict[str, Any]) -> list[Overlay]:
    values = _values(result["modules"], "module", lambda row: (row["error"] or {}).get("relative"))
    return [Overlay(f"error if quantized to {result['to']}", "", "max", values)]


def _analysis(result: dict[str, Any]) -> list[Overlay]:
    rows = result["modules"]
    flops = {row["module"]: row["flops"] for row in rows if row.get("flops") is not None}
    own, lineage = dict(flops), Ancestry({})
    for path in flops:
        # A container never runs, so it has no operations: the module around it includes them.
        above = [outer for outer in lineage.of(path)[:-1] if outer in own]
        if above:
            own[above[-1]] -= flops[path]
    return [
        Overlay("bytes", "B", "sum", _values(rows, "module", lambda row: row["own_bytes"])),
        Overlay("nodes", "", "sum", _values(rows, "module", lambda row: row["own_nodes"])),
        Overlay("operations", "FLOP", "sum", {path: float(own[path]) for path in own}),
    ]


_READERS: dict[str, Callable[[dict[str, Any]], list[Overlay]]] = {
    "kernel_ms": _profile,
    "outcomes": _verification,
    "whole": _sensitivity,
    "by_operator": _analysis,
}
"""How to read a result, by a field that only results of its kind have."""


def _values(
    rows: Sequence[dict[str, Any]], key: str, number: Callable[[dict[str, Any]], Any]
) -> dict[str, float]:
    """Return the numbers of modules; of several rows of one module, the greatest."""
    values: dict[str, float] = {}
    for row in rows:
        value = number(row)
        if value is not None:
            path = str(row[key])
            values[path] = max(float(value), values.get(path, -math.inf))
    return values
