"""Read the TorchScript graph while torch.jit traces it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.capture.calls import assign_operations
from modelexport.capture.recorder import OpenCall

BLOCK_START = "prim::Param"
_CALL_BLOCK = "prim::TracedModuleForward"
CHANGES = "_"
"""How torch ends the name of an operation that changes its first argument."""


class TracedOperation(NamedTuple):
    """One operation of the trace; values go by their unique numbers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int


class JitTraceReader:
    """Reads the graph that torch.jit is tracing.

    Values are numbered as they are made, so a number is a position in the trace. `ask=False`
    leaves returned values alone, where asking for one would disturb the trace.
    """

    def __init__(self, ask: bool = True) -> None:
        self.disturbed = False
        self.traced: dict[tuple[str, str], list[TracedOperation]] = {}
        self.rewritten: dict[int, list[int]] = {}
        """By value the positions at which it had been written to through a view: its node is what it was before."""
        self.writes: list[int] = []
        """The positions of the operations that change a tensor."""
        self._ask = ask
        self._latest = 0
        self._scopes: Mapping[str, list[int]] = {}
        self._parents: list[int] = []

    def session(self) -> object:
        return torch._C._get_tracing_state()

    def position(self) -> int:
        state = torch._C._get_tracing_state()
        if state is not None:
            self._latest = max(self._latest, _last_unique(state.graph().insertPoint().prev()))
        return self._latest

    def name_of(self, tensor: torch.Tensor) -> str | None:
        state = torch._C._get_tracing_state()
        if not self._ask or state is None or (tensor.requires_grad and tensor.is_leaf):
            return None
        here = state.graph().insertPoint()
        before = here.prev()
        try:
            value = _ask([tensor])
            if not tensor.is_inference() and tensor._version > _writes_to(value, tensor._version):
                self.rewritten.setdefault(value.unique(), []).append(self._latest)
            return str(value.unique())
        except RuntimeError:  # what torch.vmap makes of a tensor is no value of the trace
            return None
        finally:
            self.disturbed = self.disturbed or here.prev() != before

    def scope_of(self, module: nn.Module) -> str:
        # torch's own table, which it pushes on the trace's stack of scopes when the module's forward begins.
        return str((torch.jit._trace._trace_module_map or {}).get(module, ""))

    def made_by(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        state = torch._C._get_tracing_state()
        if state is None:
            return {}
        self._latest = 0
        self._parents = [call.parent for call in calls]
        self._scopes = defaultdict(list)
        for number, call in enumerate(calls):
            self._scopes[call.scope].append(number)
        operations = list(_operations(state.graph()))
        marks = [(str(unique), unique) for node in operations for unique in node.outputs]
        made_by = assign_operations([(call.start, call.finish) for call in calls], marks)
        self.writes = [
            node.outputs[0] for node in operations if node.outputs and node.kind.endswith(CHANGES)
        ]
        self.traced = defaultdict(list)
        needed = _needed(operations, calls[0].returned)
        for node in operations:
            if needed is None or not needed.isdisjoint(node.outputs):
                number = made_by.get(str(node.outputs[0]), -1) if node.outputs else -1
                self.traced[node.kind, node.scope].append(
                    TracedOperation(node.inputs, node.outputs, number)
                )
        return made_by

    def forget_scopes(self) -> None:
        """Let operations be recognised by their kind alone, because the exporter does not keep the trace's scopes."""
        merged: dict[tuple[str, str], list[TracedOperation]] = defaultdict(list)
        for (kind, _), operations in self.traced.items():
            merged[kind, ""] += operations
        self.traced = {
            key: sorted(operations, key=lambda traced: traced.outputs)
            for key, operations in merged.items()
        }
        self._scopes = {}

    def call_in(self, scope: str, near: int) -> int:
        """Return the call with this scope that an operation was part of.

        Where several calls have the scope, it is `near` or the one around it, else the first after it.
        `near` is the answer for a scope that no call has.
        """
        candidates = self._scopes.get(scope, [])
        if not candidates:
            return near
        around = near
        while around >= 0:
            if around in candidates:
                return around
            around = self._parents[around]
        return next((number for number in candidates if number > near), candidates[-1])


def inputs_of(node: Any) -> list[Any]:
    """The values a node reads; torch's own iterator costs twenty times as much."""
    return [node.inputsAt(place) for place in range(node.inputsSize())]


def outputs_of(node: Any) -> list[Any]:
    return [node.outputsAt(place) for place in range(node.outputsSize())]


class _Node(NamedTuple):
    kind: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _operations(graph: Any) -> Iterator[_Node]:
    """The operations of a trace in order, constants left out; each call of a module is a block of its own."""
    pending = [(node, "") for node in reversed(list(graph.nodes()))]
    while pending:
        node, scope = pending.pop()
        kind = node.kind()
        if kind == _CALL_BLOCK:
            scope = node.scopeName()
            pending.extend(
                reversed([(inner, scope) for block in node.blocks() for inner in block.nodes()])
            )
        elif node.inputsSize():
            inputs = tuple([value.unique() for value in inputs_of(node)])
            yield _Node(kind, scope, inputs, tuple([value.unique() for value in outputs_of(node)]))


def _needed(operations: list[_Node], returned: tuple[str, ...]) -> set[int] | None:
    """The values that lead to what the model returns, or that change another in place; None if that is unknown."""
    needed = {int(unique) for unique in returned if unique}
    if not needed:
        return None
    for node in reversed(operations):
        if node.kind.endswith(CHANGES) or not needed.isdisjoint(node.outputs):
            needed.update(node.outputs)
            needed.update(node.inputs)
    return needed


def _last_unique(node: Any) -> int:
    """The number of the newest value at or before a node of the trace."""
    while True:
        count = node.outputsSize()
        kind = node.kind()
        if kind == BLOCK_START:
            return 0
        if count:
            return int(node.outputsAt(count - 1).unique())
        if kind == _CALL_BLOCK:
            inside = max(
                (_last_unique(block.returnNode().prev()) for block in node.blocks()), default=0
            )
            if inside:
                return inside
        node = node.prev()


def _writes_to(value: Any, most: int) -> int:
    """How many of the writes to a tensor its value has behind it, counted up to `most`."""
    count = 0
    while count < most:
        node = value.node()
        if not node.inputsSize():
            break
        count += node.kind().endswith(CHANGES)
        value = node.inputsAt(0)
    return count


def _ask(holder: list[torch.Tensor]) -> Any:
    """The trace's value for a tensor.

    The tracer names a value after a local variable, here or in the calling frame, that is the
    tensor; neither may be one, or asking would rename tensors of the baseline.
    """
    return _value_of(holder)


def _value_of(holder: list[torch.Tensor]) -> Any:
    return torch._C._get_value_trace(holder[0])  # type: ignore[attr-defined]


class Numbering:
    """Numbers the values of a graph in its order: equal values that are computed alike have one number."""

    def __init__(self) -> None:
        self._numbers: dict[int, Hashable] = {}
        self._first: dict[Hashable, list[int]] = {}

    def twins(self, node: Any) -> Iterator[tuple[int, int]]:
        """Yield each output of a node with that of the first node that does the same on the same inputs."""
        outputs = [value.unique() for value in outputs_of(node)]
        inputs = [value.unique() for value in inputs_of(node)]
        if node.kind().endswith(CHANGES) or not outputs:
            return
        constant = None if inputs else _constant_key(node)
        key = (
            node.kind(),
            constant,
            tuple([self._numbers.get(unique, unique) for unique in inputs]),
        )
        first = self._first.setdefault(key, outputs)
        self._numbers.update(zip(outputs, first, strict=False))
        if first is not outputs and inputs:
            yield from zip(outputs, first, strict=False)


def _constant_key(node: Any) -> Hashable:
    """Return a key that is equal for equal constants."""
    value = node.outputsAt(0).toIValue() if node.outputsSize() == 1 else None
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, repr(value)
    content = hashlib.sha256(
        value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )
    return str(value.dtype), tuple(value.shape), content.digest()
