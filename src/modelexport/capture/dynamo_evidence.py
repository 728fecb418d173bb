"""Read the evidence of a dynamo export."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from modelexport.capture.calls import Call, CallLog
from modelexport.capture.dynamo_translation import Translation, describe_node
from modelexport.capture.fx_trace import Decomposition, FxTraceReader, TracedNode, operation_of
from modelexport.capture.trace import Operation, Site, Trace, ValueMatcher, covered_modules
from modelexport.modules.tree import ModuleTree

# torch writes these names and marks, and documents none of them. Where one changes, nodes of
# dynamo exports lose their scopes, which tests/test_value.py shows.
_MODULE_STACK = "nn_module_stack"
"""Metadata of an FX node: the modules that it ran in, by call, the innermost last."""
_REPEATED_CALL = re.compile(r"@\d+$")
"""The mark on the path of a module in the stacks of its second and later calls."""
_NON_STRICT = "TorchExportNonStrictStrategy"
"""The one way to capture in which Python, and so the hooks, run."""


def read_trace(
    program: Any, tree: ModuleTree, log: CallLog, reader: FxTraceReader, translation: Translation
) -> Trace:
    """Read the evidence of a finished export.

    Args:
        program: The `ONNXProgram` that torch returned.
        tree: The modules of the model.
        log: The recorded calls; empty for a program that was exported before.
        reader: The trace.
        translation: The graph as first translated, and the steps of the optimiser.

    Returns:
        The evidence, in terms of the names of the file.
    """
    exported = program.exported_program
    fx_nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    # Private: the name of the way in which torch captured the model. Hooks run in one of them only;
    # without the attribute the calls are read from the module stacks.
    if not log.calls or getattr(program, "_capture_strategy", None) != _NON_STRICT:
        log = _log_from_stacks(fx_nodes, tree)
    origins = {node.name: _origin(node, log) for node in fx_nodes}
    origins = _align_blocks(fx_nodes, origins, log, reader)
    sites = {
        node.name: sites
        for node in fx_nodes
        if (sites := _sites(node, origins[node.name], log, tree))
    }
    returned = _returned_values(exported, reader, fx_nodes, origins, log, sites)
    graph = program.model.graph
    renamed = _renamed_outputs(translation, [value.name for value in graph.outputs])
    fx_names = {renamed.get(name, name): fx for name, fx in translation.fx_names.items()}
    final = [describe_node(node) for node in graph]
    matcher = _match_values(translation, renamed, graph, final)
    scopes: dict[str, Site] = {}
    covers: dict[str, tuple[str, ...]] = {}
    for node, operation in zip(graph, final, strict=True):
        names: Iterable[str] = translation.fx_nodes_of(node)
        # Constant folding adds nodes without a record of their origins.
        if not any(name in sites for name in names):
            originals = matcher.original_operations(operation)[:1]
            names = [fx_names[n] for old in originals for n in old.outputs if n in fx_names]
        ran_in = [site for name in names for site in sites.get(name, ())]
        if ran_in:
            scopes.update(dict.fromkeys(operation.outputs, ran_in[0]))
            covers[operation.outputs[0]] = covered_modules(ran_in)
    results = {
        number: tuple(
            matcher.find(name) if name in fx_names else None
            for name in (renamed.get(name, name) for name in values)
        )
        for number, values in enumerate(returned)
    }
    return Trace(log, scopes, covers, results)


def _match_values(
    translation: Translation, renamed: Mapping[str, str], graph: Any, final: Sequence[Operation]
) -> ValueMatcher:
    before = [_rename(operation, renamed) for operation in translation.operations]
    present = frozenset(
        value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name
    )
    return ValueMatcher(before, final, present, translation.changed_initializers(graph))


def _sites(node: Any, origin: str | None, log: CallLog, tree: ModuleTree) -> tuple[Site, ...]:
    """Return the call of an FX node, and the module that torch recorded if it is another one."""
    stack = list((node.meta.get(_MODULE_STACK) or {}).values())
    recorded = tree.canonical(_REPEATED_CALL.sub("", stack[-1][0])) if stack else None
    if origin is None:
        return () if recorded is None else (Site(recorded),)
    number = log.operation_calls[origin]
    ran_in = Site(log.calls[number].path, number)
    return (ran_in,) if recorded in (None, ran_in.path) else (ran_in, Site(recorded))


def _returned_values(
    program: Any,
    reader: FxTraceReader,
    fx_nodes: Sequence[Any],
    origins: Mapping[str, str | None],
    log: CallLog,
    sites: dict[str, tuple[Site, ...]],
) -> list[list[str]]:
    """Return for each call the program's names of what it returned.

    Adds to the sites: torch may repeat a view for a consumer in a later call, and then the view
    belongs to both calls.
    """
    user_outputs = set(program.graph_signature.user_outputs)
    outputs = [
        value
        for value in program.graph.output_node().args[0]
        if getattr(value, "name", None) in user_outputs
    ]
    traced = log.calls[0].returned if log.calls else ()
    pairs = list(zip(traced, outputs, strict=True)) if len(traced) == len(outputs) else []
    decomposition = Decomposition(reader, fx_nodes, origins, pairs)
    names: list[list[str]] = []
    for number, call in enumerate(log.calls):
        names.append([decomposition.find(name, call) if name else "" for name in call.returned])
        for name in names[-1]:
            is_later = name in sites and not log.within(sites[name][0].call, number)
            if is_later and decomposition.is_repeated_view(name):
                sites[name] = (Site(call.path, number), *sites[name])
    return names


def _renamed_outputs(translation: Translation, after: list[str]) -> dict[str, str]:
    """Return how the exporter renamed the graph's outputs at the end, by the names before.

    Another value that had the new name of an output before gets one that no value has.
    """
    renamed = {old: new for old, new in zip(translation.outputs, after, strict=False) if old != new}
    others = {
        name for operation in translation.operations for name in operation.outputs
    } - renamed.keys()
    return renamed | {name: f"{name} before" for name in others.intersection(renamed.values())}


def _rename(operation: Operation, renamed: Mapping[str, str]) -> Operation:
    if not renamed:
        return operation
    outputs = tuple(renamed.get(name, name) for name in operation.outputs)
    inputs = tuple(renamed.get(name, name) for name in operation.inputs)
    return operation._replace(outputs=outputs, inputs=inputs)


def _origin(node: Any, log: CallLog) -> str | None:
    """Return the traced operation that a node of the decomposed program comes from."""
    sources = list(node.meta.get("from_node") or ())
    names = [node.name]
    while sources:
        source = sources.pop()
        names.append(source.name)
        sources.extend(source.from_node or ())
    return next((name for name in reversed(names) if name in log.operation_calls), None)


def _align_blocks(
    fx_nodes: Sequence[Any], origins: dict[str, str | None], log: CallLog, reader: FxTraceReader
) -> dict[str, str | None]:
    """Give the nodes of blocks that torch wrapped into one operation origins of their own.

    torch wraps a block that runs in another gradient mode. It then inlines the block, and its nodes
    have no origin, or all have that of the last. Both programs have the same order, so within a
    block nodes are matched with the traced operations by what they do; a node without a match is a
    part of the next operation that has none.
    """
    position = {node.name: number for number, node in enumerate(reader.nodes)}
    used = {origin for origin in origins.values() if origin is not None}
    runs = [
        (origin, list(run))
        for origin, run in itertools.groupby(fx_nodes, lambda node: origins[node.name])
    ]
    aligned = dict(origins)
    start = 0
    for (origin, nodes), (following, _) in zip(runs, [*runs[1:], (None, [])], strict=True):
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


def _log_from_stacks(fx_nodes: list[Any], tree: ModuleTree) -> CallLog:
    """Return the calls according to the program's module stacks, where no hook could record them.

    torch keeps one stack for each node; the key of a stack differs between calls of one module.
    """
    calls: list[list[Any]] = []
    numbers: dict[tuple[Hashable, ...], int] = {}
    counts: dict[str, int] = {}
    operation_calls: dict[str, int] = {}
    for node in fx_nodes:
        chain: tuple[Hashable, ...] = ()
        number = -1
        for key, (name, _) in (node.meta.get(_MODULE_STACK) or {}).items():
            path = tree.canonical(name)
            if path is None:
                break
            chain = (*chain, key)
            if chain not in numbers:
                numbers[chain] = len(calls)
                calls.append([path, counts.get(path, 0), number, 0])
                counts[path] = counts.get(path, 0) + 1
            number = numbers[chain]
        if number >= 0:
            operation_calls[node.name] = number
    for number in reversed(range(len(calls))):
        calls[number][3] = max(calls[number][3], number + 1)
        parent = calls[number][2]
        if parent >= 0:
            calls[parent][3] = max(calls[parent][3], calls[number][3])
    return CallLog(tuple(Call(*call) for call in calls), operation_calls)
