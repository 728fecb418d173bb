"""Follow traced TorchScript operations through the exporter to ONNX nodes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from modelexport.capture.jit_inlining import InlinedGraph
from modelexport.capture.jit_trace import (
    BLOCK_START,
    JitTraceReader,
    OperationKey,
    TracedOperation,
    inputs_of,
    kind_of,
    numbers_of,
    outputs_of,
)
from modelexport.capture.model_state import swap_attributes
from modelexport.capture.trace import Call, Operation

_LIST_UNPACK = "prim::ListUnpack"


class Lowering:
    """What became of each traced operation on its way to ONNX.

    The operations pass through four graphs, each with its own numbers for values: the trace, its
    inlined copy, the ONNX graph that the symbolic functions build, and a renumbered copy of that,
    which is optimised further and written. Values of the third one are named after their numbers,
    with names that no value of the file has.
    """

    def __init__(self, reader: JitTraceReader) -> None:
        self.reader = reader
        self.final: Any = None
        """The graph as it is written."""
        self.translated: list[Operation] = []
        """The ONNX nodes as the symbolic functions added them."""
        self.calls: dict[str, int] = {}
        """By ONNX value, the call in which its operation ran."""
        self.merged: dict[str, list[int]] = {}
        """By ONNX value, the calls that repeated its operation, which the exporter kept once."""
        self._inlined: InlinedGraph
        self._outputs: list[str] = []
        """The outputs of the translated graph."""
        self._onnx_values: dict[int, str] = {}
        """By value of the inlined graph, the ONNX value that it became."""
        self._added_for: dict[int, tuple[str, ...]] = {}
        """By first output of an inlined operation, all ONNX values that were added for it."""
        self._replacements: list[tuple[OperationKey, TracedOperation]] = []
        """The operations that are not in the inlined graph: passes put them in place of others."""
        self._consumed: dict[int, list[tuple[int, int]]] = {}
        """By traced value, the positions of its consumers and the inlined value that each has."""
        self._debug_names: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        """By ONNX value, the value of the renumbered copy."""
        self._by_debug_name: dict[str, Any] = {}
        self._graph: Any = None
        self._last_node: Any = None
        self._last_call = -1
        self._last_output: int | None = None
        self._inside_block = False

    def inline(self, graph: Any) -> None:
        """Match the operations of the trace with those of its inlined copy."""
        self._inlined = InlinedGraph(graph, self.reader)

    def _note_added(self, graph: Any) -> None:
        """Note what the exporter added after the last symbolic function: it may fold the result."""
        added = self._added_nodes(graph)
        for node in added:
            self._add(node, self._last_call)
        if len(added) == 1 and added[0].outputsSize() == 1 and self._last_output is not None:
            self._onnx_values[self._last_output] = _name(added[0].outputsAt(0))

    def run_symbolic(self, symbolic: Any, graph: Any, block: Any, node: Any, *rest: Any) -> Any:
        """Run a symbolic function, and note the nodes that it adds to the main graph.

        A node with blocks is in the graph before its blocks are translated. What they contain
        belongs to the module of that node, so nothing is noted while a block is translated.
        """
        if self._inside_block:
            return symbolic(graph, block, node, *rest)
        self._note_added(graph)
        self._inside_block = True
        try:
            result = symbolic(graph, block, node, *rest)
        finally:
            self._inside_block = False
        self._translate(graph, node, result)
        return result

    def _translate(self, graph: Any, node: Any, result: Any) -> None:
        """Note the ONNX nodes that a symbolic function added for a node of the inlined graph."""
        self._graph = graph
        inputs, outputs = numbers_of(inputs_of(node)), numbers_of(outputs_of(node))
        origins = self._inlined.origins
        traced = next((origins[value] for value in outputs if value in origins), None)
        if traced is None and not inputs and not node.scopeName():
            call = -1  # a constant of a compiled function: its consumers tell where it belongs
        elif traced is None:
            call = self.reader.call_in(node.scopeName(), self._last_call)
            if inputs and outputs:
                key = self.reader.key_of(node)
                self._replacements.append((key, TracedOperation(inputs, outputs, call)))
        else:
            call = traced.call
            self._note_consumed(traced, inputs)
        if call >= 0 and inputs:
            self._last_call = call
        added = self._added_nodes(graph)
        for new in added:
            self._add(new, call)
        if outputs:
            self._added_for[outputs[0]] = tuple(_name(v) for new in added for v in outputs_of(new))
        results = result if isinstance(result, tuple | list) else (result,)
        for old, value in zip(outputs, results, strict=False):
            # Private: the class of a value of the JIT graph. A symbolic function may return a
            # Python constant instead, which is no value of the graph.
            if isinstance(value, torch._C.Value):
                self._onnx_values[old] = _name(value)
        self._last_output = outputs[0] if len(outputs) == 1 else None

    def _note_consumed(self, traced: TracedOperation, inputs: Sequence[int]) -> None:
        """Note the inputs of an operation that were written to through a view.

        Passes before the translation give the consumer of such a value the result of the write.
        """
        for old, new in zip(traced.inputs, inputs, strict=False):
            if old in self.reader.rewritten:
                self._consumed.setdefault(old, []).append((traced.outputs[0], new))

    def _added_nodes(self, graph: Any) -> list[Any]:
        """Return the nodes that were added to the end of the graph since the last call."""
        added: list[Any] = []
        newest = node = graph.return_node().prev()
        while node.kind() != BLOCK_START and node != self._last_node:
            added.append(node)
            node = node.prev()
        self._last_node = newest
        return added[::-1]

    def _add(self, node: Any, call: int) -> None:
        outputs = tuple(map(_name, outputs_of(node)))
        if node.inputsSize():
            # Read now, because optimisers change attributes in place.
            kind, plain = kind_of(node)
            inputs = tuple(map(_name, inputs_of(node)))
            self.translated.append(Operation(outputs, inputs, lambda: kind, plain))
        if call >= 0:
            self.calls.update(dict.fromkeys(outputs, call))

    def renumber(self, copy: Any) -> None:
        """Match the values of the translated graph with those of its renumbered copy."""
        if self._graph is None:
            return
        self._follow_passes()
        for old_node, new_node in zip(self._graph.nodes(), copy.nodes(), strict=False):
            for old, new in zip(outputs_of(old_node), outputs_of(new_node), strict=False):
                self._debug_names[_name(old)] = new.debugName()
                self._values[_name(old)] = new
        for old, new in zip(self._graph.inputs(), copy.inputs(), strict=False):
            self._values[_name(old)] = new
        self._outputs = [_name(value) for value in self._graph.outputs()]

    def _follow_passes(self) -> None:
        """Find the ONNX values of the operations that passes before the translation removed."""
        producers = {
            value: operation
            for operations in self._inlined.operations.values()
            for operation in operations
            for value in operation.outputs
        }
        replaced = self._follow_replaced(producers)
        self._follow_unpacked(producers, replaced)
        self._follow_repeated(replaced)

    def _link(self, old: int, new: int) -> None:
        """Let an inlined value that has no ONNX value share that of another one."""
        if new in self._onnx_values:
            self._onnx_values.setdefault(old, self._onnx_values[new])

    def _follow_replaced(self, producers: Mapping[int, TracedOperation]) -> dict[int, int]:
        """Follow operations that were replaced by others of their kind and scope.

        The inputs are the same, except numbers, which such a pass turns into tensors. Returns the
        value that replaced each value.
        """
        replaced: dict[int, int] = {}
        upcoming = {key: iter(operations) for key, operations in self._inlined.operations.items()}

        def has_same_inputs(old: TracedOperation, new: TracedOperation) -> bool:
            return len(old.inputs) == len(new.inputs) and all(
                replaced.get(before, before) == after or before not in producers
                for before, after in zip(old.inputs, new.inputs, strict=True)
            )

        for key, new in self._replacements:
            for old in upcoming.get(key, ()):
                if self._onnx_values.keys().isdisjoint(old.outputs) and has_same_inputs(old, new):
                    for before, after in zip(old.outputs, new.outputs, strict=False):
                        replaced[before] = after
                        self._link(before, after)
                    traced = self._inlined.origins.get(old.outputs[0])
                    if traced is not None:
                        added = self._added_for.get(new.outputs[0], ())
                        self.calls.update(dict.fromkeys(added, traced.call))
                    break
        return replaced

    def _follow_unpacked(
        self, producers: Mapping[int, TracedOperation], replaced: Mapping[int, int]
    ) -> None:
        """Follow lists: a pass merges what makes a list and what unpacks it into one operation."""
        unpacked: dict[tuple[str, int, int], list[TracedOperation]] = {}
        for (kind, scope), operations in self._inlined.operations.items():
            for unpack in operations if kind == _LIST_UNPACK else ():
                producer = producers.get(unpack.inputs[0])
                if producer is not None:
                    source = replaced.get(producer.inputs[0], producer.inputs[0])
                    key = (scope, source, len(unpack.outputs))
                    unpacked.setdefault(key, []).append(unpack)
        for (_, scope), new in self._replacements:
            waiting = unpacked.get((scope, new.inputs[0], len(new.outputs)))
            if waiting and len(new.outputs) > 1:
                for before, after in zip(waiting.pop(0).outputs, new.outputs, strict=True):
                    self._link(before, after)

    def _follow_repeated(self, replaced: Mapping[int, int]) -> None:
        """Follow operations that repeat an earlier one: a pass removes the repetitions."""
        for value, first in self._inlined.repeated.items():
            kept = replaced.get(first, first)
            if value not in self._onnx_values and kept in self._onnx_values:
                self._link(value, kept)
                traced = self._inlined.origins.get(value)
                if traced is not None:
                    for added in self._added_for.get(kept, ()):
                        self.merged.setdefault(added, []).append(traced.call)

    def onnx_value(self, traced: str, call: Call, model_returned: Sequence[str]) -> str | None:
        """Find the ONNX value that a call returned, None if it could not be followed.

        Args:
            traced: The trace's name of the returned value.
            call: The call.
            model_returned: The trace's names of what the model returned.
        """
        value, position = int(traced), call.finish
        writes = self.reader.writes
        written = bisect_right(writes, position)
        if position not in self.reader.rewritten.get(value, ()) or not written:
            return self._onnx_values.get(self._inlined.values.get(value, -1))
        # The node of the value is what it was before a write: what a consumer has between this
        # write and the next is what the call returned.
        until = writes[written] if written < len(writes) else None
        for consumer, consumed in self._consumed.get(value, ()):
            if consumer > position and (until is None or consumer <= until):
                return self._onnx_values.get(consumed)
        if until is None and traced in model_returned and len(model_returned) == len(self._outputs):
            return self._outputs[model_returned.index(traced)]
        return None

    def finish(self, graph: Any) -> None:
        """Note the optimised graph; a value that a fusion replaced has kept its debug name.

        The exporter gives values other names afterwards, so the debug names are read here, and the
        names in the file only when it is written.
        """
        self.final = graph
        self._by_debug_name = {
            value.debugName(): value for node in graph.nodes() for value in outputs_of(node)
        }

    def final_names(self) -> dict[str, str]:
        """Return the name in the file of each translated value that is there."""
        names: dict[str, str] = {}
        for name, value in self._values.items():
            try:
                names[name] = value.debugName()
            except RuntimeError:  # torch destroyed the value
                successor = self._by_debug_name.get(self._debug_names.get(name, ""))
                if successor is not None:
                    names[name] = successor.debugName()
        outputs = [value.debugName() for value in self.final.outputs()]
        names.update(zip(self._outputs, outputs, strict=False))
        return names


def _name(value: Any) -> str:
    return f"%{value.unique()}"


@contextmanager
def watch_lowering(reader: JitTraceReader) -> Iterator[Lowering]:
    """Watch the graph at each stage of the exporter while the block runs."""
    # Private: the exporter has no callbacks, and the file keeps neither calls nor removed values.
    # It calls these four functions through its module, once an export or once a node. If torch
    # renames one, entering the block fails; if it calls one no more, nodes have scopes as their
    # only evidence, which tests/test_value.py shows.
    from torch.onnx._internal.torchscript_exporter import utils

    lowering = Lowering(reader)
    symbolic, optimize = utils._run_symbolic_function, utils._optimize_graph
    to_graph, pre_trace = utils._model_to_graph, cast(Any, utils._pre_trace_quant_model)

    def optimize_graph(traced: Any, *args: Any, **kwargs: Any) -> Any:
        lowering.inline(traced)
        graph = optimize(traced, *args, **kwargs)
        lowering.renumber(graph)
        return graph

    def pre_trace_quant_model(model: Any, args: Any) -> Any:
        traced = pre_trace(model, args)
        if traced is not model:
            reader.forget_scopes()
        return traced

    def model_to_graph(*args: Any, **kwargs: Any) -> Any:
        result = to_graph(*args, **kwargs)
        lowering.finish(result[0])
        return result

    with swap_attributes(
        utils,
        _run_symbolic_function=partial(lowering.run_symbolic, symbolic),
        _optimize_graph=optimize_graph,
        _pre_trace_quant_model=pre_trace_quant_model,
        _model_to_graph=model_to_graph,
    ):
        yield lowering
