"""Mends a tagged file from what is recorded: its nodes, its metadata and its sidecar from one another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from modelexport.analysis.consistency import Story, Topology
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
    """What was mended: the nodes whose doc_string was written anew, the metadata, the sidecar; and the backups."""

    nodes: tuple[str, ...]
    metadata: bool
    sidecar: bool
    backups: tuple[str, ...]


def repair_file(path: Path) -> Repair:
    """Mend what can be mended without guessing; the files as they were stay beside them as backups."""
    with open_mapped(path) as data:
        story = Story(TaggedModel(path, parse_model(data, path)))
        if story.is_as_exported:
            return Repair((), False, False, ())
        if sidecar_path(path).is_dir():
            raise FileError(
                f"{sidecar_path(path)} is a folder", hint="move it away; the sidecar has its name"
            )
        plan = _Plan(story)
        new: dict[Path, list[wire.Buffer]] = {}
        if plan.sidecar is not None:
            new[sidecar_path(path)] = [encode_sidecar(plan.sidecar)]
        if plan.nodes or plan.metadata is not None:
            new[path] = plan.pieces(data)
        backups = _replace(path.parent, new) if new else ()
    return Repair(plan.nodes, plan.metadata is not None, plan.sidecar is not None, backups)


def _replace(folder: Path, new: dict[Path, list[wire.Buffer]]) -> tuple[str, ...]:
    """Write files over those that are there, and give the names under which the old ones are kept."""
    backups: list[str] = []
    with transaction(folder) as stage:
        for path in new:
            if path.exists():
                backups.append(_free_name(path))
                stage.place(_kept(path, stage.work / backups[-1]), backups[-1])
        for path, pieces in new.items():
            stage.place(stage.write(path.name, pieces), path.name)
        stage.commit()
    return tuple(backups)


def _free_name(path: Path) -> str:
    number = 0
    while (backup := path.with_name(f"{path.name}.bak{number or ''}")).exists():
        number += 1
    return backup.name


def _kept(path: Path, copy: Path) -> Path:
    """A copy of a file that costs no space where the file system has links."""
    try:
        os.link(path, copy)
    except OSError:
        shutil.copyfile(path, copy)
    return copy


class _Plan:
    """What to write: `nodes` are those whose doc_string changes; None stands for what stays as it is."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.model = story.model
        self.has_map = self.model.is_tagged or self.model.has_metadata
        self.tags = (
            self._mended_tags() if self.has_map and story.source is not None else self.model.tags
        )
        self.nodes = tuple(
            node.key
            for (node, old), new in zip(self.model.items(), self.tags, strict=True)
            if new is not None and new != old
        )
        self.metadata = self._mended_metadata()
        self.sidecar = self._mended_sidecar()

    def _mended_tags(self) -> list[NodeTag | None]:
        """The believed tags with their consumers found again, where the nodes around are known too."""
        story, graph = self.story, self.model.graph
        moved = Topology(story).moved
        carried = story.carried_tags()
        certain = [
            tag is not None and carried.get(tag.hierarchy_module) == tag.hierarchy_path
            for tag in story.tags
        ]
        tags: list[NodeTag | None] = []
        for index, (node, old) in enumerate(self.model.items()):
            tag = story.tags[index]
            if tag is None or not certain[index]:
                tags.append(old)
                continue
            if moved.isdisjoint(node.outputs) and all(
                certain[reader] for reader in graph.readers(index)
            ):
                told = tags_of_node(node, tag.hierarchy_path, story.consumers)
                tag = msgspec.structs.replace(tag, hierarchy_tags=told, hierarchy_count=len(told))
            doc = None if old is None else old.doc
            tags.append(tag if tag.doc == doc else msgspec.structs.replace(tag, doc=doc))
        return tags

    def _mended_metadata(self) -> EmbeddedMap | None:
        """The metadata anew from the sidecar: proven by the digest that is left of it, or by the counts."""
        story = self.story
        if not self.has_map or story.sidecar is None or story.embedded is not None:
            return None
        new = embedded_map(story.sidecar, story.tags_digest(self.tags))
        if story.changed_metadata is not None:
            return new if new.digest == story.changed_metadata.digest else None
        return new if story.counts_fit(self.tags, story.sidecar.modules) else None

    def _mended_sidecar(self) -> Sidecar | None:
        """The sidecar anew from the file, if it is the one that was exported."""
        embedded = self.metadata or self.story.embedded
        if embedded is None or self.story.sidecar_intact:
            return None
        new = complete_sidecar(
            self.model.graph, self.tags, embedded.model, embedded.export, embedded.modules
        )
        proven = text_digest(encode_sidecar(new)) == embedded.sidecar_digest
        return new if proven and new != self.story.sidecar else None

    def pieces(self, data: wire.Buffer) -> list[wire.Buffer]:
        """The file with what is mended in it; all other bytes are those that were there."""
        mended: Iterator[tuple[NodeTag | None, NodeTag | None]]
        mended = zip(self.model.tags, self.tags, strict=True)

        def doc_edit(text: bytes | None) -> bytes | None:
            pair = next(mended, None)
            if pair is None:
                raise FormatError(
                    "the file has nodes where ONNX reads none", hint="export the model again"
                )
            old, new = pair
            return text if new is None or new == old else encode_tag(new)

        if self.metadata is None:
            return rewrite_doc_strings(data, doc_edit)
        entry = (METADATA_KEY, encode_embedded(self.metadata))
        return rewrite_doc_strings(data, doc_edit, add_metadata=entry, drop_metadata=METADATA_KEY)
