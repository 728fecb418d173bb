"""The map of an export: the record of each module and the tag of each node."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from modelexport.attribution.evidence import Facts
from modelexport.modules.record import Attribution, ModuleRecord, ModuleStatus
from modelexport.modules.tags import nearest_tags
from modelexport.modules.tree import ModuleTree
from modelexport.tagged.hierarchy_map import HierarchyMap, make_map
from modelexport.tagged.records import ExportRecord, ModelRecord


def build_map(
    facts: Facts,
    tags: dict[str, str | None],
    attributions: Sequence[Attribution | None],
    model: ModelRecord,
    export: ExportRecord,
) -> HierarchyMap:
    """Build the map of an export.

    Args:
        facts: The graph, the modules and the exporter's evidence.
        tags: The tag of each module, None for a hidden one.
        attributions: The module of each node, in the order of the graph.
        model: The record of the model.
        export: The record of the export.
    """
    modules = _module_records(facts, tags, attributions)
    tag_of = nearest_tags(facts.tree, tags)
    return make_map(facts.graph, attributions, tag_of, model, export, modules)


def _module_records(
    facts: Facts, tags: dict[str, str | None], attributions: Sequence[Attribution | None]
) -> dict[str, ModuleRecord]:
    nodes = _node_counts(facts.tree, attributions)
    ran = _modules_that_ran(facts)
    calls = facts.trace.log.count()
    order = _execution_order(facts)
    parameters = facts.tree.subtree_parameters()
    results, called_in = _results(facts), _called_in(facts, calls)

    def status_of(path: str) -> ModuleStatus:
        if nodes[path]:
            return ModuleStatus.NODES
        return ModuleStatus.ABSORBED if path in ran else ModuleStatus.UNUSED

    return {
        path: ModuleRecord(
            tag=tags[path],
            class_=module.qualified_class,
            shown=tags[path] is not None,
            status=str(status_of(path)),
            calls=calls[path],
            execution_order=order.get(path),
            forward_args=module.forward_args,
            parameters=parameters[path],
            direct_parameters=module.direct_parameters,
            children=module.children,
            aliases=module.aliases,
            more_aliases=module.more_aliases or msgspec.UNSET,
            nodes=nodes[path],
            results=results.get(path, ()),
            called_in=called_in.get(path, ()),
            parameter_count=module.parameter_count,
            flops=msgspec.UNSET if module.flops is None else module.flops,
        )
        for path, module in facts.tree.modules.items()
    }


def _node_counts(tree: ModuleTree, attributions: Iterable[Attribution | None]) -> dict[str, int]:
    """Return how many nodes each module has, with those of the modules below it."""
    counts = dict.fromkeys(tree, 0)
    for attribution in attributions:
        if attribution is not None:
            counts[attribution.path] += 1
    # The tree has each module before those below it.
    for path in reversed(list(tree)):
        parent = tree.parent(path)
        if parent is not None:
            counts[parent] += counts[path]
    return counts


def _modules_that_ran(facts: Facts) -> set[str]:
    """Return the modules that ran; a container that is never called ran if a module in it did."""
    tree, trace = facts.tree, facts.trace
    ran: set[str] = set()
    for path in {call.path for call in trace.log.calls} | trace.ran_in_subgraphs:
        ran.update(_lineage_until(tree, path, ran))
    # The calls of an opaque module cannot be recorded: it ran if the module around it did.
    for path in tree:
        if tree[path].opaque and (not path or tree.parent(path) in ran):
            ran.add(path)
    return ran


def _execution_order(facts: Facts) -> dict[str, int]:
    """Return the rank of each module that ran; a container comes just before its first module."""
    order: dict[str, int] = {}
    for call in facts.trace.log.calls:
        for path in reversed(_lineage_until(facts.tree, call.path, order)):
            order[path] = len(order)
    return order


def _lineage_until(tree: ModuleTree, path: str, known: Container[str]) -> list[str]:
    """Return a module and those above it, up to the first that is known."""
    return list(itertools.takewhile(lambda above: above not in known, tree.lineage(path)))


def _results(facts: Facts) -> dict[str, tuple[tuple[str | None, ...], ...]]:
    """Return what each call of a module returned, by the names in the file."""
    results: dict[str, list[tuple[str | None, ...]]] = {}
    for number, call in enumerate(facts.trace.log.calls):
        results.setdefault(call.path, []).append(facts.trace.results.get(number, ()))
    return {path: tuple(values) for path, values in results.items() if any(values)}


def _called_in(facts: Facts, calls: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return for modules below one that ran more than once the call of it that each call is in."""
    log, tree = facts.trace.log, facts.tree
    around = {
        path: next((above for above in tree.lineage(path)[1:] if above in calls), None)
        for path in calls
    }
    called_in: dict[str, list[int]] = {}
    for number, call in enumerate(log.calls):
        above = around[call.path]
        if above is not None and calls[above] > 1:
            outer = log.enclosing(number, above)
            index = -1 if outer is None else log.calls[outer].index
            called_in.setdefault(call.path, []).append(index)
    return {path: tuple(indices) for path, indices in called_in.items()}
