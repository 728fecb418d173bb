"""Take the map out of a file (strip), or the metadata of the exporter (scrub)."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import msgspec
import onnx

from modelexport.errors import ArgumentError
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.doc_strings import model_metadata, rewrite_doc_strings
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    external_files,
    open_mapped,
    parse_model,
)
from modelexport.onnx_file.output_files import check_no_overwrite, copy_data_files
from modelexport.option_values import spell_option
from modelexport.options import keyword_aliases
from modelexport.tagged.records import (
    METADATA_KEY,
    NAMESPACE_KEY,
    REPLACED,
    UNREADABLE,
    decode_tag,
    encode_tag,
    is_map_key,
)

_SCRUBBED = ("doc_string", "metadata_props")


def stripped_chunks(data: wire.Buffer) -> list[wire.Buffer]:
    """Remove the map from a model, and return the bytes that the exporter wrote, in chunks."""
    return rewrite_doc_strings(
        data,
        _original_doc,
        rename_metadata=_original_key,
        node_entry=(NAMESPACE_KEY, itertools.repeat(None)) if _has_namespaces(data) else None,
    )


class _ExportMark(msgspec.Struct, frozen=True):
    namespaces: bool = False


class _MapMark(msgspec.Struct, frozen=True):
    export: _ExportMark


def _has_namespaces(data: wire.Buffer) -> bool:
    """Return whether the namespaces of the nodes are those that the map in the file added."""
    text = model_metadata(data, METADATA_KEY)
    try:
        return text is not None and msgspec.json.decode(text, type=_MapMark).export.namespaces
    except UNREADABLE:  # then they are kept: they may be another tool's
        return False


def _original_key(key: str) -> str | None:
    if not is_map_key(key):
        return key
    return None if key == METADATA_KEY else key.removesuffix(REPLACED)


def _original_doc(doc_string: bytes | None) -> bytes | None:
    tag = None if doc_string is None else decode_tag(doc_string)
    if tag is None:
        return doc_string
    if tag.kept:
        return encode_tag(msgspec.structs.replace(tag, kept=False))
    return None if tag.doc is None else tag.doc.encode()


@keyword_aliases(source="path", target="output_path")
def strip(path: StrPath, output_path: StrPath) -> Path:
    """Write a file without its map: the baseline, byte for byte.

    Where the model has data files and `output_path` is in another folder, they are copied along.

    Args:
        path: The tagged file.
        output_path: The file to write.

    Returns:
        The path of the file written.

    Raises:
        ArgumentError: The output would overwrite the input.
        FileError: A file cannot be read or written.
        FormatError: The source is not an ONNX model.
    """
    return strip_file(path, output_path)[0]


def strip_file(source: StrPath, target: StrPath) -> tuple[Path, list[str]]:
    """Write a file without its map; return its path, and the names of the data files it needs."""
    source, target = as_path(source), check_output_path(target)
    with open_mapped(source, whole=True) as data, transaction(target.parent) as stage:
        proto = parse_model(data, source)
        names = external_files(proto)
        check_no_overwrite(source, names, target)
        copy_data_files(stage, source, names, target)
        stage.publish(stage.write("model", stripped_chunks(data)), target.name)
        stage.commit()
    return target, names


def check_no_graph_text(scrub: bool, *graph_files: object) -> None:
    """Refuse to write an exporter's graph as text, to one of these files, from a scrubbed export.

    Raises:
        ArgumentError: Both are requested.
    """
    if scrub and any(file is not None for file in graph_files):
        raise ArgumentError(
            "the exporter's own graph has paths and source lines, which scrubbing leaves out",
            hint=f"export once with {spell_option('scrub')}, and once with "
            f"{spell_option('jit_graph')} or {spell_option('fx_graph')}",
        )


def scrub_bytes(data: wire.Buffer) -> bytes:
    """Remove every doc_string and all metadata from the bytes of a model."""
    return b"".join(_scrub_message(data, 0, len(data), onnx.ModelProto.DESCRIPTOR))


@functools.cache
def _scrub_plan(kind: Any) -> tuple[frozenset[int], dict[int, Any]]:
    """Return the fields of a message type to remove, and those with messages to scrub."""
    removed = frozenset(field.number for field in kind.fields if field.name in _SCRUBBED)
    entered = {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type is not None
        and field.number not in removed
        and _has_scrubbed_fields(field.message_type, set())
    }
    return removed, entered


def _has_scrubbed_fields(kind: Any, seen: set[Any]) -> bool:
    """Return whether a message of this type, or one inside it, has fields to remove."""
    if kind in seen:
        return False
    seen.add(kind)
    return any(
        field.name in _SCRUBBED
        or (field.message_type is not None and _has_scrubbed_fields(field.message_type, seen))
        for field in kind.fields
    )


def _scrub_message(data: wire.Buffer, start: int, end: int, kind: Any) -> list[wire.Buffer]:
    removed, entered = _scrub_plan(kind)

    def edit(field: wire.Field) -> list[wire.Buffer] | None:
        if field.number in removed:
            return []
        inner = entered.get(field.number)
        if inner is None:
            return None
        return wire.delimited(field.number, _scrub_message(data, field.payload, field.end, inner))

    return wire.replace_fields(data, start, end, edit)
