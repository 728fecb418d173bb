"""import_onnx(): restore the model that a GraphML file holds, and report what an editor changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from modelexport.analysis.validate import check_onnx
from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.graph.flat import flatten, pause_collector
from modelexport.graphml.elements import Elements, structure_digest
from modelexport.graphml.format import WRITE_AGAIN, Kind, escape_name
from modelexport.graphml.parts import (
    Assembly,
    ExternalValues,
    Parts,
    TerminalKey,
    changed_error,
    check_text,
)
from modelexport.graphml.read import Document, parse_number
from modelexport.graphml.text import attributes_text
from modelexport.graphml.values import read_chunks
from modelexport.onnx_file.atomic_write import Transaction, check_output_path, transaction
from modelexport.onnx_file.model_file import StrPath, as_path, is_file, open_mapped, parse_model
from modelexport.options import keyword_aliases

_MOST_GAPS = 16
"""How many times the size of its values a data file may have; padding and tensors that were removed
take up some of it."""
_LARGE = 64 << 20
"""Bytes that a data file may have in any case, whatever the gaps."""


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
        checker: The complaint of ONNX's checker; None if it has none.
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
            parts = Parts(Document(source, spool, on_progress))
        beside = source.parent.resolve() == target.parent.resolve()
        if beside and target.name in (source.name, parts.parameters.file):
            raise ArgumentError(
                f"output {target} would overwrite the input", hint="choose another output"
            )
        assembly = Assembly(parts)
        nodes = _check_unchanged(assembly)
        stage.write("model", read_chunks(assembly.sections()))
        data = _restore_data(stage, target, assembly.external)
        stage.publish(stage.work / "model", target.name)
        stage.commit()
    return Imported(target, data, nodes, parts.model_node.texts.get("topology", ""))


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
    present = msgspec.structs.replace(value.values, path=path, offset=value.offset)
    try:
        if is_file(path):
            for _ in present.chunks():
                pass
            return
    except FormatError:  # it is too short, or its digest differs
        pass
    raise FileError(
        f"{path} already exists, with other values",
        hint="import into another folder, or remove the file",
    )


def _check_unchanged(assembly: Assembly) -> int:
    """Check that a drawing has the structure that was exported; return the number of operators.

    Positions, labels, colours and notes do not matter. The error names the element that changed.
    """
    model = assembly.parse_without_nodes()
    graph = flatten(model, assembly.stored_nodes())
    comparison = _Comparison(assembly.parts, Elements(graph, model))
    comparison.check_counts()
    comparison.check_terminals()
    comparison.check_attributes()
    comparison.check_edges()
    if structure_digest(graph) != assembly.parts.model_node.texts.get("topology", ""):
        raise changed_error("the operators are not those that were recorded")
    return len(graph.nodes)


class _Comparison:
    """The elements of a model, and the nodes that draw them; each check raises a FormatError."""

    def __init__(self, parts: Parts, elements: Elements) -> None:
        self._parts = parts
        self._elements = elements
        self._graph = elements.graph

    def check_counts(self) -> None:
        """Check that no operator or initializer is missing."""
        parts = self._parts
        operators = parse_number(parts.model_node.texts.get("operators", "")) - len(parts.operators)
        initializers = parts.parameters.weights - len(parts.initializers)
        for kind, count in (("operator", operators), ("initializer", initializers)):
            if count > 0:
                message = f"{count} {kind}s were removed" if count > 1 else f"an {kind} was removed"
                raise changed_error(message + self._describe_undefined())
        # The order of an operator is its index in the graph from here on.
        if sorted(parts.operators) != list(range(len(self._graph.nodes))):
            raise changed_error("the operators are not those that were recorded")

    def _describe_undefined(self) -> str:
        """Name a value that is missing and its consumer; nothing if no value is missing."""
        parts, elements = self._parts, self._elements
        uses = [
            (key, parts.operators[order].title)
            for order, node in zip(sorted(parts.operators), self._graph.nodes, strict=False)
            for key in node.inputs
        ]
        uses += [
            (terminal.key, f"the output {escape_name(terminal.name)!r}")
            for terminal in elements.terminals
            if terminal.kind == Kind.OUTPUT
        ]
        for key, consumer in uses:
            if elements.source(key) is None:
                return f": {consumer} consumes {escape_name(key)!r}, which nothing produces"
        return ""

    def check_terminals(self) -> None:
        """Check that every input, initializer and output is there with its name, and no other."""
        parts = self._parts
        drawn = dict(parts.terminals)
        self._numbers = [parts.operators[order].number for order in range(len(parts.operators))]
        for terminal in self._elements.terminals:
            key = TerminalKey(terminal.kind, terminal.scope, terminal.position)
            name = escape_name(terminal.name)
            if key not in drawn:
                raise changed_error(f"the {key.kind} {name!r} was removed")
            number, drawn_name = drawn.pop(key)
            self._numbers.append(number)
            if drawn_name:  # editors may drop a name of spaces
                check_text(f"{key.kind} {name!r}", "name", name, drawn_name)
        for key, (number, _) in drawn.items():
            title = parts.title(number)
            raise changed_error(f"the {key.kind} {title} belongs to no graph of the model")

    def check_attributes(self) -> None:
        """Check the attributes of operators, now that their values are complete."""
        for order, text in self._parts.attribute_texts.items():
            expected = attributes_text(self._graph.protos[order].attribute)
            check_text(self._parts.operators[order].title, "attributes", expected, text)

    def check_edges(self) -> None:
        """Check that no edge was added, removed or moved to another end, except to notes."""
        elements = np.array(self._numbers, np.int32)
        expected, drawn = self._elements.edges.table(), self._parts.edges.table()
        for column in (0, 2):
            expected[:, column] = elements[expected[:, column]]
        notes = np.fromiter(self._parts.notes, np.int32)
        from_note, to_note = np.isin(drawn[:, 0], notes), np.isin(drawn[:, 2], notes)
        # Edges lead into and out of a node that someone drew as an operator.
        entered = drawn[to_note & np.isin(drawn[:, 0], elements), 2]
        left = drawn[from_note & np.isin(drawn[:, 2], elements), 0]
        for number in np.intersect1d(entered, left).tolist():
            raise changed_error(f"{self._parts.title(number)} was added: edges lead in and out")
        drawn = drawn[~(from_note | to_note)]
        if not np.array_equal(_sort_rows(expected), _sort_rows(drawn)):
            raise self._describe_difference(expected, drawn)

    def _describe_difference(self, expected: np.ndarray, drawn: np.ndarray) -> FormatError:
        """Return the error for the first edge that differs."""
        title = self._parts.title
        counts = Counter(map(tuple, expected.tolist()))
        counts.subtract(map(tuple, drawn.tolist()))
        added = [row for row, count in counts.items() if count < 0]
        removed = [row for row, count in counts.items() if count > 0]
        if not removed:
            source, _, target, _ = added[0]
            return changed_error(f"an edge from {title(source)} to {title(target)} was added")
        source, output, target, slot = removed[0]
        for row in added:
            if row[2:] == (target, slot):
                return changed_error(
                    f"input {slot} of {title(target)} was connected to another source: expected "
                    f"output {output} of {title(source)}, got output {row[1]} of {title(row[0])}"
                )
        return changed_error(
            f"the edge from {title(source)} to input {slot} of {title(target)} was removed"
        )


def _sort_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]
