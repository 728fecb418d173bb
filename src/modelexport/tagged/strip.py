"""Takes the map out of a tagged file again: what is left are the bytes of the baseline."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath

import onnx

from modelexport.errors import FileError, FormatError
from modelexport.tagged import codec, wire
from modelexport.tagged.model import StrPath, mapped, parse
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
    """Write the baseline's bytes to `target`; external data is copied along into another folder."""
    source, target = Path(source), check_target(target)
    with mapped(source) as data, staging(target.parent) as stage:
        proto = parse(data, source)
        if source.parent.resolve() != target.parent.resolve():
            for number, name in enumerate(external_files(proto)):
                copy = stage.work / f"data-{number}"
                _copy_data(source.parent / name, copy)
                stage.place(copy, name)
        stage.place(stage.write("model", stripped(data)), target.name)
        stage.commit()
    return target


def external_files(proto: onnx.ModelProto) -> list[str]:
    """The data files that a model's initializers refer to, each once; a path that climbs out is refused."""
    names: dict[str, None] = {}
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                path = PurePosixPath(entry.value)
                if path.is_absolute() or ".." in path.parts or len(path.parts) != 1:
                    raise FormatError(
                        f"the model's data file {entry.value!r} lies outside the model's folder",
                        hint="only data files beside the model are followed",
                    )
                names[entry.value] = None
    return list(names)


def _copy_data(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError as error:
        raise FileError(
            f"the data file {source} is missing", hint="keep the data file beside the model, or strip in place"
        ) from error
