"""What an exporter records: calls, the site of each node, and values matched across a graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class Call(msgspec.Struct, frozen=True):
    """One run of one module's forward.

    Calls are numbered in the order they began, so the calls made inside this one are exactly those
    from its own number up to `end`.
    """

    path: str
    """The path of the module."""
    index: int
    """The number of this call among the calls of the same module, from 0."""
    parent: int
    """The number of the call that this one was made in, -1 for none."""
    end: int
    """The number of the first call that began after this one had ended."""
    returned: tuple[str, ...] = ()
    """The trace's names of the returned tensors and numbers in order, "" for one without a name."""
    finish: int = 0
    """The position of the trace when the call ended."""


class CallLog(msgspec.Struct, frozen=True):
    """All calls of one capture, and the call in which each traced operation ran."""

    calls: tuple[Call, ...] = ()
    operation_calls: Mapping[str, int] = {}
    """By the trace's name of an operation, the number of its innermost call."""

    def count(self) -> Counter[str]:
        """Return how often each module ran."""
        return Counter(call.path for call in self.calls)

    def only_calls(self) -> dict[str, int]:
        """Return the number of the call of each module that ran just once."""
        counts = self.count()
        return {c.path: number for number, c in enumerate(self.calls) if counts[c.path] == 1}

    def within(self, inner: int, outer: int) -> bool:
        """Return whether a call was made inside another one, or is that call.

        Args:
            inner: The number of the call that may be inside.
            outer: The number of the call around it.

        Returns:
            True if `inner` is `outer` or began before `outer` ended.
        """
        return outer <= inner < self.calls[outer].end

    def enclosing(self, number: int, path: str) -> int | None:
        """Find the call of a module that a call was made in.

        Args:
            number: The number of the inner call.
            path: The path of the module whose call is wanted.

        Returns:
            The number of the innermost such call, `number` itself included; None if there is none.
        """
        while number >= 0:
            if self.calls[number].path == path:
                return number
            number = self.calls[number].parent
        return None


class Site(NamedTuple):
    """Where an operation ran: a module, and the number of the call where that is known."""

    path: str
    """The path of the module."""
    call: int = -1
    """The number of the call in the `CallLog`, -1 if it is not known."""


class Trace(msgspec.Struct, frozen=True):
    """The exporter's own evidence, in terms of the value names of the file it wrote.

    Results are values only: they never decide which module a node belongs to.
    """

    log: CallLog = CallLog()
    scopes: Mapping[str, Site] = {}
    """By the name of each output of a node, the call in which the node's operation ran."""
    covers: Mapping[str, tuple[str, ...]] = {}
    """By the first output of a node, the modules whose operations it implements, if several."""
    results: Mapping[int, tuple[str | None, ...]] = {}
    """By the number of a call, the names of the values it returned, in order.

    None stands for a value that is not in the file, or that could not be followed.
    """
    ran_in_subgraphs: frozenset[str] = frozenset()
    """The modules that ran in subgraphs of conditionals and loops; their calls are not logged."""


class TorchOptions(msgspec.Struct, frozen=True):
    """The arguments that are passed on to `torch.onnx.export`."""

    optimize: bool = True
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_shapes: Any = None
    external_data: bool | None = None
    verbose: bool = False
    with_graph_text: bool = False
    """Whether `Baseline.graph_text` is wanted."""
    needs_given_inputs: bool = False
    """Whether a file is wanted only if it takes the example inputs, and no others."""


class TracerNote(NamedTuple):
    """A warning of the tracer about a value that it fixed to the example inputs."""

    location: str
    """The line of model code."""
    text: str
    """The first sentence of torch's message, without folders."""


class Baseline(msgspec.Struct, frozen=True):
    """A baseline as torch wrote it, and the evidence."""

    data: memoryview
    """The bytes of the `.onnx` file, in memory or mapped."""
    files: Mapping[str, Path]
    """The external data files beside it, by the names that the bytes refer to."""
    trace: Trace
    dropped_outputs: tuple[str, ...] = ()
    graph_text: str | None = None
    """The exporter's own graph as text, if it was asked for."""
    tracer_notes: tuple[TracerNote, ...] = ()


class Operation(NamedTuple):
    """One operation of a graph, with enough of it to recognise it after an optimisation."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    kind: Callable[[], Hashable]
    """Return the operator and its attributes in a comparable form; called only where needed."""
    plain: bool
    """Whether the operation has no attributes."""

    def rename(self, names: Mapping[str, str]) -> Operation:
        """Return the operation with its values under other names, as far as they have some."""
        outputs = tuple(names.get(name, name) for name in self.outputs)
        return self._replace(outputs=outputs, inputs=tuple(names.get(n, n) for n in self.inputs))


_MAX_STEPS = 8
"""How many removed operations in a row are followed."""


class ValueMatcher:
    """Match the values of the graph as first translated with those of the graph as written.

    Optimisers keep the name of a value that they keep. A value whose name was removed may still
    exist under another name, which its consumers show if they are otherwise unchanged. A consumer
    of an initializer that kept its name but got other values does not count as unchanged.
    """

    def __init__(
        self,
        before: Sequence[Operation],
        after: Sequence[Operation],
        present: Set[str],
        changed: frozenset[str] = frozenset(),
        fused: Set[str] = frozenset(),
    ) -> None:
        """Index both graphs.

        Args:
            before: The operations as first translated.
            after: The operations as written.
            present: The names of the inputs and initializers of the written graph.
            changed: The initializers that got other values under their old names.
            fused: Values of operations that are known to be fused into another one.
        """
        self._changed = changed
        self._fused = fused
        self._present = {*present, *(name for operation in after for name in operation.outputs)}
        self._producers: dict[str, Operation] = {}
        for operation in before:
            for name in operation.outputs:
                self._producers.setdefault(name, operation)  # a later one was merged into it
        self._after = {name: operation for operation in after for name in operation.outputs}
        self._consumers: dict[str, list[tuple[Operation, int]]] = {}
        for operation in before:
            for slot, name in enumerate(operation.inputs):
                self._consumers.setdefault(name, []).append((operation, slot))
        self._matches: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """Return the name of a translated value in the written graph, None if it is not there."""
        chain = []
        while name not in self._present and name not in self._matches:
            chain.append(name)
            renamed = self._name_at_consumers(name) or self._name_at_removed_consumers(name)
            if renamed is not None:
                self._matches[name] = renamed
                break
            producer = self._producers.get(name)
            if producer is None or not self._is_copy(producer) or producer.inputs[0] in chain:
                self._matches[name] = None
                break
            name = producer.inputs[0]
        match = name if name in self._present else self._matches[name]
        self._matches.update(dict.fromkeys(chain, match))
        return match

    def original_operations(self, node: Operation) -> list[Operation]:
        """Find the translated operations that a node of the written graph implements.

        The first is the one whose result the node computes. Walks back from it through the values
        that are not in the written graph. An operation on the way that is unchanged is the node
        itself: those after it were removed, and the node got the output name of the last one.
        """
        own = [name for name in node.outputs if name in self._producers][:1]
        namesake = self._producers[own[0]] if own else None
        if namesake is not None and self._is_unchanged(namesake, node, renamed_constants=True):
            return [namesake]
        renamed = [name for output in node.outputs for name in self._old_names.get(output, ())]
        operations: dict[int, Operation] = {}
        pending = renamed[-1:] or own
        for name in pending:
            operation = self._producers.get(name)
            if operation is None or id(operation) in operations:
                continue
            if self._is_unchanged(operation, node):
                operations = {id(operation): operation}
                break
            operations[id(operation)] = operation
            pending.extend(
                value
                for value in operation.inputs
                if value in node.outputs or (value and self.find(value) is None)
            )
        if namesake is not None and self._same_kind(namesake, node):
            # The node still does the work it is named after; operations before it were removed.
            operations = {id(namesake): namesake} | operations
        return list(operations.values())

    @functools.cached_property
    def _old_names(self) -> dict[str, list[str]]:
        """The removed names of the values that exist under another name, by that name."""
        old_names: dict[str, list[str]] = {}
        for name, producer in self._producers.items():
            # An operation that only looks like a copy may have been folded, as the shape of a
            # value is: its result is not the value that `find` would follow it to.
            if name in self._present or self._is_copy(producer):
                continue
            if (match := self.find(name)) is not None:
                old_names.setdefault(match, []).append(name)
        return old_names

    def _is_unchanged(
        self, before: Operation, after: Operation, renamed_constants: bool = False
    ) -> bool:
        """Return whether an operation is the same on the same inputs.

        A fusion gives an initializer new values under a new name, so a constant with another name
        is accepted only where the node has the operation's own output name.
        """
        producers = self._producers
        return self._same_kind(before, after) and all(
            old == new
            or (old in producers and self.find(old) == new)
            or (
                renamed_constants
                and old not in self._present
                and old not in producers
                and new not in producers
            )
            for old, new in zip(before.inputs, after.inputs, strict=True)
        )

    def _name_at_consumers(self, name: str) -> str | None:
        """Find the name that an unchanged consumer of a value, or of a copy of it, has for it."""
        same_value = [name]
        for current in same_value:
            for consumer, slot in self._consumers.get(current, ()):
                if self._repeats_producer(consumer, current):
                    continue
                after = self._after.get(consumer.outputs[0]) if consumer.outputs else None
                if after is not None and self._same_kind(consumer, after):
                    return after.inputs[slot] or None
                if after is None and self._is_copy(consumer) and len(same_value) < _MAX_STEPS:
                    same_value.append(consumer.outputs[0])
        return None

    def _repeats_producer(self, consumer: Operation, name: str) -> bool:
        """Return whether a consumer does what produced the value: optimisers merge the two."""
        producer = self._producers.get(name)
        return (
            producer is not None
            and len(producer.inputs) == len(consumer.inputs)
            and producer.kind() == consumer.kind()
        )

    def _name_at_removed_consumers(self, name: str) -> str | None:
        """Find a value under the output name of a consumer that was removed.

        An optimiser that removes an operation without effect may keep the operation's output name
        for the value that went into it.
        """
        producer = self._producers.get(name)
        if producer is None:
            return None
        following = [name]
        for current in following:
            for consumer, _ in self._consumers.get(current, ()):
                if len(consumer.outputs) != 1:
                    continue
                after = self._after.get(consumer.outputs[0])
                if after is None:
                    if len(following) < _MAX_STEPS:
                        following.append(consumer.outputs[0])
                elif self._is_same(producer, after):
                    # Outputs without consumers may have been removed from the end.
                    slot = producer.outputs.index(name)
                    return after.outputs[slot] if slot < len(after.outputs) else None
        return None

    def _is_copy(self, removed: Operation) -> bool:
        """Return whether a removed operation was a copy.

        Optimisers fuse few operations with one input and no attributes into another one, so one
        of this form that was removed, and is not known to be fused, had no effect.
        """
        is_unary = len(removed.inputs) == 1 and removed.plain and len(removed.outputs) == 1
        return is_unary and removed.outputs[0] not in self._fused

    def _same_kind(self, before: Operation, after: Operation) -> bool:
        return (
            len(before.inputs) == len(after.inputs)
            and self._changed.isdisjoint(after.inputs)
            and before.kind() == after.kind()
        )

    def _is_same(self, before: Operation, after: Operation) -> bool:
        """Return whether an operation is the same, whatever its outputs are called now.

        Compares with the matches made so far: `find` is under way for one of its outputs.
        """
        return self._same_kind(before, after) and all(
            old == new or self._matches.get(old) == new
            for old, new in zip(before.inputs, after.inputs, strict=True)
        )


def covered_modules(sites: Iterable[Site]) -> tuple[str, ...]:
    """Return the modules that operations ran in, sorted; nothing if there is only one."""
    paths = {site.path for site in sites}
    return tuple(sorted(paths)) if len(paths) > 1 else ()
