"""Watch a dynamo export from the translation through the optimiser, and read its evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from modelexport.capture.fx_trace import Decomposition, FxTraceReader, align_origins
from modelexport.capture.model_state import swap_attributes
from modelexport.capture.trace import (
    Call,
    CallLog,
    Operation,
    Site,
    Trace,
    ValueMatcher,
    covered_modules,
)
from modelexport.modules.tree import ModuleTree

# torch writes these names and marks, and documents none of them. Where one changes, nodes of
# dynamo exports lose their scopes, which tests/test_value.py shows.
_MODULE_STACK = "nn_module_stack"
"""Metadata of an FX node: the modules that it ran in, by call, the innermost last."""
_REPEATED_CALL = re.compile(r"@\d+$")
"""The mark on the path of a module in the stacks of its second and later calls."""
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of an ONNX node: the module paths of an FX node, then its name, as a printed list."""
_NON_STRICT = "TorchExportNonStrictStrategy"
"""The one way to capture in which Python, and so the hooks, run."""


def without_call(name: str) -> str:
    """Return a module's path or key without the mark of a second or later call."""
    return _REPEATED_CALL.sub("", name)


class Translation:
    """The ONNX graph as first translated, and what the optimiser does with its nodes."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.fx_names: dict[str, str] = {}
        """By ONNX value, the name of the FX node that it was translated from."""
        self.outputs: list[str] = []
        self._initializers: dict[str, Any] = {}
        self._values: list[tuple[str, Any]] = []
        """Each value of a node with its name, which the optimiser may change."""
        self._origins: dict[int, tuple[Any, dict[str, None]]] = {}
        """By the id of an ONNX node, the node and the FX nodes it implements.

        It holds the nodes so that no other object gets the id of a removed one.
        """

    def read(self, model: Any) -> None:
        """Read the graph as first translated, before version conversion."""
        graph = model.graph
        self.operations = [describe_node(node) for node in graph]
        self.fx_names = dict(_fx_names(graph))
        self.outputs = [value.name for value in graph.outputs]
        self._initializers = {name: v.const_value for name, v in graph.initializers.items()}

    def begin(self, model: Any) -> None:
        """Note which FX node each node implements, after version conversion."""
        for node in model.graph:
            self._values += [(value.name, value) for value in node.outputs if value.name]
            names = (self.fx_names[v.name] for v in node.outputs if v.name in self.fx_names)
            self._origins[id(node)] = (node, dict.fromkeys(names))

    def replace(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Note that the optimiser replaced nodes; the first old one computed the result."""
        names = {name: None for node in old for name in self.fx_nodes_of(node)}
        for node in new:
            self._origins[id(node)] = (node, {**self.fx_nodes_of(node), **names})

    def fx_nodes_of(self, node: Any) -> dict[str, None]:
        """Return the FX nodes that an ONNX node implements, that of its result first."""
        return self._origins[id(node)][1] if id(node) in self._origins else {}

    def renamed_values(self, graph: Any) -> dict[str, str]:
        """Return the new names of values that were renamed, by the names before.

        The optimiser gives the name of a graph output to the value that takes its place, and the
        exporter renames graph outputs at the end. Another value that had the new name of a value
        before gets a name that no value has.
        """
        present = {id(value) for node in graph for value in node.outputs}
        names = {name: value.name for name, value in self._values if id(value) in present}
        # Whatever was done to a graph output, it is the same value at the same position.
        names |= dict(zip(self.outputs, (value.name for value in graph.outputs), strict=False))
        renamed = {old: new for old, new in names.items() if old != new}
        others = {name for old in self.operations for name in old.outputs} - names.keys()
        return renamed | {name: f"{name} before" for name in others.intersection(renamed.values())}

    def changed_initializers(self, graph: Any) -> frozenset[str]:
        """Return the initializers to which the optimiser gave other values under their old names.

        It does so when it fuses a scale into them. An initializer that an operation used to
        compute is the folded value of that operation, and unchanged.
        """
        folded = {name for operation in self.operations for name in operation.outputs}
        return frozenset(
            name
            for name, value in graph.initializers.items()
            if name not in folded and value.const_value is not self._initializers.get(name)
        )


@contextmanager
def watch_translation() -> Iterator[Translation]:
    """Watch the translated graph, and each step of the optimiser, while the block runs."""
    # Private, all three, because neither torch nor onnxscript calls back:
    # - Version conversion drops the metadata of nodes, so the evidence has to be read before it.
    #   The exporter calls it as an attribute of `onnxscript_apis`.
    # - Of the nodes that the optimiser fuses, the file keeps the metadata of one. It merges the
    #   metadata whenever a rewrite rule replaces nodes.
    # - It removes common subexpressions one by one.
    # If one is renamed, entering the block fails; if one is called no more, fused nodes lose their
    # `hierarchy_covers` and nodes their scopes, which tests/test_value.py shows.
    from onnx_ir.passes.common import common_subexpression_elimination as elimination
    from onnxscript.utils.metadata_merger import MetadataMerger
    from torch.onnx._internal.exporter import _core

    translation = Translation()
    apis: Any = vars(_core)["onnxscript_apis"]
    convert = apis.convert_version
    merge = MetadataMerger.copy_merged_metadata
    eliminate = elimination._remove_node_and_replace_values

    def convert_version(model: Any, version: int) -> Any:
        translation.read(model)
        converted = convert(model, version)
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
        swap_attributes(apis, convert_version=convert_version),
        swap_attributes(MetadataMerger, copy_merged_metadata=copy_merged_metadata),
        swap_attributes(
            elimination, _remove_node_and_replace_values=remove_node_and_replace_values
        ),
    ):
        yield translation


def describe_node(node: Any) -> Operation:
    """Describe a node, so that it can be recognised after the optimiser.

    Its attributes are read now, because the optimiser changes them in place.
    """
    attributes = tuple(sorted((name, _attribute_key(a)) for name, a in node.attributes.items()))
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


def _fx_names(graph: Any) -> Iterator[tuple[str, str]]:
    """Yield each value with the name of the FX node that it was translated from."""
    for node in graph:
        scopes = node.metadata_props.get(_NAME_SCOPES)
        if scopes:
            fx_name = scopes.rpartition(", ")[2].strip("[]'\"")
            yield from ((value.name, fx_name) for value in node.outputs if value.name)


def read_trace(
    program: Any,
    tree: ModuleTree,
    log: CallLog,
    reader: FxTraceReader,
    translation: Translation,
    hooks_ran: bool = False,
) -> Trace:
    """Read the evidence of a finished export.

    Args:
        program: The `ONNXProgram` that torch returned.
        tree: The modules of the model.
        log: The recorded calls; none for a program that was exported before.
        reader: The trace.
        translation: The graph as first translated, and the steps of the optimiser.
        hooks_ran: Whether the caller captured the model in the way in which hooks run.

    Returns:
        The evidence, in terms of the names of the file.
    """
    exported, graph = program.exported_program, program.model.graph
    fx_nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    # Private: the name of the way in which torch captured the model. Hooks run in one of them only;
    # without the attribute the calls are read from the module stacks.
    hooks_ran = hooks_ran or getattr(program, "_capture_strategy", None) == _NON_STRICT
    if not log.calls or not hooks_ran:
        log = _log_from_stacks(fx_nodes, tree)
    origins = align_origins(fx_nodes, log, reader)
    sites = {
        node.name: sites
        for node in fx_nodes
        if (sites := _sites(node, origins[node.name], log, tree))
    }
    decomposition = Decomposition(reader, fx_nodes, origins, _model_outputs(exported, log))
    returned = _returned_values(decomposition, log, sites)
    renamed = translation.renamed_values(graph)
    # Of the values that became one, the first was computed and the others were copies of it.
    fx_names = {renamed.get(name, name): fx for name, fx in reversed(translation.fx_names.items())}
    final = [describe_node(node) for node in graph]
    matcher = _match_values(translation, graph, final, renamed, fx_names)
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
    names_of = [[renamed.get(value, value) for value in values] for values in returned]
    results = {
        number: tuple(matcher.find(name) if name in fx_names else None for name in names)
        for number, names in enumerate(names_of)
    }
    return Trace(log, scopes, covers, results)


def _match_values(
    translation: Translation,
    graph: Any,
    final: Sequence[Operation],
    renamed: Mapping[str, str],
    fx_names: Mapping[str, str],
) -> ValueMatcher:
    """Match the values of the graph as first translated with those of the file."""
    before = [old.rename(renamed) for old in translation.operations]
    present = {value.name for value in (*graph.inputs, *graph.initializers.values()) if value.name}
    inner = {name for node in graph for name in list(translation.fx_nodes_of(node))[1:]}
    fused = {value for value, fx_name in fx_names.items() if fx_name in inner}
    return ValueMatcher(before, final, present, translation.changed_initializers(graph), fused)


def _sites(node: Any, origin: str | None, log: CallLog, tree: ModuleTree) -> tuple[Site, ...]:
    """Return the call of an FX node, and the module that torch recorded if it is another one."""
    stack = list((node.meta.get(_MODULE_STACK) or {}).values())
    name = stack[-1][0] if stack else None
    recorded = None if name is None else tree.canonical(without_call(name))
    if origin is None:
        return () if recorded is None else (Site(recorded),)
    number = log.operation_calls[origin]
    ran_in = Site(log.calls[number].path, number)
    # What looks like the mark of a call may be the end of the module's own name.
    agrees = ran_in.path in (recorded, tree.canonical(name or ""))
    return (ran_in,) if agrees or recorded is None else (ran_in, Site(recorded))


def _model_outputs(program: Any, log: CallLog) -> list[tuple[str, Any]]:
    """Return the traced name and the program's node of each value that the model returned."""
    user_outputs = set(program.graph_signature.user_outputs)
    outputs = program.graph.output_node().args[0]
    nodes = [value for value in outputs if getattr(value, "name", None) in user_outputs]
    traced = log.calls[0].returned if log.calls else ()
    return list(zip(traced, nodes, strict=True)) if len(traced) == len(nodes) else []


def _returned_values(
    decomposition: Decomposition, log: CallLog, sites: dict[str, tuple[Site, ...]]
) -> list[list[str]]:
    """Return for each call the program's names of what it returned.

    Adds to the sites: torch may repeat a view for a consumer in a later call, and then the view
    belongs to both calls.
    """
    returned: list[list[str]] = []
    for number, call in enumerate(log.calls):
        names = [decomposition.find(name, call) if name else "" for name in call.returned]
        for name in names:
            is_later = name in sites and not log.within(sites[name][0].call, number)
            if is_later and decomposition.is_repeated_view(name):
                sites[name] = (Site(call.path, number), *sites[name])
        returned.append(names)
    return returned


def _log_from_stacks(fx_nodes: list[Any], tree: ModuleTree) -> CallLog:
    """Return the calls according to the program's module stacks, where no hook could record them.

    torch keeps one stack for each node; the key of a stack differs between calls of one module.
    """
    calls: list[tuple[str, int, int]] = []
    numbers: dict[tuple[Hashable, ...], int] = {}
    counts: Counter[str] = Counter()
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
                calls.append((path, counts[path], number))
                counts[path] += 1
            number = numbers[chain]
        if number >= 0:
            operation_calls[node.name] = number
    ends = list(range(1, len(calls) + 1))
    for number, (_, _, parent) in reversed(list(enumerate(calls))):
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
    logged = tuple(Call(*call, end) for call, end in zip(calls, ends, strict=True))
    return CallLog(logged, operation_calls)
