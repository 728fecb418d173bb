"""Read the evidence of a torchscript export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelexport.capture.calls import CallLog
from modelexport.capture.jit_lowering import Lowering, TranslatedNode
from modelexport.capture.jit_trace import inputs_of, kind_of, outputs_of
from modelexport.capture.trace import Operation, Site, Trace, ValueMatcher, covered_modules


def read_trace(log: CallLog, lowering: Lowering) -> Trace:
    """Read the evidence of a finished export.

    Args:
        log: The recorded calls.
        lowering: What became of the traced operations.

    Returns:
        The evidence, in terms of the names of the file.
    """
    names = lowering.final_names()
    nodes = list(lowering.final.nodes())
    final = [_final_operation(node) for node in nodes]
    present = frozenset(value.debugName() for value in lowering.final.inputs())
    before = [_translated_operation(node, names) for node in lowering.translated]
    matcher = ValueMatcher(before, final, present)
    calls = {
        _name_of(number, names): call
        for number, call in lowering.calls.items()
        if call < len(log.calls)
    }
    merged = {_name_of(number, names): more for number, more in lowering.merged.items()}
    scopes: dict[str, Site] = {}
    covers: dict[str, tuple[str, ...]] = {}
    last = -1
    for node, operation in zip(nodes, final, strict=True):
        ran_in = _calls_of_node(operation, matcher, calls)
        ran_in += [call for name in operation.outputs for call in merged.get(name, ())]
        # The scope decides for a node that no followed operation explains. The nodes of a call
        # stand together, so the call of the node before tells calls with one scope apart.
        scope = node.scopeName()
        recorded = lowering.reader.call_in(scope, ran_in[0] if ran_in else last) if scope else -1
        sites = [Site(log.calls[call].path, call) for call in (*ran_in, recorded) if call >= 0]
        if sites:
            last = sites[0].call
            scopes.update(dict.fromkeys(operation.outputs, sites[0]))
            covers[operation.outputs[0]] = covered_modules(sites)
    return Trace(log, scopes, covers, _results(log, lowering, matcher, names))


def _calls_of_node(
    operation: Operation, matcher: ValueMatcher, calls: Mapping[str, int]
) -> list[int]:
    """Return the calls of the operations that a node implements, that of its result first."""
    originals = matcher.original_operations(operation)
    followed = [calls[name] for old in originals for name in old.outputs if name in calls]
    return followed or [calls[name] for name in operation.outputs if name in calls]


def _results(
    log: CallLog, lowering: Lowering, matcher: ValueMatcher, names: Mapping[int, str]
) -> dict[int, tuple[str | None, ...]]:
    """Return the names in the file of the values that each call returned."""

    def find(value: int | None) -> str | None:
        return None if value is None else matcher.find(_name_of(value, names))

    return {
        number: tuple(
            find(lowering.onnx_value(name, call, log.calls[0].returned)) if name else None
            for name in call.returned
        )
        for number, call in enumerate(log.calls)
    }


def _name_of(number: int, names: Mapping[int, str]) -> str:
    """Return the name of a value in the file, or one that no value of the file has."""
    return names.get(number, f"%{number}")


def _translated_operation(node: TranslatedNode, names: Mapping[int, str]) -> Operation:
    return Operation(
        tuple(_name_of(number, names) for number in node.outputs),
        tuple(_name_of(number, names) for number in node.inputs),
        lambda: node.kind,
        node.plain,
    )


def _final_operation(node: Any) -> Operation:
    """Describe a written node; its attributes are read only if it has to be compared."""
    outputs = tuple([value.debugName() for value in outputs_of(node)])
    inputs = tuple([value.debugName() for value in inputs_of(node)])
    return Operation(outputs, inputs, lambda: kind_of(node)[0], False)
