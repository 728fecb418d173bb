"""Takes the map out of a tagged file again: what is left are the bytes of the baseline."""

from __future__ import annotations

import shutil
from pathlib import Path

from modelexport.errors import ArgumentError
from modelexport.tagged import codec, wire
from modelexport.tagged.files import (
    StrPath,
    as_path,
    check_not_overwritten,
    external_files,
    mapped,
    parse,
    present_data_file,
)
from modelexport.tagged.sidecar import METADATA_KEY
from modelexport.tagged.staging import check_target, staging


def stripped(data: wire.Buffer) -> list[wire.Buffer]:
    """The bytes without our tags and metadata, in pieces."""
    return wire.rewrite(data, _original_doc, drop_metadata=METADATA_KEY)


def _original_doc(doc_string: bytes | None) -> bytes | None:
    tag = None if doc_string is None else codec.decode(doc_string)
    if tag is None:
        return doc_string
    return None if tag.doc is None else tag.doc.encode()


def strip(source: StrPath, target: StrPath) -> Path:
    """Write a file without its map: the very bytes that torch's own export wrote. Returns where they are.

    Where the weights are in a data file and `target` is in another folder, the data file is copied along.
    """
    return write_stripped(source, target)[0]


def write_stripped(source: StrPath, target: StrPath) -> tuple[Path, list[str]]:
    """The same, with the names of the data files that the target needs."""
    source, target = as_path(source), check_target(target)
    with mapped(source) as data, staging(target.parent) as stage:
        proto = parse(data, source)
        check_not_overwritten(source, proto, target)
        names = external_files(proto)
        if target in (target.parent / name for name in names):
            told = f"output {target.name} has the name of a data file of {source.name}"
            raise ArgumentError(told, hint="choose another output")
        files = [present_data_file(source, name) for name in names]
        if source.parent.resolve() != target.parent.resolve():
            for number, (name, file) in enumerate(zip(names, files, strict=True)):
                stage.place(Path(shutil.copyfile(file, stage.work / f"data-{number}")), name)
        stage.place(stage.write("model", stripped(data)), target.name)
        stage.commit()
    return target, names
