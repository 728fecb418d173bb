"""Read the FX graph while torch.export traces it, and find its values in the decomposed program."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

# Experimental: the trace that torch.export has under way, and the FX node of a tensor in it. Both
# have no public counterpart: the program that torch.export returns has neither the calls of
# modules nor the values they returned. If torch moves them, importing the dynamo exporter fails.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from modelexport.capture.calls import Call, assign_operations
from modelexport.capture.recorder import OpenCall

Slot = tuple[int, ...]
"""The position of a value in nested arguments: an index for each level."""


class TracedNode(NamedTuple):
    """One node of the trace."""

    name: str
    operation: object
    """What the node does, see `operation_of`."""
    inputs: tuple[tuple[str, Slot], ...]
    """The names of the values it consumes, and where they stand in its arguments."""
    written_storage: int | None
    """The memory that it writes to, for an operation in place."""
    switches_mode: bool
    """Whether it computes no value, as a node that changes the gradient mode."""


class FxTraceReader:
    """Read the FX graph that torch.export is tracing."""

    def __init__(self) -> None:
        """Start before the trace."""
        self.nodes: list[TracedNode] = []
        self.storages: dict[str, int | None] = {}
        """By value, the memory that it is in, which views share."""
        self.rewritten: set[tuple[str, int]] = set()
        """The values whose views had been written to, with the positions at which they had been.

        At those positions the node of the value computes what the tensor held before the write.
        """

    def _tracer(self) -> Any:
        mode = get_proxy_mode()
        return None if mode is None else mode.tracer

    def session(self) -> object:
        """Return torch's tracer, None outside a trace."""
        return self._tracer()

    def position(self) -> int:
        """Return the number of nodes traced so far."""
        tracer = self._tracer()
        return 0 if tracer is None else len(tracer.graph.nodes)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the value of a tensor, None for one that the trace did not compute.

        Args:
            tensor: A tensor that a module returned.
        """
        tracer = self._tracer()
        proxy = None if tracer is None else get_proxy_slot(tensor, tracer, None)
        if proxy is None:
            return None
        node = proxy.proxy.node
        name = _value_name(node)
        # Private: torch counts the writes to a tensor and its views here, for autograd. More
        # writes than the value's nodes account for were made through a view.
        if not tensor.is_inference() and tensor._version > _count_writes(node, tensor._version):
            self.rewritten.add((name, self.position()))
        return name

    def scope_of(self, module: nn.Module) -> str:
        """Return no scope: the nodes of the trace have none of their own."""
        return ""

    def assign_calls(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        """Index the nodes traced so far, and return the number of the call of each.

        Args:
            calls: The calls recorded so far.
        """
        tracer = self._tracer()
        if tracer is None:
            return {}
        nodes = list(tracer.graph.nodes)
        self.nodes = [_traced_node(node) for node in nodes]
        self.storages = {_value_name(node): _storage(node) for node in nodes}
        spans = [(call.start, call.finish) for call in calls]
        marks = [(node.name, position) for position, node in enumerate(nodes, 1)]
        return assign_operations(spans, marks)


class Decomposition:
    """Find the values of a trace in the program that torch decomposed it into.

    A node of the program names the traced node that it comes from. That is not enough for a value
    whose view was written to, nor for one of several results of an operation that was decomposed:
    there, the value is what a later consumer of it consumes in the program.
    """

    def __init__(
        self,
        reader: FxTraceReader,
        nodes: Sequence[Any],
        origins: Mapping[str, str | None],
        returned: Sequence[tuple[str, Any]],
    ) -> None:
        """Index the trace and the program.

        Args:
            reader: The trace.
            nodes: The nodes of the program.
            origins: For each node of the program the name of the traced node it comes from.
            returned: What the model returned: the traced name and the program's node of each value.
        """
        self._reader = reader
        self._operations = {node.name: node.operation for node in reader.nodes}
        self._origins = origins
        self._returned = returned
        self._by_origin: dict[str, list[Any]] = {}
        for node in nodes:
            self._by_origin.setdefault(origins.get(node.name) or "", []).append(node)
        self._latest: dict[str, str] = {
            n: node.name for node in nodes if (n := self._traced_name(node)) is not None
        }
        self._latest.update(
            {origin: name for name, origin in origins.items() if origin is not None}
        )
        self._consumers: dict[str, list[tuple[int, str, Slot]]] = {}
        self._writes: dict[int, list[int]] = {}
        for position, node in enumerate(reader.nodes, 1):
            if node.written_storage is not None:
                self._writes.setdefault(node.written_storage, []).append(position)
            for name, slot in node.inputs:
                self._consumers.setdefault(name, []).append((position, node.name, slot))

    def _traced_name(self, node: Any) -> str | None:
        """Return the trace's name of a value, None if this node alone does not determine it."""
        if not _is_item(node):
            return self._origins.get(node.name) or ""
        producer = node.args[0]
        origin = self._origins.get(producer.name) or ""
        operation = operation_of(producer)
        is_whole = self._operations.get(origin, operation) == operation
        return f"{origin}[{node.args[1]}]" if is_whole else None

    def find(self, name: str, call: Call) -> str:
        """Find a value that a call returned.

        Args:
            name: The trace's name of the value.
            call: The call.

        Returns:
            The program's name of the value, "" if it cannot be determined.
        """
        if name in self._latest and not self._is_rewritten(name, call.finish):
            return self._latest[name]
        value = next(self._consumed_after(name, call.finish), None)
        return "" if value is None else str(value.name)

    def _is_rewritten(self, name: str, position: int) -> bool:
        if (name, position) not in self._reader.rewritten:
            return False
        storage = self._reader.storages.get(name)
        return storage is None or bisect_right(self._writes.get(storage, ()), position) > 0

    def is_repeated_view(self, name: str) -> bool:
        """Tell whether torch repeated a view for a consumer: then it is not the consumer's own.

        Args:
            name: The program's name of the view.
        """
        origin = self._origins.get(name)
        return origin is not None and self._latest.get(origin) != name

    def _consumed_after(self, name: str, position: int) -> Iterator[Any]:
        """Yield what the consumers after a position consume, up to the next write to the value."""
        storage = self._reader.storages.get(name)
        writes = self._writes.get(storage, []) if storage is not None else []
        until = next(iter(writes[bisect_right(writes, position) :]), None)
        consumers = self._consumers.get(name, [])
        start = bisect_right(consumers, position, key=lambda consumer: consumer[0])
        for at, consumer, slot in consumers[start:]:
            if until is not None and at >= until:
                break
            same = [
                node
                for node in self._by_origin.get(consumer, ())
                if operation_of(node) == self._operations[consumer]
            ]
            value = _argument(same[0].args, slot) if len(same) == 1 else None
            if isinstance(value, torch.fx.Node):
                yield value
        if until is None:
            yield from (value for traced, value in self._returned if traced == name)


def operation_of(node: Any) -> object:
    """Return what an FX node does.

    Args:
        node: The node.

    Returns:
        Its operator without the overload: decomposition chooses overloads by the types of numbers.
    """
    return getattr(node.target, "overloadpacket", node.target)


def _is_item(node: Any) -> bool:
    """Tell whether a node takes one of several results of another node."""
    return node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node)


def _value_name(node: Any) -> str:
    """Return the name of a value; one of several results has its producer's name and an index."""
    return f"{node.args[0].name}[{node.args[1]}]" if _is_item(node) else str(node.name)


def _traced_node(node: Any) -> TracedNode:
    switches_mode = node.op == "call_function" and node.meta.get("val") is None
    inputs = tuple(_input_slots(node.args))
    return TracedNode(node.name, operation_of(node), inputs, _written_storage(node), switches_mode)


def _input_slots(args: Any, outer: Slot = ()) -> Iterator[tuple[str, Slot]]:
    for index, value in enumerate(args):
        if isinstance(value, torch.fx.Node):
            yield _value_name(value), (*outer, index)
        elif isinstance(value, list | tuple):
            yield from _input_slots(value, (*outer, index))


def _argument(args: Any, slot: Slot) -> Any:
    for index in slot:
        if not isinstance(args, list | tuple) or index >= len(args):
            return None
        args = args[index]
    return args


def _first_alias(node: Any) -> Any:
    """Return how an operation aliases its first argument, None if its result is a new tensor."""
    # Private: the schema of an operator has no public accessor. Without it no write is seen, and a
    # value whose view was written to is taken for what it was before.
    schema = getattr(node.target, "_schema", None)
    return schema.arguments[0].alias_info if schema is not None and schema.arguments else None


def _written_storage(node: Any) -> int | None:
    alias = _first_alias(node)
    first = node.args[0] if node.args else None
    if alias is None or not alias.is_write or not isinstance(first, torch.fx.Node):
        return None
    return _storage(first)


def _count_writes(node: Any, limit: int) -> int:
    """Count the writes to a tensor among the nodes that its node depends on, up to a limit."""
    count = 0
    while count < limit and isinstance(node, torch.fx.Node):
        alias = _first_alias(node)
        if alias is None:
            break
        count += alias.is_write
        node = node.args[0] if node.args else None
    return count


def _storage(node: Any) -> int | None:
    """Return the identity of the memory that a traced value is in."""
    value = node.meta.get("val")
    try:
        # Private: the address of the storage object. The tensors of a trace have no data, so the
        # public `data_ptr` is the same for all of them.
        return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return None
