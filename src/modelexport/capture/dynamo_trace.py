"""Read the evidence of a dynamo export."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from modelexport.capture.calls import Call, CallLog
from modelexport.capture.fx_trace import Decomposition, FxTraceReader, TracedNode, work_of
from modelexport.capture.model_state import swap_attributes
from modelexport.capture.trace import Operation, Site, Trace, ValueMatcher, covered_modules
from modelexport.modules.tree import ModuleTree

_SCOPES = "pkg.torch.onnx.name_scopes"
_REPEATED_CALL = re.compile(r"@\d+$")
"""How torch marks the path of a module in the stack of its second and later calls."""


class Translation:
    """The ONNX graph as first translated, and what the optimiser makes of its nodes."""

    operations: list[Operation]
    fx_names: dict[str, str]
    outputs: list[str]
    weights: dict[str, Any]

    def __init__(self) -> None:
        self.operations, self.fx_names, self.outputs, self.weights = [], {}, [], {}
        self._origins: dict[int, tuple[Any, dict[str, None]]] = {}

    def read(self, model: Any) -> None:
        self.operations = [_operation(node) for node in model.graph]
        self.fx_names = _fx_names(model)
        self.outputs = [value.name for value in model.graph.outputs]
        self.weights = {name: value.const_value for name, value in model.graph.initializers.items()}

    def begin(self, model: Any) -> None:
        """Note which FX node each node implements; a node is kept, so that no other gets its id."""
        for node in model.graph:
            names = dict.fromkeys(
                self.fx_names[value.name] for value in node.outputs if value.name in self.fx_names
            )
            self._origins[id(node)] = (node, names)

    def replace(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Note that the optimiser put new nodes in place of others; the first one gave the result."""
        names = {name: None for node in old for name in self.implemented(node)}
        for node in new:
            self._origins[id(node)] = (
                node,
                {**self._origins.get(id(node), (node, {}))[1], **names},
            )

    def implemented(self, node: Any) -> dict[str, None]:
        """Return the FX nodes that a node implements, the one whose result it computes first."""
        return self._origins[id(node)][1] if id(node) in self._origins else {}

    def changed_weights(self, graph: Any) -> frozenset[str]:
        """Those that an optimiser gave other values, as it does when it fuses a scale into them.

        One that an operation used to compute is that operation's value, folded.
        """
        folded = {name for operation in self.operations for name in operation.outputs}
        weights = graph.initializers.items()
        return frozenset(
            n for n, v in weights if n not in folded and v.const_value is not self.weights.get(n)
        )


@contextmanager
def watch_translation() -> Iterator[Translation]:
    """See the translated graph before the exporter converts its version, and each step of its optimiser.

    Version conversion drops the nodes' metadata, so the evidence has to be taken before it. Of the nodes
    that the optimiser fuses, only the metadata of one is kept in the file. It merges metadata whenever it
    replaces nodes, and removes common subexpressions one by one: both are observed here.
    """
    from onnx_ir.passes.common import common_subexpression_elimination as elimination
    from onnxscript.utils.metadata_merger import MetadataMerger
    from torch.onnx._internal.exporter import _core

    translation = Translation()
    original: Any = vars(_core)["onnxscript_apis"]
    merge, eliminate = (
        MetadataMerger.copy_merged_metadata,
        elimination._remove_node_and_replace_values,
    )

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

        def convert_version(self, model: Any, version: int) -> Any:
            translation.read(model)
            converted = original.convert_version(model, version)
            translation.begin(converted)
            return converted

    def copy_merged_metadata(merger: Any, from_nodes: Iterable[Any], to: Any) -> None:
        merge(merger, from_nodes, to)
        translation.replace(from_nodes, to if isinstance(to, Iterable) else (to,))

    def remove_node_and_replace_values(
        graph: Any, /, remove_node: Any, remove_values: Any, new_values: Any
    ) -> None:
        translation.replace((remove_node,), [value.producer() for value in new_values][:1])
        eliminate(graph, remove_node, remove_values, new_values)

    with (
        swap_attributes(_core, onnxscript_apis=Watched()),
        swap_attributes(MetadataMerger, copy_merged_metadata=copy_merged_metadata),
        swap_attributes(
            elimination, _remove_node_and_replace_values=remove_node_and_replace_values
        ),
    ):
        yield translation


def _operation(node: Any) -> Operation:
    """One node; its attributes are read off now, because an optimiser may change them in place."""
    attributes = tuple(
        sorted((name, _attribute_key(value)) for name, value in node.attributes.items())
    )
    kind = (node.domain, node.op_type, attributes)
    return Operation(
        tuple(value.name or "" for value in node.outputs),
        tuple("" if value is None else value.name or "" for value in node.inputs),
        lambda: kind,
        not attributes,
    )


def _attribute_key(attribute: Any) -> str:
    value = attribute.value
    if isinstance(value, int | float | str | list | tuple):
        return repr(value)
    return repr((getattr(value, "dtype", None), getattr(value, "shape", None)))


def _fx_names(model: Any) -> dict[str, str]:
    """For each tensor the name of the FX node it was translated from."""
    names: dict[str, str] = {}
    for node in model.graph:
        scopes = node.metadata_props.get(_SCOPES)
        if scopes:
            fx_name = scopes.rpartition(", ")[2].strip("[]'\"")
            names.update(
                dict.fromkeys((value.name for value in node.outputs if value.name), fx_name)
            )
    return names


def read_trace(
    program: Any, tree: ModuleTree, log: CallLog, tap: FxTraceReader, translation: Translation
) -> Trace:
    fx_nodes = [node for node in program.exported_program.graph.nodes if node.op == "call_function"]
    if (
        not log.calls
        or getattr(program, "_capture_strategy", None) != "TorchExportNonStrictStrategy"
    ):
        log = _log_from_stacks(fx_nodes, tree)
    origins = _aligned(fx_nodes, {node.name: _origin(node, log) for node in fx_nodes}, log, tap)
    sites = {
        node.name: sites
        for node in fx_nodes
        if (sites := _sites(node, origins[node.name], log, tree))
    }
    program_names = _returned_values(program.exported_program, tap, fx_nodes, origins, log, sites)
    graph = program.model.graph
    renamed = _renamed_outputs(translation, [value.name for value in graph.outputs])
    before = [_rename(operation, renamed) for operation in translation.operations]
    translated = {
        renamed.get(tensor, tensor): fx_name for tensor, fx_name in translation.fx_names.items()
    }
    given = frozenset(
        value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name
    )
    changed = translation.changed_weights(graph)
    final = [_operation(node) for node in graph]
    survivors = ValueMatcher(before, final, given, changed)
    scopes: dict[str, Site] = {}
    covers: dict[str, tuple[str, ...]] = {}
    for node, operation in zip(graph, final, strict=True):
        names = list(translation.implemented(node))
        if not any(
            name in sites for name in names
        ):  # made by constant folding, which says nothing of origins
            made = survivors.implemented(operation)
            names = [
                translated[name] for old in made[:1] for name in old.outputs if name in translated
            ]
        ran_in = [site for name in names for site in sites.get(name, ())]
        if ran_in:
            scopes.update(dict.fromkeys(operation.outputs, ran_in[0]))
            covers[operation.outputs[0]] = covered_modules(ran_in)
    results = {
        number: tuple(
            survivors.find(name) if name in translated else None
            for name in (renamed.get(name, name) for name in program_names[number])
        )
        for number in range(len(log.calls))
    }
    return Trace(log, scopes, covers, results)


def _sites(node: Any, origin: str | None, log: CallLog, tree: ModuleTree) -> tuple[Site, ...]:
    """Return the call that an FX node was made in, and the module that torch recorded if it is another one."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    recorded = tree.canonical(_REPEATED_CALL.sub("", stack[-1][0])) if stack else None
    if origin is None:
        return () if recorded is None else (Site(recorded),)
    number = log.made_by[origin]
    made = Site(log.calls[number].path, number)
    return (made,) if recorded in (None, made.path) else (made, Site(recorded))


def _returned_values(
    program: Any,
    tap: FxTraceReader,
    fx_nodes: Sequence[Any],
    origins: Mapping[str, str | None],
    log: CallLog,
    sites: dict[str, tuple[Site, ...]],
) -> list[list[str]]:
    """For each call the program's names for what it returned.

    torch may repeat a view where it is read, in a later call: the view is then of both calls.
    """
    user_outputs = set(program.graph_signature.user_outputs)
    given = [
        value
        for value in program.graph.output_node().args[0]
        if getattr(value, "name", None) in user_outputs
    ]
    traced = log.calls[0].returned if log.calls else ()
    returned = list(zip(traced, given, strict=True)) if len(traced) == len(given) else []
    decomposition = Decomposition(tap, fx_nodes, origins, returned)
    names: list[list[str]] = []
    for number, call in enumerate(log.calls):
        names.append([decomposition.find(name, call) if name else "" for name in call.returned])
        for name in names[-1]:
            made_later = name in sites and not log.within(sites[name][0].call, number)
            if made_later and decomposition.made_for_a_reader(name):
                sites[name] = (Site(call.path, number), *sites[name])
    return names


def _renamed_outputs(translation: Translation, after: list[str]) -> dict[str, str]:
    """How graph outputs were renamed at the end, in their order; who had an output's name before loses it."""
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
    """The traced operation that a node of the decomposed program comes from."""
    sources = list(node.meta.get("from_node") or ())
    names = [node.name]
    while sources:
        source = sources.pop()
        names.append(source.name)
        sources.extend(source.from_node or ())
    return next((name for name in reversed(names) if name in log.made_by), None)


def _aligned(
    fx_nodes: Sequence[Any], origins: dict[str, str | None], log: CallLog, tap: FxTraceReader
) -> dict[str, str | None]:
    """Give the nodes of blocks that torch wrapped into one operation origins of their own.

    torch does so with a block in another gradient mode. It then inlines the block, whose nodes have no origin
    or all have that of the last. Both programs have the same order, so within a block nodes are matched with
    the traced operations by what they do; one without a match is a part of the next that has none.
    """
    place = {node.name: number for number, node in enumerate(tap.nodes)}
    used = {origin for origin in origins.values() if origin is not None}
    runs = [
        (origin, list(run))
        for origin, run in itertools.groupby(fx_nodes, lambda node: origins[node.name])
    ]
    aligned = dict(origins)
    start = 0
    for (origin, nodes), (following, _) in zip(runs, [*runs[1:], (None, [])], strict=True):
        end = (
            place.get(following or "", len(place)) if origin is None else place.get(origin, -1) + 1
        )
        block = [
            t
            for t in tap.nodes[start:end]
            if t.name in log.made_by and (t.name not in used or t.name == origin)
        ]
        operations = [traced for traced in block if not traced.switches_mode]
        lost = [traced.work for traced in operations if traced.name != origin]
        found = sum(work_of(node) in lost for node in nodes)
        wrapped = found > 0 and (len(operations) < len(block) or 2 * found >= len(lost))
        if operations and (origin is None or wrapped):
            aligned.update(_match(operations, nodes))
        start = max(start, 1 + place.get(aligned[nodes[-1].name] or "", -1))
    return aligned


def _match(block: Sequence[TracedNode], nodes: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield each node of a block with the traced operation it comes from."""
    at = 0
    for node in nodes:
        found = next((i for i in range(at, len(block)) if block[i].work == work_of(node)), None)
        yield node.name, block[min(at if found is None else found, len(block) - 1)].name
        at = at if found is None else found + 1


def _log_from_stacks(fx_nodes: list[Any], tree: ModuleTree) -> CallLog:
    """The calls as the program's own module stacks tell them, where no hook could see them.

    torch keeps one stack a node; a stack's key differs between the calls of one module.
    """
    calls: list[list[Any]] = []
    numbers: dict[tuple[Hashable, ...], int] = {}
    counts: dict[str, int] = {}
    made_by: dict[str, int] = {}
    for node in fx_nodes:
        chain: tuple[Hashable, ...] = ()
        number = -1
        for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items():
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
            made_by[node.name] = number
    for number in reversed(range(len(calls))):
        calls[number][3] = max(calls[number][3], number + 1)
        parent = calls[number][2]
        if parent >= 0:
            calls[parent][3] = max(calls[parent][3], calls[number][3])
    return CallLog(tuple(Call(*call) for call in calls), made_by)
