"""Read the TorchScript graph while torch.jit traces it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from modelexport.capture.hooks import OpenCall, assign_operations

# The bindings of the JIT graph (`torch._C.Graph`, `Node`, `Value`) have no documented interface.
# Everything here goes by `kind`, `scopeName`, `unique` and the neighbours of a node, which
# torch's own exporter uses too.
BLOCK_START = "prim::Param"
"""The kind of the node before the first one of a block."""
_CALL_BLOCK = "prim::TracedModuleForward"
"""The kind of a node whose block has the operations of one call of a module."""
IN_PLACE = "_"
"""The end of the name of an operation that changes its first argument."""

OperationKey = tuple[str, str]
"""The kind and the scope of an operation, by which it is recognised in a copy of the graph."""

_NODE_NAME = "onnx_name"
"""The attribute in which the exporter keeps the name of a node until it writes the node."""


class TracedOperation(NamedTuple):
    """One operation of a graph; values are identified by their unique numbers."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int
    """The number of the call in which it ran, -1 if it is not known."""


class JitTraceReader:
    """Read the graph that torch.jit is tracing.

    Values are numbered as they are computed, so the number of a value is a position in the trace.
    """

    def __init__(self, look_up_values: bool = True) -> None:
        self.disturbed: bool = False
        """Whether a look-up added a node to the trace."""
        self.traced: dict[OperationKey, list[TracedOperation]] = {}
        self.rewritten: dict[int, list[int]] = {}
        """By value, the positions at which a view of it had been written to.

        At those positions the node of the value computes what the tensor held before the write.
        """
        self.writes: list[int] = []
        """The positions of the operations that change a tensor in place."""
        self._look_up_values = look_up_values
        self._latest = 0
        self._has_scopes = True
        self._scopes: Mapping[str, list[int]] = {}
        self._parents: list[int] = []

    def session(self) -> Any:
        """Return torch's state of the trace under way, None outside a trace."""
        # Private: the only access to the graph under construction; `torch.jit.is_tracing` only
        # tells whether there is one. Without it this exporter would have no evidence but scopes.
        return torch._C._get_tracing_state()

    def position(self) -> int:
        """Return the number of the newest value of the trace."""
        state = self.session()
        if state is not None:
            self._latest = max(self._latest, _last_unique(state.graph().insertPoint().prev()))
        return self._latest

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the number of a tensor's value, None for one that the trace did not compute."""
        state = self.session()
        if not self._look_up_values or state is None or (tensor.requires_grad and tensor.is_leaf):
            return None
        # Private: a tensor under a transform of torch.func is no value of the trace. The tracer
        # would keep it as a constant, and crash the process when the transform has ended.
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
        here = state.graph().insertPoint()
        before = here.prev()
        try:
            value = _look_up([tensor])
            # Private: torch counts the writes to a tensor and its views here, for autograd. More
            # writes than the value's nodes account for were made through a view.
            if not tensor.is_inference():
                version = tensor._version
                if version > _count_writes(value, version):
                    self.rewritten.setdefault(value.unique(), []).append(self._latest)
            return str(value.unique())
        except RuntimeError:  # a tensor without storage is no value of the trace
            return None
        finally:
            # The tracer adds a constant for a tensor that it does not know.
            self.disturbed = self.disturbed or here.prev() != before

    def scope_of(self, module: nn.Module) -> str:
        """Return the name that torch pushes on the trace's stack of scopes for this module."""
        # Private: torch's own table of these names while it traces; scope names cannot be derived
        # otherwise, because torch numbers repeated ones. Without it the scope of a node names no
        # call, and a node that was not followed takes the call of the node before it.
        return str((torch.jit._trace._trace_module_map or {}).get(module, ""))

    def assign_calls(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        """Index the operations traced so far, and return the number of the call of each."""
        state = self.session()
        if state is None:
            return {}
        self._latest = 0
        self._parents = [call.parent for call in calls]
        self._scopes = defaultdict(list)
        for number, call in enumerate(calls):
            self._scopes[call.scope].append(number)
        operations = list(_operations(state.graph()))
        marks = [(str(unique), unique) for node in operations for unique in node.outputs]
        operation_calls = assign_operations([(call.start, call.finish) for call in calls], marks)
        self.writes = [
            node.outputs[0] for node in operations if node.outputs and node.kind.endswith(IN_PLACE)
        ]
        self.traced = defaultdict(list)
        needed = _needed_values(operations, calls[0].returned)
        for node in operations:
            if needed is None or not needed.isdisjoint(node.outputs):
                number = operation_calls.get(str(node.outputs[0]), -1) if node.outputs else -1
                self.traced[node.kind, node.scope].append(
                    TracedOperation(node.inputs, node.outputs, number)
                )
        return operation_calls

    def forget_scopes(self) -> None:
        """Recognise operations by their kind alone.

        torch traces a quantized model into a compiled module before it exports it. Such a module
        has scopes with other names, and none for the second call of a module.
        """
        merged: dict[OperationKey, list[TracedOperation]] = defaultdict(list)
        for (kind, _), operations in self.traced.items():
            merged[kind, ""] += operations
        self.traced = {
            key: sorted(operations, key=lambda traced: traced.outputs)
            for key, operations in merged.items()
        }
        self._has_scopes = False
        self._scopes = {}

    def key_of(self, node: Any) -> OperationKey:
        """Return the key of a node in a copy of the traced graph."""
        return node.kind(), node.scopeName() if self._has_scopes else ""

    def call_in(self, scope: str, near: int) -> int:
        """Find the call with a scope that an operation was part of.

        `near` is the call of an operation close to it, and the answer if no call has the scope.
        Else it is, of the calls with this scope, the innermost around `near`, or the first after.
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
    """Return the inputs of a node; torch's own iterator over them costs twenty times as much."""
    return [node.inputsAt(slot) for slot in range(node.inputsSize())]


def outputs_of(node: Any) -> list[Any]:
    """Return the outputs of a node."""
    return [node.outputsAt(slot) for slot in range(node.outputsSize())]


def numbers_of(values: Sequence[Any]) -> tuple[int, ...]:
    """Return the unique numbers of values."""
    return tuple([value.unique() for value in values])


class _Node(NamedTuple):
    kind: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _operations(graph: Any) -> Iterator[_Node]:
    """Yield the operations of a trace in order, without constants, from the blocks of all calls."""
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
            yield _Node(kind, scope, numbers_of(inputs_of(node)), numbers_of(outputs_of(node)))


def _needed_values(operations: list[_Node], returned: tuple[str, ...]) -> set[int] | None:
    """Return the values that what the model returns depends on; None if that is not known.

    torch removes the other operations from the copy that it exports, except those that change a
    tensor in place.
    """
    needed = {int(unique) for unique in returned if unique}
    if not needed:
        return None
    for node in reversed(operations):
        if node.kind.endswith(IN_PLACE) or not needed.isdisjoint(node.outputs):
            needed.update(node.outputs)
            needed.update(node.inputs)
    return needed


def _last_unique(node: Any) -> int:
    """Return the number of the newest value at or before a node of the trace."""
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


def _count_writes(value: Any, limit: int) -> int:
    """Count the writes to a tensor among the nodes that its value depends on, up to a limit."""
    count = 0
    while count < limit:
        node = value.node()
        if not node.inputsSize():
            break
        count += node.kind().endswith(IN_PLACE)
        value = node.inputsAt(0)
    return count


def _look_up(holder: list[torch.Tensor]) -> Any:
    """Return the trace's value of the tensor in a list.

    The tracer names a value after a local variable that is the tensor, in the frame that asks or
    in the one that called it. Neither frame may have such a variable, or the look-up would rename
    values of the baseline: hence the list, and two functions.
    """
    return _look_up_in_own_frame(holder)


def _look_up_in_own_frame(holder: list[torch.Tensor]) -> Any:
    # Private: the tracer's table from tensors to values has no other access. Without it the
    # results of calls are not recorded; the modules of nodes do not depend on it.
    return torch._C._get_value_trace(holder[0])  # type: ignore[attr-defined]


def kind_of(node: Any) -> tuple[Hashable, bool]:
    """Return the operator and attributes of a node, comparable, and whether it has no attributes.

    A node without inputs is never compared, so its attributes are left out.
    """
    if not node.inputsSize() or not node.hasAttributes():
        return (node.kind(), ()), True
    names = sorted(name for name in node.attributeNames() if name != _NODE_NAME)
    attributes = tuple([(name, _attribute_key(node, name)) for name in names])
    return (node.kind(), attributes), not attributes


def _attribute_key(node: Any, name: str) -> str:
    kind = node.kindOf(name)
    if kind in ("i", "f", "s", "is", "fs", "ss"):
        return repr(getattr(node, kind)(name))
    return str(kind)
