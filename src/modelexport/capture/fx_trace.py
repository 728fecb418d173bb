"""Read the FX graph while torch.export traces it, and follow its values into the decomposed program."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from modelexport.capture.calls import Call, assign_operations
from modelexport.capture.recorder import OpenCall


class TracedNode(NamedTuple):
    """One node of the trace: what it does, the values it reads by their places, and what it writes to.

    `switches_mode` tells that it makes no value: it changes the mode of gradients, say.
    """

    name: str
    work: object
    reads: tuple[tuple[str, tuple[int, ...]], ...]
    writes: int | None
    switches_mode: bool


class FxTraceReader:
    """Reads the FX graph that torch.export is tracing."""

    def __init__(self) -> None:
        self.nodes: list[TracedNode] = []
        self.storages: dict[str, int | None] = {}
        self.rewritten: set[tuple[str, int]] = set()
        """Values by name and position that were written to through a view: their node is what they were before."""

    def _tracer(self) -> Any:
        mode = get_proxy_mode()
        return None if mode is None else mode.tracer

    def session(self) -> object:
        return self._tracer()

    def position(self) -> int:
        tracer = self._tracer()
        return 0 if tracer is None else len(tracer.graph.nodes)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        tracer = self._tracer()
        slot = None if tracer is None else get_proxy_slot(tensor, tracer, None)
        if slot is None:
            return None
        name = _traced_name(slot.proxy.node)
        if not tensor.is_inference() and tensor._version > _writes_to(
            slot.proxy.node, tensor._version
        ):
            self.rewritten.add((name, self.position()))
        return name

    def scope_of(self, module: nn.Module) -> str:
        return ""

    def made_by(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        tracer = self._tracer()
        if tracer is None:
            return {}
        nodes = list(tracer.graph.nodes)
        self.nodes = [_traced(node) for node in nodes]
        self.storages = {_traced_name(node): _storage(node) for node in nodes}
        spans = [(call.start, call.finish) for call in calls]
        return assign_operations(spans, [(node.name, place) for place, node in enumerate(nodes, 1)])


class Decomposition:
    """Finds the values of a trace in the program that torch decomposed it into.

    A node of the program tells which traced one it comes from. That does not do for a value that was
    written to through a view, nor for one of several results of an operation that was taken apart:
    there, what a later reader of the value reads in the program is the value.
    """

    def __init__(
        self,
        tap: FxTraceReader,
        nodes: Sequence[Any],
        origins: Mapping[str, str | None],
        returned: Sequence[tuple[str, Any]],
    ) -> None:
        self._tap = tap
        self._work = {node.name: node.work for node in tap.nodes}
        self._origins = origins
        self._returned = returned
        self._by_origin: dict[str, list[Any]] = {}
        for node in nodes:
            self._by_origin.setdefault(origins.get(node.name) or "", []).append(node)
        self._latest: dict[str, str] = {
            n: node.name for node in nodes if (n := self._result_name(node)) is not None
        }
        self._latest.update(
            {origin: name for name, origin in origins.items() if origin is not None}
        )
        self._readers: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {}
        self._writes: dict[int, list[int]] = {}
        for place, node in enumerate(tap.nodes, 1):
            if node.writes is not None:
                self._writes.setdefault(node.writes, []).append(place)
            for name, slot in node.reads:
                self._readers.setdefault(name, []).append((place, node.name, slot))

    def _result_name(self, node: Any) -> str | None:
        """What the trace calls this value, if its name can be known from this node alone."""
        if not _is_result_of(node):
            return self._origins.get(node.name) or ""
        made = node.args[0]
        origin = self._origins.get(made.name) or ""
        whole = self._work.get(origin, work_of(made)) == work_of(made)
        return f"{origin}[{node.args[1]}]" if whole else None

    def find(self, name: str, call: Call) -> str:
        """The program's name for a value that a call returned; empty where it cannot be told."""
        if name in self._latest and not self._is_rewritten(name, call.finish):
            return self._latest[name]
        value = next(self._read_later(name, call.finish), None)
        return "" if value is None else str(value.name)

    def _is_rewritten(self, name: str, position: int) -> bool:
        if (name, position) not in self._tap.rewritten:
            return False
        storage = self._tap.storages.get(name)
        return storage is None or bisect_right(self._writes.get(storage, ()), position) > 0

    def made_for_a_reader(self, name: str) -> bool:
        """Whether a node repeats a view for an operation that reads it: then it is not that operation's own."""
        origin = self._origins.get(name)
        return origin is not None and self._latest.get(origin) != name

    def _read_later(self, name: str, position: int) -> Iterator[Any]:
        """What those read that read the value after this position and before it is written to again."""
        storage = self._tap.storages.get(name)
        writes = self._writes.get(storage, []) if storage is not None else []
        until = next(iter(writes[bisect_right(writes, position) :]), None)
        readers = self._readers.get(name, [])
        for place, reader, slot in readers[
            bisect_right(readers, position, key=lambda reader: reader[0]) :
        ]:
            if until is not None and place >= until:
                break
            same = [
                node
                for node in self._by_origin.get(reader, ())
                if work_of(node) == self._work[reader]
            ]
            value = _at(same[0].args, slot) if len(same) == 1 else None
            if isinstance(value, torch.fx.Node):
                yield value
        if until is None:
            yield from (value for traced, value in self._returned if traced == name)


def _is_result_of(node: Any) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node)


def _traced(node: Any) -> TracedNode:
    makes_nothing = node.op == "call_function" and node.meta.get("val") is None
    return TracedNode(
        node.name, work_of(node), tuple(_reads(node.args)), _written(node), makes_nothing
    )


def _traced_name(node: Any) -> str:
    """A node by its name; one of several results of a node by that node's name and its place among them."""
    return f"{node.args[0].name}[{node.args[1]}]" if _is_result_of(node) else str(node.name)


def work_of(node: Any) -> object:
    """What a node does, whatever the types of its numbers."""
    return getattr(node.target, "overloadpacket", node.target)


def _reads(args: Any, slot: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    for place, value in enumerate(args):
        if isinstance(value, torch.fx.Node):
            yield _traced_name(value), (*slot, place)
        elif isinstance(value, list | tuple):
            yield from _reads(value, (*slot, place))


def _at(args: Any, slot: tuple[int, ...]) -> Any:
    for place in slot:
        if not isinstance(args, list | tuple) or place >= len(args):
            return None
        args = args[place]
    return args


def _first_alias(node: Any) -> Any:
    """How an operation treats its first argument: None where its result is a tensor of its own."""
    schema = getattr(node.target, "_schema", None)
    return schema.arguments[0].alias_info if schema is not None and schema.arguments else None


def _written(node: Any) -> int | None:
    alias = _first_alias(node)
    first = node.args[0] if node.args else None
    return (
        _storage(first)
        if alias is not None and alias.is_write and isinstance(first, torch.fx.Node)
        else None
    )


def _writes_to(node: Any, most: int) -> int:
    """How many of the writes to a tensor its node has behind it, counted up to `most`."""
    count = 0
    while count < most and isinstance(node, torch.fx.Node):
        alias = _first_alias(node)
        if alias is None:
            break
        count += alias.is_write
        node = node.args[0] if node.args else None
    return count


def _storage(node: Any) -> int | None:
    """The memory that a traced value is in; views share it."""
    value = node.meta.get("val")
    try:
        return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):  # sparse ones have none
        return None
