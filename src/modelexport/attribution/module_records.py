"""The map of an export: the status and record of each module, the tag of each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from modelexport.attribution.evidence import Attribution, Facts
from modelexport.graph.flat import Graph
from modelexport.modules.record import ModuleRecord, ModuleStatus, NodeTag
from modelexport.modules.tags import nearest_tags
from modelexport.onnx_file import wire
from modelexport.onnx_file.doc_strings import rewrite_doc_strings
from modelexport.tagged.records import (
    METADATA_KEY,
    EmbeddedMap,
    ExportRecord,
    ModelRecord,
    Sidecar,
    encode_embedded,
    encode_tag,
    tags_digest,
)
from modelexport.tagged.tables import complete_sidecar, consumer_tags, embedded_map, tags_of_node


def module_statuses(
    facts: Facts, attributions: Sequence[Attribution | None]
) -> dict[str, ModuleStatus]:
    """The status of every module; a container that is never called itself goes by what it contains."""
    ran = _with_ancestors(
        facts, {call.path for call in facts.trace.log.calls} | facts.trace.ran_in_bodies
    )
    for path in facts.tree:  # what cannot be seen to run goes by the module around it
        if facts.tree[path].opaque and (not path or facts.tree.parent(path) in ran):
            ran.add(path)
    holding = _with_ancestors(facts, {answer.path for answer in attributions if answer is not None})
    status: dict[str, ModuleStatus] = {}
    for path in facts.tree:
        if path in holding:
            status[path] = ModuleStatus.NODES
        elif path in ran:
            status[path] = ModuleStatus.ABSORBED
        else:
            status[path] = ModuleStatus.UNUSED
    return status


def node_counts(facts: Facts, attributions: Sequence[Attribution | None]) -> dict[str, int]:
    """How many nodes each module has, those of the modules below it included."""
    counts = dict.fromkeys(facts.tree, 0)
    for answer in attributions:
        if answer is not None:
            counts[answer.path] += 1
    for path in reversed(list(facts.tree)):
        parent = facts.tree.parent(path)
        if parent is not None:
            counts[parent] += counts[path]
    return counts


def _with_ancestors(facts: Facts, paths: set[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for above in facts.tree.lineage(path):
            if above in found:
                break
            found.add(above)
    return found


class HierarchyMap(msgspec.Struct, frozen=True):
    """Everything that an export writes beside the baseline's own bytes."""

    node_tags: tuple[NodeTag | None, ...]
    sidecar: Sidecar

    @property
    def embedded(self) -> EmbeddedMap:
        return embedded_map(self.sidecar, tags_digest(self.sidecar.nodes, self.node_tags))


def build_map(
    facts: Facts,
    tags: dict[str, str | None],
    attributions: Sequence[Attribution | None],
    model: ModelRecord,
    export: ExportRecord,
) -> HierarchyMap:
    carried = nearest_tags(facts.tree, tags)
    primary = [None if answer is None else carried[answer.path] for answer in attributions]
    modules = _module_records(facts, tags, attributions)
    node_tags = tuple(_node_tags(facts.graph, attributions, primary))
    return HierarchyMap(node_tags, complete_sidecar(facts.graph, node_tags, model, export, modules))


def tagged_chunks(data: wire.Buffer, hierarchy: HierarchyMap) -> list[wire.Buffer]:
    """The baseline's bytes with the map put in."""
    tags: Iterator[NodeTag | None] = iter(hierarchy.node_tags)

    def doc_edit(old: bytes | None) -> bytes | None:
        tag = next(tags)
        return old if tag is None else encode_tag(tag)

    return rewrite_doc_strings(
        data, doc_edit, add_metadata=(METADATA_KEY, encode_embedded(hierarchy.embedded))
    )


def _module_records(
    facts: Facts, tags: dict[str, str | None], attributions: Sequence[Attribution | None]
) -> dict[str, ModuleRecord]:
    status = module_statuses(facts, attributions)
    counts = node_counts(facts, attributions)
    calls = facts.trace.log.count()
    order = _execution_order(facts)
    parameters = facts.tree.subtree_parameters()
    results, called_in = _results(facts), _called_in(facts, calls)
    return {
        path: ModuleRecord(
            tag=tags[path],
            class_=module.qualified_class,
            shown=tags[path] is not None,
            status=str(status[path]),
            calls=calls.get(path, 0),
            execution_order=order.get(path),
            forward_args=module.forward_args,
            parameters=parameters[path],
            direct_parameters=module.direct_parameters,
            children=module.children,
            aliases=module.aliases,
            more_aliases=module.more_aliases or msgspec.UNSET,
            nodes=counts[path],
            results=results.get(path, ()),
            called_in=called_in.get(path, ()),
            parameter_count=module.parameter_count,
        )
        for path, module in facts.tree.modules.items()
    }


def _results(facts: Facts) -> dict[str, tuple[tuple[str | None, ...], ...]]:
    """What each call of a module returned, as far as it is in the file."""
    found: dict[str, list[tuple[str | None, ...]]] = {}
    for number, call in enumerate(facts.trace.log.calls):
        found.setdefault(call.path, []).append(facts.trace.results.get(number, ()))
    return {path: tuple(results) for path, results in found.items() if any(results)}


def _called_in(facts: Facts, calls: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For modules below one that ran more than once: which of its calls each of theirs was part of."""
    log, tree = facts.trace.log, facts.tree
    around = {
        path: next((above for above in tree.lineage(path)[1:] if above in calls), None)
        for path in calls
    }
    found: dict[str, list[int]] = {}
    for number, call in enumerate(log.calls):
        above = around[call.path]
        if above is not None and calls[above] > 1:
            outer = log.enclosing(number, above)
            found.setdefault(call.path, []).append(-1 if outer is None else log.calls[outer].index)
    return {path: tuple(outer) for path, outer in found.items()}


def _execution_order(facts: Facts) -> dict[str, int]:
    """The rank of each module that ran; a container comes just before the first of its modules to run."""
    order: dict[str, int] = {}
    for call in facts.trace.log.calls:
        new = []
        for path in facts.tree.lineage(call.path):
            if path in order:
                break
            new.append(path)
        for path in reversed(new):
            order[path] = len(order)
    return order


def _node_tags(
    graph: Graph, attributions: Sequence[Attribution | None], primary: Sequence[str | None]
) -> list[NodeTag | None]:
    consumers = consumer_tags(graph, primary)
    node_tags: list[NodeTag | None] = []
    for node, proto, answer, tag in zip(
        graph.nodes, graph.protos, attributions, primary, strict=True
    ):
        if answer is None or tag is None:
            node_tags.append(None)
            continue
        tags = tags_of_node(node, tag, consumers)
        doc = proto.doc_string if proto.HasField("doc_string") else None
        node_tags.append(
            NodeTag(
                tags, tag, len(tags), answer.method, answer.path, answer.call, answer.covers, doc
            )
        )
    return node_tags
