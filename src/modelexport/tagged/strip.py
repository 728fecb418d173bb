"""Take the map out of a file (strip), or the metadata of the exporter (scrub)."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from modelexport.errors import ArgumentError
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    check_no_overwrite,
    external_files,
    open_mapped,
    parse_model,
    require_data_file,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.records import METADATA_KEY, decode_tag


def stripped_chunks(data: wire.Buffer) -> list[wire.Buffer]:
    """The bytes without our tags and metadata, in pieces."""
    return wire.rewrite(data, _original_doc, drop_metadata=METADATA_KEY)


def _original_doc(doc_string: bytes | None) -> bytes | None:
    tag = None if doc_string is None else decode_tag(doc_string)
    if tag is None:
        return doc_string
    return None if tag.doc is None else tag.doc.encode()


@keyword_aliases(source="path", target="output_path")
def strip(path: StrPath, output_path: StrPath) -> Path:
    """Write a file without its map: the very bytes that torch's own export wrote. Returns where they are.

    Where the weights are in a data file and `output_path` is in another folder, the data file is copied along.
    """
    return strip_file(path, output_path)[0]


def strip_file(source: StrPath, target: StrPath) -> tuple[Path, list[str]]:
    """The same, with the names of the data files that the target needs."""
    source, target = as_path(source), check_output_path(target)
    with open_mapped(source) as data, transaction(target.parent) as stage:
        proto = parse_model(data, source)
        check_no_overwrite(source, proto, target)
        names = external_files(proto)
        if target in (target.parent / name for name in names):
            told = f"output {target.name} has the name of a data file of {source.name}"
            raise ArgumentError(told, hint="choose another output")
        files = [require_data_file(source, name) for name in names]
        if source.parent.resolve() != target.parent.resolve():
            for number, (name, file) in enumerate(zip(names, files, strict=True)):
                stage.place(Path(shutil.copyfile(file, stage.work / f"data-{number}")), name)
        stage.place(stage.write("model", stripped_chunks(data)), target.name)
        stage.commit()
    return target, names


_ASIDE = ("doc_string", "metadata_props")


def check_no_graph_text(scrub: bool, *graph_files: object) -> None:
    """The exporters' own graphs, as text, are full of what scrubbing takes out."""
    if scrub and any(file is not None for file in graph_files):
        raise ArgumentError(
            "the exporter's own graph tells paths and source lines, which scrubbing leaves out",
            hint="export once with --scrub, and once with --jit-graph or --fx-graph",
        )


class _ScrubPlan(NamedTuple):
    """The fields of one kind of message that go, and those that hold messages in which some go."""

    dropped: frozenset[int]
    entered: dict[int, Any]


def scrub_bytes(data: wire.Buffer) -> bytes:
    """The same model without a word beside its graph."""
    return b"".join(_scrubbed_message(data, 0, len(data), onnx.ModelProto.DESCRIPTOR))


@functools.cache
def _scrub_plan(kind: Any) -> _ScrubPlan:
    dropped = frozenset(field.number for field in kind.fields if field.name in _ASIDE)
    inside = {
        field.number: field.message_type for field in kind.fields if field.message_type is not None
    }
    return _ScrubPlan(
        dropped,
        {n: child for n, child in inside.items() if n not in dropped and _speaks(child, set())},
    )


def _speaks(kind: Any, seen: set[Any]) -> bool:
    """Whether a message of this kind, or one inside it, has words in it."""
    if kind in seen:
        return False
    seen.add(kind)
    return any(
        field.name in _ASIDE
        or (field.message_type is not None and _speaks(field.message_type, seen))
        for field in kind.fields
    )


def _scrubbed_message(data: wire.Buffer, start: int, end: int, kind: Any) -> list[wire.Buffer]:
    plan = _scrub_plan(kind)
    pieces: list[wire.Buffer] = []
    kept_from = start
    for field in wire.fields(data, start, end):
        child = plan.entered.get(field.number)
        if field.number not in plan.dropped and child is None:
            continue
        if kept_from < field.start:
            pieces.append(data[kept_from : field.start])
        if child is not None:
            pieces += wire.delimited(
                field.number, _scrubbed_message(data, field.body, field.end, child)
            )
        kept_from = field.end
    if kept_from < end:
        pieces.append(data[kept_from:end])
    return pieces
