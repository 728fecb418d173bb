"""Match the operations of a TorchScript trace with those of its inlined copy."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence, Set
from typing import Any

import torch

from modelexport.capture.jit_trace import (
    IN_PLACE,
    JitTraceReader,
    OperationKey,
    TracedOperation,
    inputs_of,
    numbers_of,
    outputs_of,
)


class InlinedGraph:
    """The inlined copy of a trace, with the traced operation that each of its values comes from.

    The copy has the same operations in the same order, without those that have no consumers, and
    other numbers for its values. An operation is recognised among those of its kind and scope by
    its inputs. Constants are left out: a removed constant looks like any other, and the consumers
    of a constant are evidence enough.
    """

    def __init__(self, graph: Any, reader: JitTraceReader) -> None:
        self.operations: dict[OperationKey, list[TracedOperation]] = {}
        """The operations of the copy, without their calls."""
        self.values: dict[int, int] = {}
        """By traced value, the value of the copy."""
        self.origins: dict[int, TracedOperation] = {}
        """By value of the copy, the traced operation that computed it."""
        self.repeated: dict[int, int] = _find_repeated(graph)
        """By value of the copy, the first value that the same operation computed on equal inputs.

        Only values that are not the first are here.
        """
        self._match_operations(graph, reader)

    def _match_operations(self, graph: Any, reader: JitTraceReader) -> None:
        traced = reader.traced
        first = dict.fromkeys(traced, 0)
        computed = {
            number for operations in traced.values() for one in operations for number in one.outputs
        }
        unmatched: list[TracedOperation] = []
        for node in graph.nodes():
            if not node.inputsSize():
                continue
            key = reader.key_of(node)
            copy = TracedOperation(numbers_of(inputs_of(node)), numbers_of(outputs_of(node)), -1)
            self.operations.setdefault(key, []).append(copy)
            operations = traced.get(key, [])
            # A consumer of a removed value was removed too. Where that rules out every operation,
            # an earlier value was not recognised, and unknown inputs match anything.
            index = next(
                (
                    index
                    for known in (computed, frozenset[int]())
                    for index in range(first.get(key, 0), len(operations))
                    if self._has_inputs(operations[index], copy.inputs, known)
                ),
                None,
            )
            if index is not None:
                first[key] = index + 1
                self._add_match(operations[index], copy)
            elif not key[1]:
                unmatched.append(copy)
        if unmatched:
            self._match_functions(unmatched, reader)

    def _has_inputs(
        self, traced: TracedOperation, inputs: Sequence[int], computed: Set[int]
    ) -> bool:
        """Return whether a traced operation has these inputs, as far as they are known."""
        values = self.values
        return len(traced.inputs) == len(inputs) and all(
            values[old] == new if old in values else old not in computed and new not in self.origins
            for old, new in zip(traced.inputs, inputs, strict=True)
        )

    def _add_match(self, traced: TracedOperation, copy: TracedOperation) -> None:
        # The result of a function is computed by an operation of the function in the copy, so it
        # is known by its consumers only.
        for old, new in zip(traced.inputs, copy.inputs, strict=True):
            self.values.setdefault(old, new)
        for old, new in zip(traced.outputs, copy.outputs, strict=False):
            self.values[old] = new
            self.origins[new] = traced

    def _match_functions(
        self, unmatched: Sequence[TracedOperation], reader: JitTraceReader
    ) -> None:
        """Give the operations of compiled functions, which have no scope, to their callers.

        The trace has one operation for a whole function. The operations that replace it in the
        copy are those that its arguments lead to.
        """
        matched = {id(traced) for traced in self.origins.values()}
        functions = [
            traced
            for operations in reader.traced.values()
            for traced in operations
            if id(traced) not in matched
        ]
        function_of: dict[int, TracedOperation] = {}
        # Of several functions with one argument the first is taken, so it is written last.
        for traced in sorted(functions, key=lambda traced: traced.outputs, reverse=True):
            function_of.update(
                (self.values[old], traced) for old in traced.inputs if old in self.values
            )
        inside: dict[int, TracedOperation] = {}
        for copy in unmatched:
            callers = (inside.get(value) or function_of.get(value) for value in copy.inputs)
            function = next(filter(None, callers), None)
            if function is not None:
                inside.update(dict.fromkeys(copy.outputs, function))
        self.origins.update(inside)


def _find_repeated(graph: Any) -> dict[int, int]:
    """Return the values that repeat an earlier one, each with the first computed alike."""
    repeated: dict[int, int] = {}
    numbers: dict[int, int] = {}
    first_outputs: dict[Hashable, tuple[int, ...]] = {}
    for node in graph.nodes():
        outputs = numbers_of(outputs_of(node))
        if node.kind().endswith(IN_PLACE) or not outputs:
            continue
        inputs = numbers_of(inputs_of(node))
        constant = None if inputs else _constant_key(node)
        key = (node.kind(), constant, tuple([numbers.get(i, i) for i in inputs]))
        first = first_outputs.setdefault(key, outputs)
        numbers.update(zip(outputs, first, strict=False))
        if first is not outputs and inputs:
            repeated.update(zip(outputs, first, strict=False))
    return repeated


def _constant_key(node: Any) -> Hashable:
    """Return a key that is equal for equal constants."""
    value = node.outputsAt(0).toIValue() if node.outputsSize() == 1 else None
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, repr(value)
    content = hashlib.sha256(
        value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )
    return str(value.dtype), tuple(value.shape), content.digest()
