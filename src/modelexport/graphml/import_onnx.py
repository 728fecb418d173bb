"""import_onnx(): restore the model that a GraphML file holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from modelexport.analysis.validate import check_onnx
from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.garbage import pause_collector
from modelexport.graph.flat import flatten
from modelexport.graphml.assemble import Assembly, ExternalValues
from modelexport.graphml.compare import check_unchanged
from modelexport.graphml.elements import structure_digest
from modelexport.graphml.format import WRITE_AGAIN
from modelexport.graphml.parts import Parts
from modelexport.graphml.read import Document
from modelexport.graphml.tensors import Span, read_chunks
from modelexport.onnx_file.atomic_write import Transaction, check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, as_path, is_file, open_mapped, parse_model
from modelexport.options import keyword_aliases

_MOST_GAPS, _LARGE = 16, 64 << 20


class Imported(msgspec.Struct, frozen=True):
    """The model that `import_onnx` wrote.

    Attributes:
        onnx: The model file.
        data: The data files of the model.
        nodes: The number of operators.
        topology: A digest of the graph, recorded when the GraphML was written.
    """

    onnx: Path
    data: tuple[Path, ...]
    nodes: int
    topology: str


class ImportCheck(msgspec.Struct, frozen=True):
    """What `check_import` found.

    Attributes:
        checker: The check_onnx of ONNX's checker; None if it has none.
        same_topology: Whether the graph in the file is the one that was recorded.
    """

    checker: str | None
    same_topology: bool

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.checker is None and self.same_topology


@keyword_aliases(graphml="path")
def import_onnx(
    path: StrPath, output_path: StrPath, *, on_progress: Callable[[float], None] | None = None
) -> Imported:
    """Write the model that a GraphML file holds, equal to the original field for field.

    Positions, labels, colours and notes may have been changed, and an editor may have saved the
    file. A changed structure is an error.

    Args:
        path: The GraphML file.
        output_path: The .onnx file to write.
        on_progress: Called now and then with how much is done, from 0 to 1.

    Returns:
        The files and what is in them.

    Raises:
        ArgumentError: If the output would overwrite the input.
        FileError: If a file cannot be read or written.
        FormatError: If the file is damaged, or its structure was changed; the message names the
            element, and nothing is written.
    """
    source, target = as_path(path), check_output_path(output_path)
    with ExitStack() as stack:
        stack.enter_context(_name_file(source))
        stack.enter_context(pause_collector())
        stage = stack.enter_context(transaction(target.parent))
        with (stage.work / "spool").open("wb") as spool:
            parts = Parts(Document(source, spool, stage.work / "spool", on_progress))
        beside = source.parent.resolve() == target.parent.resolve()
        if beside and target.name in (source.name, parts.parameters.file):
            raise ArgumentError(
                f"output {target} would overwrite the input", hint="choose another output"
            )
        assembly = Assembly(parts)
        nodes = check_unchanged(assembly)
        stage.write("model", read_chunks(assembly.sections()))
        data = _restore_data(stage, target, assembly.external)
        stage.publish(stage.work / "model", target.name)
        stage.commit()
    return Imported(target, data, nodes, parts.card.texts.get("topology", ""))


def check_import(imported: Imported) -> ImportCheck:
    """Check a model that was imported.

    Args:
        imported: What `import_onnx` returned.

    Returns:
        What ONNX's checker says, and whether the graph in the file is the recorded one.

    Raises:
        FileError: If the file cannot be read.
        FormatError: If it is not an ONNX model.
    """
    with open_mapped(imported.onnx) as data:
        same = structure_digest(flatten(parse_model(data, imported.onnx))) == imported.topology
    return ImportCheck(check_onnx(imported.onnx), same)


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Add the path to messages about a file's content."""
    try:
        yield
    except FormatError as error:
        message = error.message if str(path) in error.message else f"{path}: {error.message}"
        raise FormatError(message, hint=error.hint or WRITE_AGAIN) from error
    except DecodeError as error:
        raise FormatError(f"{path}: its parts are not a model", hint=WRITE_AGAIN) from error


def _restore_data(
    stage: Transaction, target: Path, values: list[ExternalValues]
) -> tuple[Path, ...]:
    """Write the model's own data files; one that exists must have the same values."""
    by_file: dict[str, list[ExternalValues]] = {}
    for value in values:
        by_file.setdefault(value.location, []).append(value)
    for number, (name, inside) in enumerate(by_file.items()):
        path = target.parent / name
        if name == target.name:
            raise FileError(
                f"the data file of the model has the name of the output, {name}",
                hint="choose another output",
            )
        if path.exists():
            for value in inside:
                _check_present(path, value)
            continue
        end = max(value.offset + len(value.values) for value in inside)
        # Offsets are untrusted: a file of nearly only zeros would fill the disk.
        if end > _MOST_GAPS * sum(len(value.values) for value in inside) + _LARGE:
            raise FormatError(
                f"the data file {name} would have {end:,} bytes, nearly all of them zeros",
                hint="copy the model's own data file beside the output first",
            )
        staged = stage.work / f"data-{number}"
        with staged.open("wb") as file:
            for value in inside:
                file.seek(value.offset)
                for chunk in value.values.chunks():
                    file.write(chunk)
            file.truncate(end)
        stage.publish(staged, name)
    return tuple(target.parent / name for name in by_file)


def _check_present(path: Path, value: ExternalValues) -> None:
    digest = hashlib.sha256()
    if is_file(path) and path.stat().st_size >= value.offset + len(value.values):
        for chunk in Span(path, value.offset, len(value.values)).chunks():
            digest.update(chunk)
    if digest.hexdigest() != value.values.sha256:
        raise FileError(
            f"{path} is there already, with other values",
            hint="import into another folder, or remove the file",
        )
