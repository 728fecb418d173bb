"""import_onnx(): the model that a GraphML file holds, written out again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.garbage import pause_collector
from modelexport.graph.flat import flatten
from modelexport.graphml.assembly import Assembly, ExternalValues, in_bytes
from modelexport.graphml.comparison import Comparison
from modelexport.graphml.dialect import WRITE_AGAIN
from modelexport.graphml.edits import applied
from modelexport.graphml.parts import Parts
from modelexport.graphml.read import Document
from modelexport.graphml.tensors import Span
from modelexport.onnx_file.atomic_write import Transaction, check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, as_path, is_file
from modelexport.options import keyword_aliases

_MOST_GAPS, _LARGE = 16, 64 << 20


class Imported(msgspec.Struct, frozen=True):
    """What was written, and what an editor had changed since the model became GraphML; empty if nothing."""

    onnx: Path
    data: tuple[Path, ...]
    nodes: int
    edits: tuple[str, ...]
    topology: str
    """What was recorded of the graph when the GraphML was written."""


@keyword_aliases(graphml="path")
def import_onnx(
    path: StrPath, output_path: StrPath, *, on_progress: Callable[[float], None] | None = None
) -> Imported:
    """Write the model that a GraphML file holds: equal to the original, field for field, unless it was edited.

    Changes of labels, colours and layout are ignored. Changes of the structure are applied if they make a
    valid model; otherwise a FormatError names the place, and nothing is written. `on_progress` is told now and
    then how much is done, from 0 to 1.
    """
    source, target = as_path(path), check_output_path(output_path)
    with ExitStack() as stack:
        stack.enter_context(_naming(source))
        stack.enter_context(pause_collector())
        stage = stack.enter_context(transaction(target.parent))
        with (stage.work / "spool").open("wb") as spool:
            parts = Parts(Document(source, spool, stage.work / "spool", on_progress))
        beside = source.parent.resolve() == target.parent.resolve()
        if beside and target.name in (source.name, parts.parameters.file):
            raise ArgumentError(f"{target} is what is read", hint="choose another output")
        assembly = Assembly(parts)
        nodes, edits = _compared(assembly)
        stage.write("model", in_bytes(assembly.pieces()))
        data = _restore_data(stage, target, assembly.external)
        stage.place(stage.work / "model", target.name)
        stage.commit()
    return Imported(target, data, nodes, edits, parts.card.told.get("topology", ""))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever is wrong with the file, say which file it is."""
    try:
        yield
    except FormatError as error:
        if str(path) in error.message:
            raise
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
    except DecodeError as error:
        raise FormatError(f"{path}: its parts make no model", hint=WRITE_AGAIN) from error


def _compared(assembly: Assembly) -> tuple[int, tuple[str, ...]]:
    """The number of operators, and what was edited; the edits are made in what is written."""
    comparison = Comparison(assembly)
    if comparison.is_unchanged():
        return len(comparison.graph.nodes), ()
    edits = applied(comparison)
    return len(flatten(assembly.model(with_nodes=False), assembly.stored_nodes()).nodes), edits


def _restore_data(
    stage: Transaction, target: Path, values: list[ExternalValues]
) -> tuple[Path, ...]:
    """The model's own data files beside it: those that are there already must have the same values."""
    by_file: dict[str, list[ExternalValues]] = {}
    for value in values:
        by_file.setdefault(value.location, []).append(value)
    for number, (name, found) in enumerate(by_file.items()):
        path = target.parent / name
        if name == target.name:
            raise FileError(
                f"the weights of the model go to a file of its own name, {name}",
                hint="choose another",
            )
        if path.exists():
            for value in found:
                _check_present(path, value)
            continue
        end = max(value.offset + len(value.values) for value in found)
        if end > _MOST_GAPS * sum(len(value.values) for value in found) + _LARGE:
            raise FormatError(
                f"the weights would go to the end of a file {name} of {end:,} bytes, nearly all of them nothing",
                hint="copy the model's own data file beside the output first",
            )
        staged = stage.work / f"data-{number}"
        with staged.open("wb") as file:
            for value in found:
                file.seek(value.offset)
                for piece in value.values.chunks():
                    file.write(piece)
            file.truncate(end)
        stage.place(staged, name)
    return tuple(target.parent / name for name in by_file)


def _check_present(path: Path, value: ExternalValues) -> None:
    digest = hashlib.sha256()
    if is_file(path) and path.stat().st_size >= value.offset + len(value.values):
        for piece in Span(path, value.offset, len(value.values)).chunks():
            digest.update(piece)
    if digest.hexdigest() != value.values.sha256:
        raise FileError(
            f"{path} is there already, with other values",
            hint="import into another folder, or remove the file",
        )
