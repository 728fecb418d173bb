"""Read the FX graph while torch.export traces it, and find its values in the decomposed program."""

from __future__ import annotations

import itertools
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

# Private by its name only: torch's own way to flatten nested arguments.
from torch.utils._pytree import tree_leaves

from modelexport.capture.hooks import OpenCall, assign_operations
from modelexport.capture.trace import Call, CallLog


class TracedNode(NamedTuple):
    """One node of the trace."""

    name: str
    operation: object
    """What the node does, see `operation_of`."""
    inputs: tuple[tuple[str, int], ...]
    """The names of the values it consumes, and their positions among its flattened arguments."""
    written_storage: int | None
    """The memory that it writes to, for an operation in place."""
    switches_mode: bool
    """Whether it computes no value, as a node that changes the gradient mode."""


class FxTraceReader:
    """Read the FX graph that torch.export is tracing."""

    def __init__(self) -> None:
        self.nodes: list[TracedNode] = []
        self.storages: dict[str, int | None] = {}
        """By value, the memory that it is in, which views share."""
        self.rewritten: set[tuple[str, int]] = set()
        """The values whose views had been written to, with the positions at which they had been.

        At those positions the node of the value computes what the tensor held before the write.
        """

    def session(self) -> Any:
        """Return torch's tracer, None outside a trace."""
        mode = get_proxy_mode()
        return None if mode is None else mode.tracer

    def position(self) -> int:
        """Return the number of nodes traced so far."""
        tracer = self.session()
        return 0 if tracer is None else len(tracer.graph.nodes)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the value of a tensor, None for one that the trace did not compute."""
        tracer = self.session()
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
        """Index the nodes traced so far, and return the number of the call of each."""
        tracer = self.session()
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
            returned: The traced name and the program's node of each value that the model returned.
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
            (origin, name) for name, origin in origins.items() if origin is not None
        )
        self._consumers: dict[str, list[tuple[int, str, int]]] = {}
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
        """Return the program's name of a value that a call returned, "" if it is not determined."""
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
        """Return whether torch repeated a view for a consumer, which is then not its own."""
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
            values = tree_leaves(same[0].args) if len(same) == 1 else []
            if slot < len(values) and isinstance(values[slot], torch.fx.Node):
                yield values[slot]
        if until is None:
            yield from (value for traced, value in self._returned if traced == name)


def _origin(node: Any, log: CallLog) -> str | None:
    """Return the traced operation that a node names as its origin."""
    sources = list(node.meta.get("from_node") or ())
    names = [node.name]
    while sources:
        source = sources.pop()
        names.append(source.name)
        sources.extend(source.from_node or ())
    return next((name for name in reversed(names) if name in log.operation_calls), None)


def align_origins(
    fx_nodes: Sequence[Any], log: CallLog, reader: FxTraceReader
) -> dict[str, str | None]:
    """Return the traced operation that each node of the decomposed program comes from.

    A node names its origin, except in a block that torch wrapped into one operation, as it does
    with a block that runs in another gradient mode. It then inlines the block, and its nodes have
    no origin, or all have that of the last. Both programs have the same order, so within a block
    nodes are matched with the traced operations by what they do; a node without a match is a part
    of the next operation that has none.
    """
    origins = {node.name: _origin(node, log) for node in fx_nodes}
    position = {node.name: number for number, node in enumerate(reader.nodes)}
    used = {origin for origin in origins.values() if origin is not None}
    runs = [
        (origin, list(run))
        for origin, run in itertools.groupby(fx_nodes, lambda node: origins[node.name])
    ]
    aligned = dict(origins)
    start = 0
    for (origin, nodes), (following, _) in itertools.pairwise([*runs, (None, [])]):
        end = (
            position.get(following or "", len(position))
            if origin is None
            else position.get(origin, -1) + 1
        )
        block = [
            traced
            for traced in reader.nodes[start:end]
            if traced.name in log.operation_calls
            and (traced.name not in used or traced.name == origin)
        ]
        operations = [traced for traced in block if not traced.switches_mode]
        lost = [traced.operation for traced in operations if traced.name != origin]
        matching = sum(operation_of(node) in lost for node in nodes)
        # A node that changes the mode, or most of the lost operations, show a wrapped block.
        wrapped = matching > 0 and (len(operations) < len(block) or 2 * matching >= len(lost))
        if operations and (origin is None or wrapped):
            aligned.update(_match_block(operations, nodes))
        start = max(start, 1 + position.get(aligned[nodes[-1].name] or "", -1))
    return aligned


def _match_block(block: Sequence[TracedNode], nodes: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield each node of a block with the traced operation it comes from."""
    start = 0
    for node in nodes:
        operation = operation_of(node)
        match = next((i for i in range(start, len(block)) if block[i].operation == operation), None)
        yield node.name, block[min(start if match is None else match, len(block) - 1)].name
        start = start if match is None else match + 1


def operation_of(node: Any) -> object:
    """Return the operator of an FX node, without the overload.

    Decomposition chooses overloads by the types of numbers.
    """
    return getattr(node.target, "overloadpacket", node.target)


def _is_item(node: Any) -> bool:
    """Return whether a node takes one of several results of another node."""
    return node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node)


def _value_name(node: Any) -> str:
    """Return the name of a value; one of several results has its producer's name and an index."""
    return f"{node.args[0].name}[{node.args[1]}]" if _is_item(node) else str(node.name)


def _traced_node(node: Any) -> TracedNode:
    switches_mode = node.op == "call_function" and node.meta.get("val") is None
    inputs = tuple(
        (_value_name(value), slot)
        for slot, value in enumerate(tree_leaves(node.args))
        if isinstance(value, torch.fx.Node)
    )
    return TracedNode(node.name, operation_of(node), inputs, _written_storage(node), switches_mode)


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
