"""Whether nodes, model metadata and sidecar tell the same story, and one that the graph bears out."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from modelexport.analysis.findings import Code, Finding, make_finding
from modelexport.errors import FormatError, plural
from modelexport.graph.flat import Graph, Node
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


class Story:
    """What a file, its metadata and its sidecar say, and which of them is believed where they differ.

    Digests recorded at export tell which of them is as it was; where there are none, the side whose counts
    are those of the module records is believed. `tags` is the believed tag of each node. The sidecar is not
    even read where the digests tell that nothing was changed.
    """

    def __init__(self, model: TaggedModel) -> None:
        self.model = model
        self.findings: list[Finding] = []
        self.changed_metadata: EmbeddedMap | None = None
        self.embedded = self._read_embedded()
        self.tags_intact = self._tags_are_intact()
        self.is_as_exported = self._is_as_exported()
        self.sidecar = None if self.is_as_exported else self._read_sidecar()
        self.sidecar_intact = self.is_as_exported or self._sidecar_is_intact()
        self.source: EmbeddedMap | Sidecar | None = (
            self.embedded or self.sidecar or self.changed_metadata
        )
        self.modules: dict[str, ModuleRecord] = {} if self.source is None else self.source.modules
        self.lineage = Ancestry(self.modules)
        self.recorded = (
            None if self.sidecar is None else recorded_tags(model.graph, self.sidecar, model.tags)
        )
        self.tags = (
            model.tags
            if self.recorded is None or self._believes_nodes(self.recorded)
            else self.recorded
        )
        self.primary = [None if tag is None else tag.hierarchy_path for tag in self.tags]
        self.consumers = consumer_tags(model.graph, self.primary)

    @property
    def sidecar_name(self) -> str:
        return sidecar_path(self.model.path).name

    def counts(self, tags: Sequence[NodeTag | None]) -> Counter[str]:
        """The nodes of each module with everything below it, by these tags."""
        return subtree_totals(
            Counter(tag.hierarchy_module for tag in tags if tag is not None), self.lineage
        )

    def counts_fit(
        self, tags: Sequence[NodeTag | None], modules: Mapping[str, ModuleRecord]
    ) -> bool:
        """Whether these tags give every module the number of nodes that its record says."""
        counts = self.counts(tags)
        return all(counts[path] == record.nodes for path, record in modules.items())

    def _believes_nodes(self, recorded: Sequence[NodeTag | None]) -> bool:
        """Whether the nodes' own tags are right where those in the sidecar are others."""
        if self.tags_intact or all(map(operator.is_, recorded, self.model.tags)):
            return True
        if self.sidecar_intact:
            return False
        return not self.counts_fit(recorded, self.modules) and self.counts_fit(
            self.model.tags, self.modules
        )

    def carried_tags(self) -> dict[str, str]:
        """For every module its own tag, or that of the nearest shown module above it."""
        carried: dict[str, str] = {}
        for path in self.modules:
            tags = (
                self.modules[above].tag
                for above in reversed(self.lineage.of(path))
                if above in self.modules
            )
            carried[path] = next((tag for tag in tags if tag is not None), "")
        return carried

    def _read_embedded(self) -> EmbeddedMap | None:
        """The file's own metadata, if it can be read and is as it was written."""
        embedded = self.model.readable_metadata
        if embedded is None or not embedded.digest or embedded.digest == embedded.computed_digest():
            return embedded
        self._add(
            Code.METADATA_DISAGREES,
            METADATA_KEY,
            "the model's metadata was changed after the export",
        )
        self.changed_metadata = embedded
        return None

    def tags_digest(self, tags: Sequence[NodeTag | None]) -> str:
        return tags_digest([node.key for node in self.model.graph.nodes], tags)

    def _tags_are_intact(self) -> bool:
        return self.embedded is not None and self.embedded.tags_digest == self.tags_digest(
            self.model.tags
        )

    def _sidecar_is_intact(self) -> bool:
        if self.embedded is None or self.sidecar is None:
            return False
        return self.embedded.sidecar_digest == text_digest(encode_sidecar(self.sidecar))

    def _is_as_exported(self) -> bool:
        """Whether graph, tags and sidecar all have the digests recorded at export; then no record need be read."""
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
        """The sidecar, if there is one, it can be read, and it is this file's."""
        try:
            sidecar = self.model.sidecar
        except (FormatError, OSError) as error:
            self._add(
                Code.SIDECAR_UNREADABLE, self.sidecar_name, f"it cannot be read: {cause(error)}"
            )
            return None
        if sidecar is None:
            self._add(
                Code.SIDECAR_MISSING, self.sidecar_name, "there is no sidecar beside the model"
            )
            return None
        reason = self._foreign(sidecar)
        if reason is not None:
            self._add(
                Code.SIDECAR_FOREIGN, self.sidecar_name, f"it belongs to another export: {reason}"
            )
            return None
        return sidecar

    def _foreign(self, sidecar: Sidecar) -> str | None:
        if self.embedded is None or sidecar.format != FORMAT:
            # changes to the graph are findings of their own, so that a sidecar that knows most nodes is used
            return mismatch_reason(sidecar, self.model.graph)
        if sidecar.model != self.embedded.model:
            return f"it is of {sidecar.model.class_} in {sidecar.model.onnx}"
        if sidecar.statistics.topology != self.embedded.topology:
            return "it records another topology"
        return (
            None
            if sidecar.export == self.embedded.export
            else "it records another export of the same model"
        )

    def _add(self, code: Code, place: str, message: str) -> None:
        self.findings.append(make_finding(code, place, message))


def check_consistency(story: Story) -> list[Finding]:
    """Everything that does not agree, each thing once and where it lies."""
    if story.source is None:
        return story.findings
    topology = Topology(story)
    found = [
        *story.findings,
        *_check_modules(story),
        *topology.findings,
        *_check_tags(story, topology.moved),
    ]
    if story.sidecar is not None:
        told = list(_check_sidecar(story, story.sidecar, topology.moved))
        if not (told or topology.findings or story.sidecar_intact) and story.embedded is not None:
            told.append(
                make_finding(
                    Code.SIDECAR_WRONG, story.sidecar_name, "it was changed after the export"
                )
            )
        found += told
    return found


def cause(error: BaseException) -> str:
    """What lies behind one of our errors, in one line."""
    return str(error.__cause__ or error).splitlines()[0]


def _check_modules(story: Story) -> Iterator[Finding]:
    """The module tree hangs together, and every module that ran is accounted for."""
    modules = story.modules
    children = {
        join_path(path, child) for path, record in modules.items() for child in record.children
    }
    tags = {record.tag for record in modules.values()}
    counts = story.counts(story.tags)
    own = Counter(tag.hierarchy_module for tag in story.tags if tag is not None)
    for path, record in modules.items():
        if path and path not in children:
            yield make_finding(Code.PARENT_MISSING, path, "no module names it as a child")
        elif (
            record.tag is not None
            and record.tag.count("/") > 1
            and record.tag.rpartition("/")[0] not in tags
        ):
            yield make_finding(
                Code.PARENT_MISSING, path, f"no module has the tag above {record.tag}"
            )
        if counts[path] != record.nodes:
            told = f"{plural(record.nodes, 'node')} recorded for it, {counts[path]:,} found"
            yield make_finding(Code.MODULE_UNACCOUNTED, path, told)
        elif record.calls and not record.nodes and record.status != ModuleStatus.ABSORBED:
            yield make_finding(
                Code.MODULE_UNACCOUNTED,
                path,
                f"it ran, has no nodes and is called {record.status!r}",
            )
        elif (own[path] and record.status != ModuleStatus.NODES) or (
            record.nodes and record.status == ModuleStatus.UNUSED
        ):
            yield make_finding(
                Code.MODULE_UNACCOUNTED, path, f"it has nodes and is called {record.status!r}"
            )
    if story.sidecar is not None and story.sidecar.expected_hierarchy != expected_hierarchy(
        modules
    ):
        yield make_finding(
            Code.HIERARCHY_UNMET,
            story.sidecar_name,
            "the modules do not give its expected hierarchy",
        )


class Topology:
    """Whether the graph is the one recorded at export: node by node with a sidecar, as a whole without.

    `moved` are the tensors that are read, made or not made otherwise than recorded.
    """

    def __init__(self, story: Story) -> None:
        self.findings: list[Finding] = []
        self.moved: set[str] = set()
        model = story.model
        if story.is_as_exported:
            return
        if story.sidecar is None:
            recorded = story.embedded.topology if story.embedded is not None else ""
            if recorded and topology_digest(model.graph, node_digests(model.graph)) != recorded:
                self._add(
                    Code.TOPOLOGY_CHANGED,
                    model.path.name,
                    "nodes or edges are not those of the export",
                )
            return
        self._check_nodes(model.graph, story.sidecar.nodes)
        export = story.sidecar.export
        if tensor_infos(model.proto.graph.input) != export.inputs:
            self._add(
                Code.TOPOLOGY_CHANGED,
                model.path.name,
                "the graph's inputs are not those of the export",
            )
        if tensor_infos(model.proto.graph.output) != export.outputs:
            self._add(
                Code.TOPOLOGY_CHANGED,
                model.path.name,
                "the graph's outputs are not those of the export",
            )

    def _check_nodes(self, graph: Graph, records: dict[str, NodeRecord]) -> None:
        known = 0
        for node, work in zip(graph.nodes, node_digests(graph), strict=True):
            record = records.get(node.key)
            if record is None:
                self._add(Code.NODE_ADDED, node.key, f"this {node.op_type} was not there at export")
                self.moved.update((*node.inputs, *node.outputs))
                continue
            known += 1
            if (
                record.inputs != node.inputs
                or record.op_type != node.op_type
                or record.attributes != work
            ):
                self._add_change(node, record)
        if known == len(records):
            return
        present = {node.key for node in graph.nodes}
        for key in records.keys() - present:
            self._add(
                Code.NODE_REMOVED, key, f"the {records[key].op_type} that made it at export is gone"
            )
            self.moved.update((key, *records[key].inputs))

    def _add_change(self, node: Node, record: NodeRecord) -> None:
        if record.op_type != node.op_type:
            told = f"it is a {node.op_type}; at export it was a {record.op_type}"
            self._add(Code.OPERATOR_CHANGED, node.key, told)
        elif record.inputs == node.inputs:
            told = f"the attributes of this {node.op_type} are not those of the export"
            self._add(Code.ATTRIBUTE_CHANGED, node.key, told)
        if record.inputs != node.inputs:
            told = (
                f"it reads {', '.join(node.inputs)}; at export it read {', '.join(record.inputs)}"
            )
            self._add(Code.EDGE_MOVED, node.key, told)
            self.moved |= {*node.inputs} ^ {*record.inputs}

    def _add(self, code: Code, place: str, message: str) -> None:
        self.findings.append(make_finding(code, place, message))


def _check_tags(story: Story, moved: set[str]) -> Iterator[Finding]:
    """Each node's own tag against the module tree, the believed tag and the consumers in the graph."""
    carried = story.carried_tags()
    known = set(carried.values())
    fine: set[tuple[int, int]] = (
        set()
    )  # pairs of a tag and its consumers that were found to be right
    for (node, tag), believed in zip(story.model.items(), story.tags, strict=True):
        if tag is None or believed is None:
            continue
        readers = story.consumers.get(node.outputs[0]) if len(node.outputs) == 1 else None
        pair = (id(tag), id(readers))
        if tag is believed and readers is not None and pair in fine:
            continue
        if tag.hierarchy_path not in known:
            yield make_finding(
                Code.TAG_UNKNOWN, node.key, f"no module has the tag {tag.hierarchy_path}"
            )
        elif tag is not believed and _told(tag) != _told(believed):
            where = f"{tag.hierarchy_path} ({tag.hierarchy_module or 'the root'})"
            right = f"{believed.hierarchy_path} ({believed.hierarchy_module or 'the root'})"
            yield make_finding(
                Code.TAG_WRONG, node.key, f"its tag says {where}; recorded is {right}"
            )
        elif carried.get(tag.hierarchy_module) != tag.hierarchy_path:
            told = f"its tag is {tag.hierarchy_path}, which is not that of its module {tag.hierarchy_module!r}"
            yield make_finding(Code.TAG_WRONG, node.key, told)
        elif tag.hierarchy_tags == (
            expected := tags_of_node(node, tag.hierarchy_path, story.consumers)
        ):
            fine.add(pair)
        elif moved.isdisjoint(node.outputs):
            told = f"its consumers are in {_listed(expected[1:])}, its tags name {_listed(tag.hierarchy_tags[1:])}"
            yield make_finding(Code.CONSUMERS_WRONG, node.key, told)


def _told(tag: NodeTag) -> tuple[object, ...]:
    return (
        tag.hierarchy_path,
        tag.hierarchy_module,
        tag.hierarchy_method,
        tag.hierarchy_call,
        tag.hierarchy_covers,
    )


def _listed(tags: Sequence[str]) -> str:
    return ", ".join(tags) or "no other module"


def _check_sidecar(story: Story, sidecar: Sidecar, moved: set[str]) -> Iterator[Finding]:
    """The sidecar's own tables against the file."""
    graph = story.model.graph
    if story.embedded is not None and sidecar.modules != story.embedded.modules:
        differing = [
            path
            for path in {**sidecar.modules, **story.embedded.modules}
            if sidecar.modules.get(path) != story.embedded.modules.get(path)
        ]
        for path in differing:
            yield make_finding(
                Code.METADATA_DISAGREES,
                path,
                "the sidecar and the file record this module differently",
            )
    for node, own, recorded, tag in zip(
        graph.nodes, story.model.tags, story.recorded or (), story.tags, strict=True
    ):
        if recorded is None or tag is None or recorded is own or not moved.isdisjoint(node.outputs):
            continue
        if (recorded.hierarchy_path, recorded.hierarchy_module) != (
            tag.hierarchy_path,
            tag.hierarchy_module,
        ):
            told = f"the sidecar says {recorded.hierarchy_path}, the file {tag.hierarchy_path}"
            yield make_finding(Code.SIDECAR_WRONG, node.key, told)
        elif recorded.hierarchy_tags != tags_of_node(node, tag.hierarchy_path, story.consumers):
            yield make_finding(
                Code.SIDECAR_WRONG,
                node.key,
                "the tags in its record are not those of its consumers",
            )
    for name in _wrong_tensors(story, sidecar):
        if name not in moved:
            yield make_finding(
                Code.TENSOR_WRONG,
                name,
                "the sidecar's producer or consumers are not those in the graph",
            )
    counted = compute_statistics(
        sidecar.nodes, sidecar.modules, len(sidecar.tensors), sidecar.statistics.topology
    )
    if sidecar.statistics != counted:
        yield make_finding(
            Code.SIDECAR_WRONG,
            story.sidecar_name,
            "its statistics are not those of its own records",
        )


def _wrong_tensors(story: Story, sidecar: Sidecar) -> list[str]:
    """The tensors that the sidecar leaves out, makes up, or gives another producer or other consumers."""
    graph, primary, consumers = story.model.graph, story.primary, story.consumers
    producers, recorded = graph.producer, sidecar.tensors
    wrong = [name for name in graph.tensors() if name not in recorded]
    leaves = {*graph.inputs, *graph.initializers}
    for name, record in recorded.items():
        index = producers.get(name)
        made_by = None if index is None else primary[index]
        known = index is not None or name in leaves
        if not known or record.producer != made_by or record.consumers != consumers.get(name, ()):
            wrong.append(name)
    return wrong
