"""Compare an assembled model with its drawing, and report what an editor changed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from modelexport.errors import FormatError
from modelexport.graph.flat import flatten
from modelexport.graphml.assemble import Assembly
from modelexport.graphml.elements import Elements, structure_digest
from modelexport.graphml.format import OUTPUT, escape_name
from modelexport.graphml.parts import UNDO, TerminalKey, check_text
from modelexport.graphml.read import parse_number
from modelexport.graphml.text import attributes_text


def check_unchanged(assembly: Assembly) -> int:
    """Check that a drawing has the structure that was exported.

    Positions, labels, colours and notes do not matter.

    Args:
        assembly: The model that the drawing holds.

    Returns:
        The number of operators.

    Raises:
        FormatError: If a node or edge was added, removed or changed; it names the element.
    """
    model = assembly.parse_without_nodes()
    graph = flatten(model, assembly.stored_nodes())
    comparison = _Comparison(assembly, Elements(graph, model))
    comparison.check_counts()
    comparison.check_terminals()
    comparison.check_attributes()
    comparison.check_notes()
    comparison.check_edges()
    if structure_digest(graph) != assembly.parts.card.texts.get("topology", ""):
        raise FormatError("the operators are not those that were recorded", hint=UNDO)
    return len(graph.nodes)


class _Comparison:
    """The elements of a model, and the nodes that draw them."""

    def __init__(self, assembly: Assembly, elements: Elements) -> None:
        self._parts = assembly.parts
        self._elements = elements
        self._graph = elements.graph

    def check_counts(self) -> None:
        """Raise a FormatError if operators or initializers are missing."""
        parts = self._parts
        operators = parse_number(parts.card.texts.get("operators", ""))
        initializers = parts.parameters.weights
        if len(parts.operators) < operators:
            raise self._removed("operator", operators - len(parts.operators))
        if len(parts.initializers) < initializers:
            raise self._removed("initializer", initializers - len(parts.initializers))
        # The order of an operator is its index in the graph from here on.
        if sorted(parts.operators) != list(range(len(self._graph.nodes))):
            raise FormatError("the operators are not those that were recorded", hint=UNDO)

    def _removed(self, kind: str, count: int) -> FormatError:
        """Return the error for removed nodes, named by the values that are now missing."""
        message = f"an {kind} was removed" if count == 1 else f"{count} {kind}s were removed"
        orders = sorted(self._parts.operators)
        undefined = [
            (key, self._parts.operators[order].title)
            for order, node in zip(orders, self._graph.nodes, strict=False)
            for key in node.inputs
            if self._elements.source(key) is None
        ]
        undefined += [
            (terminal.key, f"the output {escape_name(terminal.name)!r}")
            for terminal in self._elements.terminals
            if terminal.kind == OUTPUT and self._elements.source(terminal.key) is None
        ]
        if undefined:
            value, consumer = undefined[0]
            message += f": nothing gives {escape_name(value)!r} to {consumer}"
        return FormatError(message, hint=UNDO)

    def check_terminals(self) -> None:
        """Raise a FormatError if an input, initializer or output is missing or has another name."""
        parts = self._parts
        drawn = dict(parts.terminal_numbers)
        self._numbers = [parts.operator_numbers[order] for order in range(len(parts.operators))]
        for terminal in self._elements.terminals:
            key = TerminalKey(terminal.kind, terminal.scope, terminal.position)
            name = escape_name(terminal.name)
            if key not in drawn:
                raise FormatError(f"the {key.kind} {name!r} was removed", hint=UNDO)
            self._numbers.append(drawn.pop(key))
            if parts.names[key]:  # editors may drop a name of spaces
                check_text(f"{key.kind} {name!r}", "name", name, parts.names[key])
        for key, number in drawn.items():
            raise FormatError(
                f"the {key.kind} {parts.title(number)} belongs to no graph of the model", hint=UNDO
            )

    def check_attributes(self) -> None:
        """Raise a FormatError if attributes of an operator were changed."""
        for order, text in self._parts.attribute_texts.items():
            expected = attributes_text(self._graph.protos[order].attribute)
            check_text(self._parts.operators[order].title, "attributes", expected, text)

    def check_notes(self) -> None:
        """Raise a FormatError for a note that edges lead into and out of, like an operator."""
        notes, edges = self._parts.notes, self._parts.edges
        drawn = set(self._numbers) if notes else set()
        ends = list(zip(edges.sources, edges.targets, strict=True)) if notes else []
        left = {source for source, target in ends if source in notes and target in drawn}
        for source, target in ends:
            if target in left and source in drawn:
                raise FormatError(
                    f"{self._parts.title(target)} was added: edges lead in and out", hint=UNDO
                )

    def check_edges(self) -> None:
        """Raise a FormatError if an edge was added, removed or moved to another end."""
        numbers = np.array(self._numbers, np.int32)
        expected, drawn = self._elements.edges.table(), self._parts.edges.table()
        for column in (0, 2):
            expected[:, column] = numbers[expected[:, column]]
        if self._parts.notes:
            notes = np.fromiter(self._parts.notes, np.int32)
            drawn = drawn[~np.isin(drawn[:, [0, 2]], notes).any(axis=1)]
        if not np.array_equal(_sort_rows(expected), _sort_rows(drawn)):
            raise self._describe_difference(expected, drawn)

    def _describe_difference(self, expected: np.ndarray, drawn: np.ndarray) -> FormatError:
        """Return the error for the first edge that differs."""
        title = self._parts.title
        counts = Counter(map(tuple, expected.tolist()))
        counts.subtract(map(tuple, drawn.tolist()))
        added = [row for row, count in counts.items() if count < 0]
        removed = [row for row, count in counts.items() if count > 0]
        if removed:
            source, output, target, slot = removed[0]
            instead = [row for row in added if row[2:] == (target, slot)]
            message = (
                f"the edge from {title(source)} to input {slot} of {title(target)} was removed"
            )
            if instead:
                message = (
                    f"input {slot} of {title(target)} was connected to another source: expected "
                    f"output {output} of {title(source)}, got output {instead[0][1]} of "
                    f"{title(instead[0][0])}"
                )
        else:
            source, _, target, _ = added[0]
            message = f"an edge from {title(source)} to {title(target)} was added"
        return FormatError(message, hint=UNDO)


def _sort_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]
