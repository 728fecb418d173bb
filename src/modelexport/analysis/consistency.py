"""Check that nodes, metadata and sidecar agree with each other and with the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from modelexport.analysis.findings import Code, Finding, make_finding
from modelexport.analysis.recorded_map import RecordedMap
from modelexport.errors import plural
from modelexport.graph.flat import Graph, Node
from modelexport.modules.record import ModuleStatus, NodeTag
from modelexport.modules.tree import join_path
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.tagged.records import NodeRecord, Sidecar
from modelexport.tagged.tables import (
    compute_statistics,
    expected_hierarchy,
    tags_of_node,
    tensor_infos,
)


def check_agreement(recorded: RecordedMap) -> list[Finding]:
    """Find everything in the records of a file that does not agree, each thing once.

    Args:
        recorded: The map of the file.

    Returns:
        The findings, those on the metadata and the sidecar as such first.
    """
    if recorded.records is None:
        return recorded.findings
    topology = TopologyCheck(recorded)
    findings = [
        *recorded.findings,
        *_check_modules(recorded),
        *topology.findings,
        *_check_tags(recorded, topology.changed_values),
    ]
    if recorded.sidecar is not None:
        wrong = list(_check_sidecar(recorded, recorded.sidecar, topology.changed_values))
        # The digest is the last resort: it shows that something changed, but not what.
        is_explained = bool(wrong or topology.findings) or recorded.sidecar_intact
        if not is_explained and recorded.embedded is not None:
            message = "it was changed after the export"
            wrong.append(make_finding(Code.SIDECAR_WRONG, recorded.sidecar_name, message))
        findings += wrong
    return findings


def _check_modules(recorded: RecordedMap) -> Iterator[Finding]:
    """Check that the module tree is connected, and that every module that ran is accounted for."""
    modules = recorded.modules
    children = {
        join_path(path, child) for path, record in modules.items() for child in record.children
    }
    tags = {record.tag for record in modules.values()}
    counts = recorded.node_counts(recorded.tags)
    own = Counter(tag.hierarchy_module for tag in recorded.tags if tag is not None)
    for path, record in modules.items():
        above, _, _ = (record.tag or "").rpartition("/")
        if path and path not in children:
            yield make_finding(Code.PARENT_MISSING, path, "no module names it as a child")
        elif above and above not in tags:
            message = f"no module has the tag above {record.tag}"
            yield make_finding(Code.PARENT_MISSING, path, message)
        problem = None
        if counts[path] != record.nodes:
            problem = f"{plural(record.nodes, 'node')} recorded for it, {counts[path]:,} found"
        elif record.calls and not record.nodes and record.status != ModuleStatus.ABSORBED:
            problem = f"it ran and has no nodes, but its status is {record.status!r}"
        elif (own[path] and record.status != ModuleStatus.NODES) or (
            record.nodes and record.status == ModuleStatus.UNUSED
        ):
            problem = f"it has nodes, but its status is {record.status!r}"
        if problem is not None:
            yield make_finding(Code.MODULE_UNACCOUNTED, path, problem)
    sidecar = recorded.sidecar
    if sidecar is not None and sidecar.expected_hierarchy != expected_hierarchy(modules):
        message = "its expected_hierarchy does not match the module records"
        yield make_finding(Code.HIERARCHY_UNMET, recorded.sidecar_name, message)


class TopologyCheck:
    """A check of the graph against the export: by node with a sidecar, else as a whole.

    `changed_values` are the values whose producer or consumers are not those recorded.
    """

    def __init__(self, recorded: RecordedMap) -> None:
        self.findings: list[Finding] = []
        self.changed_values: set[str] = set()
        graph, file = recorded.model.graph, recorded.model.path.name
        if recorded.is_as_exported:
            return
        if recorded.sidecar is None:
            expected = recorded.embedded.topology if recorded.embedded is not None else ""
            if expected and topology_digest(graph, node_digests(graph)) != expected:
                self._add(Code.TOPOLOGY_CHANGED, file, "nodes or edges are not those of the export")
            return
        self._check_nodes(graph, recorded.sidecar.nodes)
        export, proto = recorded.sidecar.export, recorded.model.proto.graph
        if tensor_infos(proto.input) != export.inputs:
            self._add(Code.TOPOLOGY_CHANGED, file, "the graph's inputs are not those of the export")
        if tensor_infos(proto.output) != export.outputs:
            message = "the graph's outputs are not those of the export"
            self._add(Code.TOPOLOGY_CHANGED, file, message)

    def _check_nodes(self, graph: Graph, records: dict[str, NodeRecord]) -> None:
        for node, digest in zip(graph.nodes, node_digests(graph), strict=True):
            record = records.get(node.key)
            if record is None:
                self._add(Code.NODE_ADDED, node.key, f"this {node.op_type} was not in the export")
                self.changed_values.update((*node.inputs, *node.outputs))
            elif (record.inputs, record.op_type, record.attributes) != (
                node.inputs,
                node.op_type,
                digest,
            ):
                self._add_change(node, record)
        present = {node.key for node in graph.nodes}
        for key, record in records.items():
            if key not in present:
                message = f"the {record.op_type} that produced it at export is missing"
                self._add(Code.NODE_REMOVED, key, message)
                self.changed_values.update((key, *record.inputs))

    def _add_change(self, node: Node, record: NodeRecord) -> None:
        old, new = ", ".join(record.inputs), ", ".join(node.inputs)
        if record.op_type != node.op_type:
            message = f"it is a {node.op_type}; at export it was a {record.op_type}"
            self._add(Code.OPERATOR_CHANGED, node.key, message)
        elif record.inputs == node.inputs:
            message = f"the attributes of this {node.op_type} are not those of the export"
            self._add(Code.ATTRIBUTE_CHANGED, node.key, message)
        if record.inputs != node.inputs:
            self._add(Code.EDGE_MOVED, node.key, f"its inputs are {new}; at export: {old}")
            self.changed_values |= {*node.inputs} ^ {*record.inputs}

    def _add(self, code: Code, place: str, message: str) -> None:
        self.findings.append(make_finding(code, place, message))


def _check_tags(recorded: RecordedMap, changed_values: set[str]) -> Iterator[Finding]:
    """Check each node's own tag against the modules, the trusted tag and the node's consumers."""
    carried = recorded.carried_tags()
    known = set(carried.values())
    # Nodes of one module share a tag object, and values with equal consumers their tuple.
    correct: set[tuple[int, int]] = set()
    for (node, tag), trusted in zip(recorded.model.items(), recorded.tags, strict=True):
        if tag is None or trusted is None:
            continue
        consumers = recorded.consumers.get(node.outputs[0]) if len(node.outputs) == 1 else None
        pair = (id(tag), id(consumers))
        if tag is trusted and consumers is not None and pair in correct:
            continue
        path, module = tag.hierarchy_path, tag.hierarchy_module
        if path not in known:
            yield make_finding(Code.TAG_UNKNOWN, node.key, f"no module has the tag {path}")
        elif _identity(tag) != _identity(trusted):
            message = f"its tag says {_describe(tag)}; recorded is {_describe(trusted)}"
            yield make_finding(Code.TAG_WRONG, node.key, message)
        elif carried.get(module) != path:
            message = f"its tag is {path}, which is not that of its module {module!r}"
            yield make_finding(Code.TAG_WRONG, node.key, message)
        elif tag.hierarchy_tags == (expected := tags_of_node(node, path, recorded.consumers)):
            correct.add(pair)
        elif changed_values.isdisjoint(node.outputs):
            message = (
                f"its consumers are in {_join(expected[1:])}, "
                f"its tags name {_join(tag.hierarchy_tags[1:])}"
            )
            yield make_finding(Code.CONSUMERS_WRONG, node.key, message)


def _identity(tag: NodeTag) -> tuple[object, ...]:
    """Return what a tag says of the node itself, apart from its consumers."""
    return (
        tag.hierarchy_path,
        tag.hierarchy_module,
        tag.hierarchy_method,
        tag.hierarchy_call,
        tag.hierarchy_covers,
    )


def _describe(tag: NodeTag) -> str:
    return f"{tag.hierarchy_path} ({tag.hierarchy_module or 'the root'})"


def _join(tags: Sequence[str]) -> str:
    return ", ".join(tags) or "no other module"


def _check_sidecar(
    recorded: RecordedMap, sidecar: Sidecar, changed_values: set[str]
) -> Iterator[Finding]:
    """Check the sidecar's own tables against the file."""
    embedded = sidecar if recorded.embedded is None else recorded.embedded
    for path in {**sidecar.modules, **embedded.modules}:
        if sidecar.modules.get(path) != embedded.modules.get(path):
            message = "the sidecar and the file record this module differently"
            yield make_finding(Code.METADATA_DISAGREES, path, message)
    yield from _check_sidecar_tags(recorded, changed_values)
    for name in _wrong_values(recorded, sidecar):
        if name not in changed_values:
            message = "the sidecar's producer or consumers are not those in the graph"
            yield make_finding(Code.TENSOR_WRONG, name, message)
    expected = compute_statistics(
        sidecar.nodes, sidecar.modules, len(sidecar.tensors), sidecar.statistics.topology
    )
    if sidecar.statistics != expected:
        message = "its statistics are not those of its own records"
        yield make_finding(Code.SIDECAR_WRONG, recorded.sidecar_name, message)


def _check_sidecar_tags(recorded: RecordedMap, changed_values: set[str]) -> Iterator[Finding]:
    """Check the sidecar's tags against the trusted ones, and against the nodes' consumers."""
    tags = zip(recorded.model.items(), recorded.sidecar_tags or (), recorded.tags, strict=True)
    for (node, own), in_sidecar, trusted in tags:
        if in_sidecar is None or trusted is None or in_sidecar is own:
            continue
        if not changed_values.isdisjoint(node.outputs):
            continue
        if (in_sidecar.hierarchy_path, in_sidecar.hierarchy_module) != (
            trusted.hierarchy_path,
            trusted.hierarchy_module,
        ):
            message = f"expected {trusted.hierarchy_path}, got {in_sidecar.hierarchy_path}"
            yield make_finding(Code.SIDECAR_WRONG, node.key, message)
        elif in_sidecar.hierarchy_tags != tags_of_node(
            node, trusted.hierarchy_path, recorded.consumers
        ):
            message = "the tags in its record are not those of its consumers"
            yield make_finding(Code.SIDECAR_WRONG, node.key, message)


def _wrong_values(recorded: RecordedMap, sidecar: Sidecar) -> list[str]:
    """Return the values that are missing in the sidecar, or do not exist, or have wrong tags."""
    graph, consumers = recorded.model.graph, recorded.consumers
    wrong = [name for name in graph.tensors() if name not in sidecar.tensors]
    leaves = {*graph.inputs, *graph.initializers}
    for name, record in sidecar.tensors.items():
        index = graph.producer.get(name)
        exists = index is not None or name in leaves
        tag = None if index is None else recorded.primary[index]
        if not exists or record.producer != tag or record.consumers != consumers.get(name, ()):
            wrong.append(name)
    return wrong
