"""Repair a tagged file: restore its nodes, its metadata and its sidecar from one another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from modelexport.analysis.consistency import TopologyCheck
from modelexport.analysis.recorded_map import RecordedMap
from modelexport.errors import FileError, FormatError
from modelexport.modules.record import NodeTag
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import transaction
from modelexport.onnx_file.doc_strings import rewrite_doc_strings
from modelexport.onnx_file.model_file import open_mapped, parse_model
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import (
    METADATA_KEY,
    EmbeddedMap,
    Sidecar,
    encode_embedded,
    encode_sidecar,
    encode_tag,
    sidecar_path,
    text_digest,
)
from modelexport.tagged.tables import complete_sidecar, embedded_map, tags_of_node


class Repair(msgspec.Struct, frozen=True):
    """What was repaired: the nodes with a new doc_string, the metadata and the sidecar.

    `backups` are the names under which the earlier files are kept.
    """

    nodes: tuple[str, ...]
    metadata: bool
    sidecar: bool
    backups: tuple[str, ...]


def repair_file(path: Path) -> Repair:
    """Repair what can be repaired without guessing, and keep backups of the earlier files.

    Args:
        path: The ONNX file.

    Returns:
        What was repaired.

    Raises:
        FileError: If a file cannot be read or written.
        FormatError: If the file is not a valid model.
    """
    with open_mapped(path) as data:
        recorded = RecordedMap(TaggedModel(path, parse_model(data, path)))
        if recorded.is_as_exported:
            return Repair((), False, False, ())
        if sidecar_path(path).is_dir():
            raise FileError(
                f"{sidecar_path(path)} is a folder",
                hint="move it away: the sidecar needs this name",
            )
        plan = _Plan(recorded)
        contents: dict[Path, list[wire.Buffer]] = {}
        if plan.sidecar is not None:
            contents[sidecar_path(path)] = [encode_sidecar(plan.sidecar)]
        if plan.nodes or plan.metadata is not None:
            contents[path] = plan.rewrite(data)
        backups = _replace_files(path.parent, contents) if contents else ()
    return Repair(plan.nodes, plan.metadata is not None, plan.sidecar is not None, backups)


def _replace_files(folder: Path, contents: dict[Path, list[wire.Buffer]]) -> tuple[str, ...]:
    """Replace files all at once, and return the names of the backups."""
    backups: list[str] = []
    with transaction(folder) as stage:
        for path in contents:
            if path.exists():
                backups.append(_backup_name(path))
                stage.publish(_link_or_copy(path, stage.work / backups[-1]), backups[-1])
        for path, content in contents.items():
            stage.publish(stage.write(path.name, content), path.name)
        stage.commit()
    return tuple(backups)


def _backup_name(path: Path) -> str:
    number = 0
    while (backup := path.with_name(f"{path.name}.bak{number or ''}")).exists():
        number += 1
    return backup.name


def _link_or_copy(path: Path, copy: Path) -> Path:
    """Link a file, which takes no space, or copy it where the file system has no links."""
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)
    return copy


class _Plan:
    """What to write; None for metadata and sidecar means to leave them as they are.

    `nodes` are those with a new doc_string.
    """

    def __init__(self, recorded: RecordedMap) -> None:
        self.recorded = recorded
        self.model = recorded.model
        self.has_map = self.model.is_tagged or self.model.has_metadata
        self.tags: Sequence[NodeTag | None] = self.model.tags
        self.is_proven = self._is_proven()
        if self.has_map and recorded.records is not None and self.is_proven:
            self.tags = self._restore_tags()
        self.nodes = tuple(
            node.key
            for (node, old), new in zip(self.model.items(), self.tags, strict=True)
            if new is not None and new != old
        )
        self.metadata = self._restore_metadata()
        self.sidecar = self._restore_sidecar()

    def _is_proven(self) -> bool:
        """Return whether the trusted tags are the nodes' own, or the sidecar's and add up."""
        recorded = self.recorded
        if recorded.tags is self.model.tags or recorded.sidecar_intact:
            return True
        return recorded.fits_modules(recorded.tags)

    def _restore_tags(self) -> list[NodeTag | None]:
        """Return the trusted tags, with consumers recomputed where those are certain too."""
        recorded, graph = self.recorded, self.model.graph
        changed_values = TopologyCheck(recorded).changed_values
        carried = recorded.carried_tags()
        certain = [
            tag is not None and carried.get(tag.hierarchy_module) == tag.hierarchy_path
            for tag in recorded.tags
        ]
        tags: list[NodeTag | None] = []
        for index, (node, old) in enumerate(self.model.items()):
            tag = recorded.tags[index]
            if tag is None or not certain[index]:
                tags.append(old)
                continue
            if changed_values.isdisjoint(node.outputs) and all(
                certain[consumer] for consumer in graph.consumers_of(index)
            ):
                every = tags_of_node(node, tag.hierarchy_path, recorded.consumers)
                tag = msgspec.structs.replace(tag, hierarchy_tags=every, hierarchy_count=len(every))
            # The sidecar does not record the doc_string that was there before the export.
            doc = None if old is None else old.doc
            tags.append(tag if tag.doc == doc else msgspec.structs.replace(tag, doc=doc))
        return tags

    def _restore_metadata(self) -> EmbeddedMap | None:
        """Restore the metadata from the sidecar, if its digest or the node counts prove it."""
        recorded = self.recorded
        if not self.has_map or recorded.sidecar is None or recorded.embedded is not None:
            return None
        new = embedded_map(recorded.sidecar, recorded.compute_tags_digest(self.tags))
        if recorded.changed_metadata is not None:
            return new if new.digest == recorded.changed_metadata.digest else None
        return new if self.is_proven else None

    def _restore_sidecar(self) -> Sidecar | None:
        """Rebuild the sidecar from the file, if the result is the one that was exported."""
        embedded = self.metadata or self.recorded.embedded
        if embedded is None or self.recorded.sidecar_intact:
            return None
        new = complete_sidecar(
            self.model.graph, self.tags, embedded.model, embedded.export, embedded.modules
        )
        is_proven = text_digest(encode_sidecar(new)) == embedded.sidecar_digest
        return new if is_proven and new != self.recorded.sidecar else None

    def rewrite(self, data: wire.Buffer) -> list[wire.Buffer]:
        """Return the file with the repaired parts; all other bytes stay as they are."""
        pairs = zip(self.model.tags, self.tags, strict=True)

        def edit_doc(text: bytes | None) -> bytes | None:
            pair = next(pairs, None)
            if pair is None:
                raise FormatError(
                    "the file has more nodes than onnx parses", hint="export the model again"
                )
            old, new = pair
            return text if new is None or new == old else encode_tag(new)

        if self.metadata is None:
            return rewrite_doc_strings(data, edit_doc)
        entry = (METADATA_KEY, encode_embedded(self.metadata))
        return rewrite_doc_strings(data, edit_doc, add_metadata=entry, drop_metadata=METADATA_KEY)
