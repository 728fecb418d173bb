"""Check that nodes, metadata and sidecar agree with each other and with the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from modelexport.analysis.findings import Code, Finding, make_finding
from modelexport.errors import FormatError, first_line, plural
from modelexport.graph.flat import Graph, Node
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import ModuleRecord, ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry, join_path, subtree_totals
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.tagged.model import TaggedModel, mismatch_reason, recorded_tags
from modelexport.tagged.records import (
    FORMAT,
    METADATA_KEY,
    EmbeddedMap,
    NodeRecord,
    Sidecar,
    encode_sidecar,
    sidecar_path,
    tags_digest,
    text_digest,
)
from modelexport.tagged.tables import (
    compute_statistics,
    consumer_tags,
    expected_hierarchy,
    tags_of_node,
    tensor_infos,
)


class RecordedMap:
    """The three records of a map, and the tags to trust where they disagree.

    The sidecar's tags are trusted, unless the digest recorded at export shows that the tags of the
    nodes are unchanged. The sidecar is not even parsed where digests show that nothing changed.

    Attributes:
        findings: What is wrong with the metadata and the sidecar as such.
        embedded: The file's metadata, if it is readable and unchanged.
        changed_metadata: The file's metadata, if it is readable and was changed.
        sidecar: The sidecar, if it is readable and belongs to the file.
        tags_intact: Whether the nodes' tags have the digest recorded at export.
        sidecar_intact: Whether the sidecar has the digest recorded at export.
        is_as_exported: Whether graph, tags and sidecar all have the digests recorded at export.
        records: The record that the modules come from.
        sidecar_tags: The tag of each node in the sidecar; None without a sidecar.
        tags: The trusted tag of each node.
        primary: The trusted primary tag of each node.
        consumers: The trusted tags of the consumers of each value.
    """

    def __init__(self, model: TaggedModel) -> None:
        self.model = model
        self.findings: list[Finding] = []
        self.changed_metadata: EmbeddedMap | None = None
        self.embedded: EmbeddedMap | None = self._read_embedded()
        self.tags_intact: bool = (
            self.embedded is not None
            and self.embedded.tags_digest == self.compute_tags_digest(model.tags)
        )
        self.is_as_exported: bool = self._is_as_exported()
        self.sidecar: Sidecar | None = None if self.is_as_exported else self._read_sidecar()
        self.sidecar_intact: bool = self.is_as_exported or (
            self.embedded is not None
            and self.sidecar is not None
            and self.embedded.sidecar_digest == text_digest(encode_sidecar(self.sidecar))
        )
        self.records: EmbeddedMap | Sidecar | None = (
            self.embedded or self.sidecar or self.changed_metadata
        )
        self.modules: dict[str, ModuleRecord] = {} if self.records is None else self.records.modules
        self.sidecar_tags: list[NodeTag | None] | None = (
            None if self.sidecar is None else recorded_tags(model.graph, self.sidecar, model.tags)
        )
        self.tags: Sequence[NodeTag | None] = (
            model.tags if self.sidecar_tags is None or self.tags_intact else self.sidecar_tags
        )
        self.primary: list[str | None] = [
            None if tag is None else tag.hierarchy_path for tag in self.tags
        ]
        self.consumers: dict[str, tuple[str, ...]] = consumer_tags(model.graph, self.primary)

    @property
    def sidecar_name(self) -> str:
        """The file name of the sidecar, whether it exists or not."""
        return sidecar_path(self.model.path).name

    def node_counts(self) -> Counter[str]:
        """Count the nodes of each module and of all below it by the trusted tags."""
        own = Counter(tag.hierarchy_module for tag in self.tags if tag is not None)
        return subtree_totals(own, Ancestry(self.modules))

    def carried_tags(self) -> dict[str, str]:
        """Map each module to its own tag, or that of the nearest shown module above it."""
        index = ModuleIndex(self.modules, ())
        return {path: index.carried_tag(path) or "" for path in self.modules}

    def compute_tags_digest(self, tags: Sequence[NodeTag | None]) -> str:
        """Compute the digest that the metadata of a file with these tags has."""
        return tags_digest([node.key for node in self.model.graph.nodes], tags)

    def _add(self, code: Code, subject: str, message: str) -> None:
        self.findings.append(make_finding(code, subject, message))

    def _read_embedded(self) -> EmbeddedMap | None:
        """Return the file's metadata if it is readable and unchanged."""
        embedded = self.model.readable_metadata
        if embedded is None or not embedded.digest or embedded.digest == embedded.computed_digest():
            return embedded
        message = "the model's metadata was changed after the export"
        self._add(Code.METADATA_DISAGREES, METADATA_KEY, message)
        self.changed_metadata = embedded
        return None

    def _is_as_exported(self) -> bool:
        embedded, model = self.embedded, self.model
        if embedded is None or not self.tags_intact or not model.has_sidecar:
            return False
        try:
            sidecar = sidecar_path(model.path).read_bytes()
        except OSError:
            return False
        return (
            text_digest(sidecar) == embedded.sidecar_digest
            and topology_digest(model.graph, node_digests(model.graph)) == embedded.topology
        )

    def _read_sidecar(self) -> Sidecar | None:
        """Return the sidecar if it exists, is readable and belongs to this file."""
        try:
            sidecar = self.model.sidecar
        except (FormatError, OSError) as error:
            message = f"it cannot be read: {first_line(error.__cause__ or error)}"
            self._add(Code.SIDECAR_UNREADABLE, self.sidecar_name, message)
            return None
        if sidecar is None:
            message = "there is no sidecar beside the model"
            self._add(Code.SIDECAR_MISSING, self.sidecar_name, message)
        elif (reason := self._foreign_reason(sidecar)) is not None:
            message = f"it belongs to another export: {reason}"
            self._add(Code.SIDECAR_FOREIGN, self.sidecar_name, message)
            return None
        return sidecar

    def _foreign_reason(self, sidecar: Sidecar) -> str | None:
        """Say why a sidecar belongs to another export; None if it belongs to this one."""
        if self.embedded is None or sidecar.format != FORMAT:
            # Changes to the graph are findings of their own, so most nodes in common is enough.
            return mismatch_reason(sidecar, self.model.graph)
        if sidecar.model != self.embedded.model:
            return f"it is of {sidecar.model.class_} in {sidecar.model.onnx}"
        if sidecar.statistics.topology != self.embedded.topology:
            return "it records another topology"
        is_other = sidecar.export != self.embedded.export
        return "it records another export of the same model" if is_other else None


def check_agreement(recorded: RecordedMap) -> list[Finding]:
    """Find everything that does not agree, once: first in metadata and sidecar as such."""
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
    counts = recorded.node_counts()
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
            else:
                self._check_node(node, digest, record)
        present = {node.key for node in graph.nodes}
        for key, record in records.items():
            if key not in present:
                message = f"the {record.op_type} that produced it at export is missing"
                self._add(Code.NODE_REMOVED, key, message)
                self.changed_values.update((key, *record.inputs))

    def _check_node(self, node: Node, digest: str | None, record: NodeRecord) -> None:
        if record.op_type != node.op_type:
            message = f"it is a {node.op_type}; at export it was a {record.op_type}"
            self._add(Code.OPERATOR_CHANGED, node.key, message)
        elif record.inputs == node.inputs and record.attributes != digest:
            message = f"the attributes of this {node.op_type} are not those of the export"
            self._add(Code.ATTRIBUTE_CHANGED, node.key, message)
        if record.inputs != node.inputs:
            old, new = ", ".join(record.inputs), ", ".join(node.inputs)
            self._add(Code.EDGE_MOVED, node.key, f"its inputs are {new}; at export: {old}")
            self.changed_values |= {*node.inputs} ^ {*record.inputs}

    def _add(self, code: Code, subject: str, message: str) -> None:
        self.findings.append(make_finding(code, subject, message))


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
            new, old = (
                ", ".join(tags[1:]) or "no other module" for tags in (expected, tag.hierarchy_tags)
            )
            message = f"its consumers are in {new}, its tags name {old}"
            yield make_finding(Code.CONSUMERS_WRONG, node.key, message)


def _identity(tag: NodeTag) -> NodeTag:
    """Return what a tag says of the node itself, apart from its consumers."""
    return msgspec.structs.replace(tag, hierarchy_tags=(), hierarchy_count=0, doc=None)


def _describe(tag: NodeTag) -> str:
    return f"{tag.hierarchy_path} ({tag.hierarchy_module or 'the root'})"


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
        path, recorded_path = trusted.hierarchy_path, in_sidecar.hierarchy_path
        if path != recorded_path or trusted.hierarchy_module != in_sidecar.hierarchy_module:
            message = f"expected {path}, got {recorded_path}"
            yield make_finding(Code.SIDECAR_WRONG, node.key, message)
        elif in_sidecar.hierarchy_tags != tags_of_node(node, path, recorded.consumers):
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
