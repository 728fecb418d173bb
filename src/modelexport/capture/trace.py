"""What an exporter recorded of an export: which call made each value, and what each call returned."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from modelexport.capture.calls import CallLog


class Site(NamedTuple):
    """A place in the model: a module, and the number of its call where that is known (else -1)."""

    path: str
    call: int = -1


class Trace(msgspec.Struct, frozen=True):
    """The exporter's own evidence, in terms of the tensor names of the file it wrote.

    `scopes` has the call in which the operation of a node ran, by the names of the node's outputs.
    `covers` has the paths of all modules whose operations are in a node, where there are several,
    by the name of the node's first output. `results` has an entry for each call that returned
    tensors: the name of each of them in their order, None for one that is not in the file or could
    not be followed. Results say nothing about who owns a node.
    """

    log: CallLog = CallLog()
    scopes: Mapping[str, Site] = {}
    covers: Mapping[str, tuple[str, ...]] = {}
    results: Mapping[int, tuple[str | None, ...]] = {}
    ran_in_bodies: frozenset[str] = frozenset()
    """Modules that ran in conditional or loop bodies, whose calls are not in the log."""


class Operation(NamedTuple):
    """One operation of a graph, enough of it to recognise it again after an optimisation."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    kind: Callable[[], Hashable]
    """What it does, in any form that can be compared."""
    plain: bool
    """Whether it has no attributes."""


class ValueMatcher:
    """Finds a value of the graph as first translated in the graph as finally written.

    Optimisers keep the name of a value that they keep. A value whose name is gone may live on
    under another: the operations that used to read it, if otherwise unchanged, tell which. One
    that reads a weight which was given other values under its old name is not unchanged.
    """

    def __init__(
        self,
        before: Sequence[Operation],
        after: Sequence[Operation],
        present: frozenset[str],
        changed: frozenset[str] = frozenset(),
    ) -> None:
        self._changed = changed
        self._present = (
            present.union(*(operation.outputs for operation in after)) if after else present
        )
        self._made = {name: operation for operation in before for name in operation.outputs}
        self._after = {name: operation for operation in after for name in operation.outputs}
        self._readers: dict[str, list[tuple[Operation, int]]] = {}
        for operation in before:
            for slot, name in enumerate(operation.inputs):
                self._readers.setdefault(name, []).append((operation, slot))
        self._found: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """The name that the value has in the final graph, or None where it was fused away."""
        chain = []
        while name not in self._present and name not in self._found:
            chain.append(name)
            renamed = self._seen_by_readers(name) or self._under_a_reader_s_name(name)
            if renamed is not None:
                self._found[name] = renamed
                break
            made = self._made.get(name)
            if made is None or not _is_copy(made) or made.inputs[0] in chain:
                self._found[name] = None
                break
            name = made.inputs[0]
        answer = name if name in self._present else self._found[name]
        for passed in chain:
            self._found[passed] = answer
        return answer

    def implemented(self, node: Operation) -> list[Operation]:
        """Return the translated operations that a node of the final graph does.

        The first is the one whose result the node computes. Walks back from that result through the values
        that are not in the final graph. An operation met on the way that still does the same on the same
        inputs is the node itself: what followed it was removed, and the node was given its output's name.
        """
        own = [name for name in node.outputs if name in self._made][:1]
        namesake = self._made[own[0]] if own else None
        if namesake is not None and self._is_unchanged(namesake, node, renamed_constants=True):
            return [namesake]
        found: dict[int, Operation] = {}
        pending = [name for output in node.outputs for name in self._now_called.get(output, ())][
            -1:
        ] or own
        for name in pending:
            operation = self._made.get(name)
            if operation is None or id(operation) in found:
                continue
            if self._is_unchanged(operation, node):
                found = {id(operation): operation}
                break
            found[id(operation)] = operation
            pending.extend(
                value
                for value in operation.inputs
                if value in node.outputs or (value and self.find(value) is None)
            )
        if namesake is not None and self._same_work(namesake, node):
            found = {id(namesake): namesake} | found  # what came before it was removed
        return list(found.values())

    @functools.cached_property
    def _now_called(self) -> dict[str, list[str]]:
        """The removed values that are still there under another name, by that name."""
        renamed: dict[str, list[str]] = {}
        for name, made in self._made.items():
            # A step that only looks like a copy may have been folded, as the shape of a value is.
            if (
                name not in self._present
                and not _is_copy(made)
                and (now := self.find(name)) is not None
            ):
                renamed.setdefault(now, []).append(name)
        return renamed

    def _is_unchanged(
        self, before: Operation, after: Operation, renamed_constants: bool = False
    ) -> bool:
        """Return whether an operation does the same on the same inputs.

        A fusion gives an initializer new values under a new name, so a constant with another name counts
        only where the node still has the operation's own name.
        """
        return self._same_work(before, after) and all(
            old == new
            or (old in self._made and self.find(old) == new)
            or (renamed_constants and not {old, new} & self._made.keys() and old not in self._present)
            for old, new in zip(before.inputs, after.inputs, strict=True)
        )

    def _seen_by_readers(self, name: str) -> str | None:
        same_value = [name]
        for current in same_value:
            for reader, slot in self._readers.get(current, ()):
                now = self._after.get(reader.outputs[0]) if reader.outputs else None
                if self._does_it_again(reader, current):
                    continue
                if now is not None and self._same_work(reader, now):
                    return now.inputs[slot] or None
                if now is None and _is_copy(reader) and len(same_value) < _MOST_STEPS:
                    same_value.append(reader.outputs[0])
        return None

    def _does_it_again(self, reader: Operation, name: str) -> bool:
        """Whether an operation repeats the one whose result it reads: twice may be merged into once."""
        made = self._made.get(name)
        return (
            made is not None
            and len(made.inputs) == len(reader.inputs)
            and made.kind() == reader.kind()
        )

    def _under_a_reader_s_name(self, name: str) -> str | None:
        """An optimiser that removes a step without effect may keep the step's name for what came before it."""
        made = self._made.get(name)
        following = [name]
        for current in following:
            for reader, _ in self._readers.get(current, ()) if made is not None else ():
                now = self._after.get(reader.outputs[0]) if len(reader.outputs) == 1 else None
                if now is None and len(reader.outputs) == 1 and len(following) < _MOST_STEPS:
                    following.append(reader.outputs[0])
                elif now is not None and made is not None and self._is(made, now):
                    place = made.outputs.index(name)  # results that nothing reads may be gone
                    return now.outputs[place] if place < len(now.outputs) else None
        return None

    def _same_work(self, before: Operation, after: Operation) -> bool:
        return (
            len(before.inputs) == len(after.inputs)
            and self._changed.isdisjoint(after.inputs)
            and before.kind() == after.kind()
        )

    def _is(self, before: Operation, after: Operation) -> bool:
        """Whether an operation is still the same, whatever its results are called now."""
        return self._same_work(before, after) and all(
            old == new or self._found.get(old) == new
            for old, new in zip(before.inputs, after.inputs, strict=True)
        )


def _is_copy(gone: Operation) -> bool:
    """Nothing folds an operation of one input and no attribute into another: one that is gone was a copy."""
    return len(gone.inputs) == 1 and gone.plain and len(gone.outputs) == 1


_MOST_STEPS = 8
"""How many removed steps in a row are followed."""


def covered_modules(sites: Iterable[Site]) -> tuple[str, ...]:
    """Return the paths of the modules that operations ran in, sorted; none if it is only one module."""
    paths = {site.path for site in sites}
    return tuple(sorted(paths)) if len(paths) > 1 else ()


class TorchOptions(msgspec.Struct, frozen=True):
    """The arguments that go to `torch.onnx.export` as they are."""

    optimize: bool = True
    opset_version: int | None = None
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_shapes: Any = None
    external_data: bool | None = None
    verbose: bool = False
    with_graph_text: bool = False


class Baseline(msgspec.Struct, frozen=True):
    """A baseline as torch wrote it: its bytes (in memory, or in a file), and the evidence.

    `data` are the bytes of the `.onnx` file; `files` are the external data files beside it, by
    the names that the bytes refer to. `graph_text` is the exporter's own graph, for people, if
    it was asked for. `tracer_notes` say what a tracer fixed to the example inputs.
    """

    data: memoryview
    files: Mapping[str, Path]
    trace: Trace
    dropped_outputs: tuple[str, ...] = ()
    graph_text: str | None = None
    tracer_notes: tuple[TracerNote, ...] = ()


def map_file(path: Path) -> memoryview:
    """The bytes of a file without reading them into memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class TracerNote(NamedTuple):
    """One warning: the line of model code, and the first sentence of torch's message without folders."""

    place: str
    text: str
