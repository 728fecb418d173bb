"""What an exporter told of an export: which call made each tensor, and what each call returned."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from modelexport.hierarchy.calls import CallLog


class Site(NamedTuple):
    """A place in the model: a module, and the number of its call where that is known (else -1)."""

    path: str
    call: int = -1


class Trace(msgspec.Struct, frozen=True):
    """The exporter's own evidence, in terms of the tensor names of the file it wrote.

    `returned` has an entry for each call whose return value could be followed into the file:
    the names under which the values are still there, none if the exporter fused them away.
    """

    log: CallLog = CallLog()
    scopes: Mapping[str, Site] = {}
    returned: Mapping[int, tuple[str, ...]] = {}


class Operation(NamedTuple):
    """One operation of a graph, enough of it to recognise it again after an optimisation."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    kind: Callable[[], Hashable]
    """What it does, in any form that can be compared."""
    plain: bool
    """Whether it has no attributes."""


class Survivors:
    """Finds a value of the graph as first translated in the graph as finally written.

    Optimisers keep the name of a value that they keep. A value whose name is gone may live on
    under another: the operations that used to read it, if otherwise unchanged, tell which.
    """

    def __init__(self, before: Sequence[Operation], after: Sequence[Operation], present: frozenset[str]) -> None:
        self._present = present.union(*(operation.outputs for operation in after)) if after else present
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
            renamed = self._seen_by_readers(name)
            if renamed is not None:
                self._found[name] = renamed
                break
            made = self._made.get(name)
            # Nothing folds an operation of one input and no attribute into another: it was a copy.
            if made is None or len(made.inputs) != 1 or not made.plain or made.inputs[0] in chain:
                self._found[name] = None
                break
            name = made.inputs[0]
        answer = name if name in self._present else self._found[name]
        for passed in chain:
            self._found[passed] = answer
        return answer

    def _seen_by_readers(self, name: str) -> str | None:
        for reader, slot in self._readers.get(name, ()):
            now = self._after.get(reader.outputs[0]) if reader.outputs else None
            if now is not None and len(now.inputs) == len(reader.inputs) and now.kind() == reader.kind():
                return now.inputs[slot] or None
        return None


def settle_scopes(
    certain: Mapping[str, Site], translated: Iterable[tuple[str, Site]], survivors: Survivors
) -> dict[str, Site]:
    """The site of each tensor of the final graph: what is certain, then values followed from the translation."""
    scopes = dict(certain)
    for tensor, site in translated:
        now = survivors.find(tensor)
        if now is not None:
            scopes.setdefault(now, site)
    return scopes
