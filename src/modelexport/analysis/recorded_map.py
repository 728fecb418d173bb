"""The map of a file as its nodes, its metadata and its sidecar record it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from modelexport.analysis.findings import Code, Finding, make_finding
from modelexport.errors import FormatError, first_line
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry, subtree_totals
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.tagged.model import TaggedModel, mismatch_reason, recorded_tags
from modelexport.tagged.records import (
    FORMAT,
    METADATA_KEY,
    EmbeddedMap,
    Sidecar,
    encode_sidecar,
    sidecar_path,
    tags_digest,
    text_digest,
)
from modelexport.tagged.tables import consumer_tags


class RecordedMap:
    """The three records of a map, and the tags to trust where they disagree.

    The sidecar's tags are trusted, unless the digest recorded at export shows that the tags of the
    nodes are unchanged. The sidecar is not even parsed where digests show that nothing changed.

    Attributes:
        model: The file.
        findings: What is wrong with the metadata and the sidecar as such.
        embedded: The file's metadata, if it is readable and unchanged.
        changed_metadata: The file's metadata, if it is readable and was changed.
        sidecar: The sidecar, if it is readable and belongs to the file.
        tags_intact: Whether the nodes' tags have the digest recorded at export.
        sidecar_intact: Whether the sidecar has the digest recorded at export.
        is_as_exported: Whether graph, tags and sidecar all have the digests recorded at export.
        records: The record that the modules come from.
        modules: The module records by path.
        ancestry: The ancestors of each module.
        sidecar_tags: The tag of each node in the sidecar; None without a sidecar.
        tags: The trusted tag of each node.
        primary: The trusted primary tag of each node.
        consumers: The trusted tags of the consumers of each value.
    """

    def __init__(self, model: TaggedModel) -> None:
        self.model = model
        self.findings: list[Finding] = []
        self.changed_metadata: EmbeddedMap | None = None
        self.embedded = self._read_embedded()
        self.tags_intact = (
            self.embedded is not None
            and self.embedded.tags_digest == self.compute_tags_digest(model.tags)
        )
        self.is_as_exported = self._is_as_exported()
        self.sidecar = None if self.is_as_exported else self._read_sidecar()
        self.sidecar_intact = self.is_as_exported or self._is_sidecar_intact()
        self.records: EmbeddedMap | Sidecar | None = (
            self.embedded or self.sidecar or self.changed_metadata
        )
        self.modules: dict[str, ModuleRecord] = {} if self.records is None else self.records.modules
        self.ancestry = Ancestry(self.modules)
        self.sidecar_tags = (
            None if self.sidecar is None else recorded_tags(model.graph, self.sidecar, model.tags)
        )
        self.tags: Sequence[NodeTag | None] = (
            model.tags if self.sidecar_tags is None or self.tags_intact else self.sidecar_tags
        )
        self.primary = [None if tag is None else tag.hierarchy_path for tag in self.tags]
        self.consumers = consumer_tags(model.graph, self.primary)

    @property
    def sidecar_name(self) -> str:
        """The file name of the sidecar, whether it exists or not."""
        return sidecar_path(self.model.path).name

    def node_counts(self, tags: Sequence[NodeTag | None]) -> Counter[str]:
        """Count the nodes of each module and of all below it by these tags."""
        own = Counter(tag.hierarchy_module for tag in tags if tag is not None)
        return subtree_totals(own, self.ancestry)

    def fits_modules(self, tags: Sequence[NodeTag | None]) -> bool:
        """Return whether these tags give every module its recorded number of nodes."""
        counts = self.node_counts(tags)
        return all(counts[path] == record.nodes for path, record in self.modules.items())

    def carried_tags(self) -> dict[str, str]:
        """Map each module to its own tag, or that of the nearest shown module above it."""
        carried: dict[str, str] = {}
        for path in self.modules:
            above = (self.modules.get(outer) for outer in reversed(self.ancestry.of(path)))
            tags = (record.tag for record in above if record is not None)
            carried[path] = next((tag for tag in tags if tag is not None), "")
        return carried

    def compute_tags_digest(self, tags: Sequence[NodeTag | None]) -> str:
        """Compute the digest that the metadata of a file with these tags has."""
        return tags_digest([node.key for node in self.model.graph.nodes], tags)

    def _read_embedded(self) -> EmbeddedMap | None:
        """Return the file's metadata if it is readable and unchanged."""
        embedded = self.model.readable_metadata
        if embedded is None or not embedded.digest or embedded.digest == embedded.computed_digest():
            return embedded
        message = "the model's metadata was changed after the export"
        self.findings.append(make_finding(Code.METADATA_DISAGREES, METADATA_KEY, message))
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

    def _is_sidecar_intact(self) -> bool:
        if self.embedded is None or self.sidecar is None:
            return False
        return self.embedded.sidecar_digest == text_digest(encode_sidecar(self.sidecar))

    def _read_sidecar(self) -> Sidecar | None:
        """Return the sidecar if it exists, is readable and belongs to this file."""
        try:
            sidecar = self.model.sidecar
        except (FormatError, OSError) as error:
            message = f"it cannot be read: {first_line(error.__cause__ or error)}"
            self.findings.append(make_finding(Code.SIDECAR_UNREADABLE, self.sidecar_name, message))
            return None
        if sidecar is None:
            message = "there is no sidecar beside the model"
            self.findings.append(make_finding(Code.SIDECAR_MISSING, self.sidecar_name, message))
            return None
        reason = self._foreign_reason(sidecar)
        if reason is not None:
            message = f"it belongs to another export: {reason}"
            self.findings.append(make_finding(Code.SIDECAR_FOREIGN, self.sidecar_name, message))
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
        if sidecar.export != self.embedded.export:
            return "it records another export of the same model"
        return None
