"""Follow traced TorchScript operations through the exporter to ONNX nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from modelexport.capture.calls import Call, CallLog
from modelexport.capture.jit_trace import (
    BLOCK_START,
    JitTraceReader,
    Numbering,
    TracedOperation,
    inputs_of,
    outputs_of,
)
from modelexport.capture.model_state import swap_attributes
from modelexport.capture.trace import Operation, Site, Trace, ValueMatcher, covered_modules

_TAKES_APART = "prim::ListUnpack"
_NODE_NAME = "onnx_name"
"""Where the exporter keeps a node's name until it writes it."""


class Lowering:
    """What became of each traced operation on its way to ONNX.

    Four graphs are passed through, each with numbers of its own: the one being traced, its inlined
    copy, the ONNX one as the symbolic functions made it, and a renumbered copy of that, which is
    optimised further and then written.
    """

    def __init__(self, tap: JitTraceReader) -> None:
        self.tap = tap
        self.final: Any = None
        self.made_by: dict[int, int] = {}
        self.translated: list[tuple[tuple[int, ...], tuple[int, ...], Any, bool]] = []
        self.outputs: list[int] = []
        self._inlined: dict[tuple[str, str], list[TracedOperation]] = {}
        self._replaced: list[tuple[tuple[str, str], TracedOperation]] = []
        self._traced_as: dict[int, TracedOperation] = {}
        self._inlined_as: dict[int, int] = {}
        self._translated_as: dict[int, int] = {}
        self._made_for: dict[int, list[int]] = {}
        self._twins: dict[int, int] = {}
        self.merged: dict[int, list[int]] = {}
        """By ONNX value the calls that did the same on the same inputs: the exporter did it once."""
        self._read_as: dict[int, list[tuple[int, int]]] = {}
        self._debug_names: dict[int, str] = {}
        self._values: dict[int, Any] = {}
        self._by_debug_name: dict[str, Any] = {}
        self._graph: Any = None
        self._last: Any = None
        self._last_call = -1
        self._last_result: int | None = None
        self._compiled = False

    def compile(self) -> None:
        """The model was traced into a compiled module first, as torch does with quantized ones.

        Such a module has scopes with other names, and none for the second call of a module.
        """
        self._compiled = True
        self.tap.forget_scopes()

    def _key(self, node: Any) -> tuple[str, str]:
        """Return the kind and the scope by which an operation is recognised."""
        return node.kind(), "" if self._compiled else node.scopeName()

    def inline(self, graph: Any) -> None:
        """The trace was inlined: the same operations in the same order, less some that nothing reads.

        An operation is recognised among those of its kind and scope by what it reads. Constants
        are not: a dropped one looks like any other, and who reads a constant tells enough.
        """
        upcoming = self.tap.traced
        first = dict.fromkeys(upcoming, 0)
        made = {
            unique
            for operations in upcoming.values()
            for traced in operations
            if traced.inputs
            for unique in traced.outputs
        }
        numbering = Numbering()
        inside_functions: list[tuple[list[int], tuple[int, ...]]] = []
        for node in graph.nodes():
            self._twins.update(numbering.twins(node))
            if not node.inputsSize():
                continue
            inputs = [value.unique() for value in inputs_of(node)]
            key = self._key(node)
            outputs = tuple([value.unique() for value in outputs_of(node)])
            self._inlined.setdefault(key, []).append(TracedOperation(tuple(inputs), outputs, -1))
            operations = upcoming.get(key, [])
            # What reads a dropped value was dropped too; where that rules out all, a value went unrecognised before.
            places = range(first.get(key, 0), len(operations))
            fitting = (p for p in places if self._reads_the_same(operations[p], inputs, made))
            place = next(fitting, None)
            if place is None:
                place = next(
                    (p for p in places if self._reads_the_same(operations[p], inputs, frozenset())),
                    None,
                )
            if place is not None:
                first[key] = place + 1
                for was, read in zip(operations[place].inputs, inputs, strict=True):
                    self._inlined_as.setdefault(
                        was, read
                    )  # what a function returned has another number
                for was, now in zip(operations[place].outputs, outputs, strict=False):
                    self._inlined_as[was] = now
                    self._traced_as[now] = operations[place]
            elif not key[1]:
                inside_functions.append((inputs, outputs))
        self._follow_functions(inside_functions)

    def _reads_the_same(self, traced: TracedOperation, inputs: list[int], made: Set[int]) -> bool:
        known = self._inlined_as
        return len(traced.inputs) == len(inputs) and all(
            known[was] == now if was in known else was not in made and now not in self._traced_as
            for was, now in zip(traced.inputs, inputs, strict=True)
        )

    def _follow_functions(
        self, operations: Sequence[tuple[Sequence[int], tuple[int, ...]]]
    ) -> None:
        """Give the operations of a compiled function, which have no scope, to the call that called the function.

        The trace has one operation for the whole function; its arguments are where the others begin.
        """
        if not operations:
            return
        seen = {id(traced) for traced in self._traced_as.values()}
        called = [t for found in self.tap.traced.values() for t in found if id(t) not in seen]
        of_argument: dict[int, TracedOperation] = {}
        for traced in sorted(called, key=lambda traced: traced.outputs, reverse=True):
            of_argument.update(
                (self._inlined_as[was], traced) for was in traced.inputs if was in self._inlined_as
            )
        made_in: dict[int, TracedOperation] = {}
        for inputs, outputs in operations:
            callers = (made_in.get(read) or of_argument.get(read) for read in inputs)
            function = next(filter(None, callers), None)
            if function is not None:
                made_in.update(dict.fromkeys(outputs, function))
        self._traced_as.update(made_in)

    def settle(self, graph: Any) -> None:
        """Before a symbolic function runs: the exporter may have put a folded constant after the last one's nodes."""
        added = self._added(graph)
        for node in added:
            self._note(node, self._last_call)
        if len(added) == 1 and added[0].outputsSize() == 1 and self._last_result is not None:
            self._translated_as[self._last_result] = added[0].outputsAt(0).unique()

    def translate(self, graph: Any, node: Any, result: Any) -> None:
        """After a symbolic function ran: note the ONNX nodes that it added for this traced node."""
        self._graph = graph
        outputs = [value.unique() for value in outputs_of(node)]
        traced = next(
            (self._traced_as[unique] for unique in outputs if unique in self._traced_as), None
        )
        if traced is not None:
            call = traced.call
        elif not node.inputsSize() and not node.scopeName():
            call = -1  # a constant of a compiled function, which its consumers place better
        else:
            call = self.tap.call_in(node.scopeName(), self._last_call)
        if call >= 0 and node.inputsSize():
            self._last_call = call
        if traced is None and node.inputsSize():
            inputs = tuple([value.unique() for value in inputs_of(node)])
            self._replaced.append((self._key(node), TracedOperation(inputs, tuple(outputs), call)))
        if traced is not None and self.tap.rewritten:
            self._note_reads(traced, node)
        added = self._added(graph)
        for new in added:
            self._note(new, call)
        if outputs:
            self._made_for[outputs[0]] = [
                value.unique() for new in added for value in outputs_of(new)
            ]
        results = result if isinstance(result, tuple | list) else (result,)
        for old, value in zip(outputs, results, strict=False):
            if isinstance(value, torch._C.Value):
                self._translated_as[old] = value.unique()
        self._last_result = outputs[0] if len(outputs) == 1 else None

    def _note_reads(self, traced: TracedOperation, node: Any) -> None:
        """Passes before the translation let an operation read what a write through a view made of a value."""
        for was, now in zip(traced.inputs, inputs_of(node), strict=False):
            if was in self.tap.rewritten:
                self._read_as.setdefault(was, []).append((traced.outputs[0], now.unique()))

    def _added(self, graph: Any) -> list[Any]:
        """The nodes at the end of the graph that were not there before."""
        added: list[Any] = []
        newest = walk = graph.return_node().prev()
        while walk.kind() != BLOCK_START and walk != self._last:
            added.append(walk)
            walk = walk.prev()
        self._last = newest
        return added[::-1]

    def _note(self, node: Any, call: int) -> None:
        outputs = tuple([value.unique() for value in outputs_of(node)])
        if node.inputsSize():
            inputs = tuple([value.unique() for value in inputs_of(node)])
            self.translated.append((outputs, inputs, *_kind(node)))
        if call >= 0:
            self.made_by.update(dict.fromkeys(outputs, call))

    def _follow_replaced(self) -> None:
        """Passes before the translation put some operations in place of others of their kind and scope.

        They read the same values, but for numbers, of which such a pass makes tensors.
        """
        computed = {
            unique
            for operations in self._inlined.values()
            for found in operations
            for unique in found.outputs
        }
        became: dict[int, int] = {}
        upcoming = {key: iter(operations) for key, operations in self._inlined.items()}

        def reads_the_same(old: TracedOperation, new: TracedOperation) -> bool:
            return len(old.inputs) == len(new.inputs) and all(
                became.get(was, was) == now or was not in computed
                for was, now in zip(old.inputs, new.inputs, strict=True)
            )

        for key, new in self._replaced:
            for old in upcoming.get(key, ()):
                if self._translated_as.keys().isdisjoint(old.outputs) and reads_the_same(old, new):
                    pairs = list(zip(old.outputs, new.outputs, strict=False))
                    became.update(pairs)
                    known = self._translated_as
                    known.update((was, known[now]) for was, now in pairs if now in known)
                    traced = self._traced_as.get(old.outputs[0])
                    if traced is not None:
                        made = self._made_for.get(new.outputs[0], ())
                        self.made_by.update(dict.fromkeys(made, traced.call))
                    break
        self._follow_lists(became)
        self._follow_twins(became)

    def _follow_twins(self, became: Mapping[int, int]) -> None:
        """An operation that repeats another one is removed before the translation."""
        for twin, first in self._twins.items():
            kept = became.get(first, first)
            if twin not in self._translated_as and kept in self._translated_as:
                self._translated_as[twin] = self._translated_as[kept]
                traced = self._traced_as.get(twin)
                if traced is not None:
                    for unique in self._made_for.get(kept, ()):
                        self.merged.setdefault(unique, []).append(traced.call)

    def _follow_lists(self, became: Mapping[int, int]) -> None:
        """An operation that makes a list, and the step that takes the list apart, become one with several results."""
        made = {
            unique: found
            for operations in self._inlined.values()
            for found in operations
            for unique in found.outputs
        }
        apart = [
            (scope, found)
            for (kind, scope), operations in self._inlined.items()
            if kind == _TAKES_APART
            for found in operations
        ]
        parts: dict[tuple[str, int, int], list[TracedOperation]] = {}
        for scope, found in apart:
            whole = made.get(found.inputs[0])
            if whole is not None:
                read = became.get(whole.inputs[0], whole.inputs[0])
                parts.setdefault((scope, read, len(found.outputs)), []).append(found)
        for (_, scope), new in self._replaced:
            waiting = parts.get((scope, new.inputs[0], len(new.outputs)))
            if waiting and len(new.outputs) > 1:
                for was, now in zip(waiting.pop(0).outputs, new.outputs, strict=True):
                    if now in self._translated_as:
                        self._translated_as.setdefault(was, self._translated_as[now])

    def translated_value(self, traced: str, call: Call, returned: Sequence[str]) -> int | None:
        """The ONNX value that what a call returned became, where it could be followed.

        `returned` are the trace's names for what the model returned.
        """
        value, position = int(traced), call.finish
        passed = bisect_right(self.tap.writes, position)
        if position not in self.tap.rewritten.get(value, ()) or not passed:
            return self._translated_as.get(self._inlined_as.get(value, -1))
        until = next(iter(self.tap.writes[passed:]), None)
        for place, now in self._read_as.get(value, ()):
            if place > position and (until is None or place <= until):
                return self._translated_as.get(now)
        if until is None and traced in returned and len(returned) == len(self.outputs):
            return self.outputs[returned.index(traced)]
        return None

    def renumber(self, copy: Any) -> None:
        """The graph was copied node by node: match the copy's values with the originals."""
        if self._graph is None:
            return
        self._follow_replaced()
        pairs = zip(self._graph.nodes(), copy.nodes(), strict=False)
        for old, new in pairs:
            for was, now in zip(outputs_of(old), outputs_of(new), strict=False):
                self._debug_names[was.unique()] = now.debugName()
                self._values[was.unique()] = now
        for was, now in zip(self._graph.inputs(), copy.inputs(), strict=False):
            self._values[was.unique()] = now
        self.outputs = [value.unique() for value in self._graph.outputs()]

    def finish(self, graph: Any) -> None:
        """Read the optimised graph; a value that a fusion replaced has kept its name."""
        self.final = graph
        self._by_debug_name = {
            value.debugName(): value for node in graph.nodes() for value in outputs_of(node)
        }

    def final_names(self) -> dict[int, str]:
        """The name in the file of each translated value that is still there."""
        names: dict[int, str] = {}
        for unique, value in self._values.items():
            try:
                names[unique] = value.debugName()
            except RuntimeError:  # the value was destroyed
                heir = self._by_debug_name.get(self._debug_names.get(unique, ""))
                if heir is not None:
                    names[unique] = heir.debugName()
        names.update(
            zip(self.outputs, (value.debugName() for value in self.final.outputs()), strict=False)
        )
        return names


@contextmanager
def watch_lowering(tap: JitTraceReader) -> Iterator[Lowering]:
    """See the graph at each stage of the exporter while the block runs."""
    from torch.onnx._internal.torchscript_exporter import utils

    lowering = Lowering(tap)
    symbolic, optimize, to_graph = (
        utils._run_symbolic_function,
        utils._optimize_graph,
        utils._model_to_graph,
    )
    pre_trace: Any = utils._pre_trace_quant_model

    inside_block = False

    def run_symbolic_function(graph: Any, block: Any, node: Any, *rest: Any) -> Any:
        # A node with blocks is in the graph before its blocks are translated. What is in them
        # goes with that node, so only nodes of the main graph are noted.
        nonlocal inside_block
        if inside_block:
            return symbolic(graph, block, node, *rest)
        lowering.settle(graph)
        inside_block = True
        try:
            result = symbolic(graph, block, node, *rest)
        finally:
            inside_block = False
        lowering.translate(graph, node, result)
        return result

    def optimize_graph(traced: Any, *args: Any, **kwargs: Any) -> Any:
        lowering.inline(traced)
        graph = optimize(traced, *args, **kwargs)
        lowering.renumber(graph)
        return graph

    def pre_trace_quant_model(model: Any, args: Any) -> Any:
        traced = pre_trace(model, args)
        if traced is not model:
            lowering.compile()
        return traced

    def model_to_graph(*args: Any, **kwargs: Any) -> Any:
        result = to_graph(*args, **kwargs)
        lowering.finish(result[0])
        return result

    with swap_attributes(
        utils,
        _run_symbolic_function=run_symbolic_function,
        _optimize_graph=optimize_graph,
        _pre_trace_quant_model=pre_trace_quant_model,
        _model_to_graph=model_to_graph,
    ):
        yield lowering


def _kept(kind: Hashable) -> Hashable:
    """What a node did when it was translated."""
    return kind


def _kind(node: Any) -> tuple[Any, bool]:
    """What an operation does, for comparison; a node that reads nothing is never compared."""
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


def read_trace(log: CallLog, lowering: Lowering) -> Trace:
    names = lowering.final_names()

    def name_for(unique: int) -> str:
        return names.get(unique, f"%{unique}")

    nodes = list(lowering.final.nodes())
    final = [_final_operation(node) for node in nodes]
    present = frozenset(value.debugName() for value in lowering.final.inputs())
    before = [
        Operation(
            tuple(map(name_for, outputs)), tuple(map(name_for, inputs)), partial(_kept, kind), plain
        )
        for outputs, inputs, kind, plain in lowering.translated
    ]
    survivors = ValueMatcher(before, final, present)
    made_by = {
        name_for(unique): call for unique, call in lowering.made_by.items() if call < len(log.calls)
    }
    merged = {name_for(unique): calls for unique, calls in lowering.merged.items()}
    scopes: dict[str, Site] = {}
    covers: dict[str, tuple[str, ...]] = {}
    last = -1
    for node, operation in zip(nodes, final, strict=True):
        made = [
            made_by[name]
            for old in survivors.implemented(operation)
            for name in old.outputs
            if name in made_by
        ]
        made = made or [made_by[name] for name in operation.outputs if name in made_by]
        made += [call for name in operation.outputs for call in merged.get(name, ())]
        scope = node.scopeName()
        recorded = lowering.tap.call_in(scope, made[0] if made else last) if scope else -1
        ran_in = [Site(log.calls[call].path, call) for call in (*made, recorded) if call >= 0]
        if ran_in:
            last = ran_in[0].call
            scopes.update(dict.fromkeys(operation.outputs, ran_in[0]))
            covers[operation.outputs[0]] = covered_modules(ran_in)
    results = {
        number: tuple(
            None if unique is None else survivors.find(name_for(unique))
            for unique in (
                lowering.translated_value(name, call, log.calls[0].returned) if name else None
                for name in call.returned
            )
        )
        for number, call in enumerate(log.calls)
    }
    return Trace(log, scopes, covers, results)


def _final_operation(node: Any) -> Operation:
    """A node as it is written; what it does is only looked at if a value has to be found through it."""
    outputs = tuple([value.debugName() for value in outputs_of(node)])
    inputs = tuple([value.debugName() for value in inputs_of(node)])
    return Operation(outputs, inputs, lambda: _kind(node)[0], False)
