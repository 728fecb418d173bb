"""Takes out of a model file all that is said beside the graph: every doc_string and every metadata entry.

torch writes there, for each node, the stack trace with source lines and the absolute paths of the machine.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import onnx

from modelexport.errors import ArgumentError
from modelexport.tagged import wire

_ASIDE = ("doc_string", "metadata_props")


def refuse_graph_text(scrub: bool, *graph_files: object) -> None:
    """The exporters' own graphs, as text, are full of what scrubbing takes out."""
    if scrub and any(file is not None for file in graph_files):
        raise ArgumentError(
            "the exporter's own graph tells paths and source lines, which scrubbing leaves out",
            hint="export once with --scrub, and once with --jit-graph or --fx-graph",
        )


class _Plan(NamedTuple):
    """The fields of one kind of message that go, and those that hold messages in which some go."""

    dropped: frozenset[int]
    entered: dict[int, Any]


def scrubbed(data: wire.Buffer) -> bytes:
    """The same model without a word beside its graph."""
    return b"".join(_scrubbed(data, 0, len(data), onnx.ModelProto.DESCRIPTOR))


@functools.cache
def _plan(kind: Any) -> _Plan:
    dropped = frozenset(field.number for field in kind.fields if field.name in _ASIDE)
    inside = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    return _Plan(dropped, {n: child for n, child in inside.items() if n not in dropped and _speaks(child, set())})


def _speaks(kind: Any, seen: set[Any]) -> bool:
    """Whether a message of this kind, or one inside it, has words in it."""
    if kind in seen:
        return False
    seen.add(kind)
    return any(
        field.name in _ASIDE or (field.message_type is not None and _speaks(field.message_type, seen))
        for field in kind.fields
    )


def _scrubbed(data: wire.Buffer, start: int, end: int, kind: Any) -> list[wire.Buffer]:
    plan = _plan(kind)
    pieces: list[wire.Buffer] = []
    kept_from = start
    for field in wire.fields(data, start, end):
        child = plan.entered.get(field.number)
        if field.number not in plan.dropped and child is None:
            continue
        if kept_from < field.start:
            pieces.append(data[kept_from : field.start])
        if child is not None:
            pieces += wire.delimited(field.number, _scrubbed(data, field.body, field.end, child))
        kept_from = field.end
    if kept_from < end:
        pieces.append(data[kept_from:end])
    return pieces
