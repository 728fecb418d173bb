"""Validate a model file by the ONNX checker, its tags and its records, and repair it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from onnx import checker

from modelexport.analysis.consistency import RecordedMap, TopologyCheck, check_agreement
from modelexport.analysis.findings import Code, Finding, Severity, make_finding
from modelexport.errors import FileError, FormatError, first_line, plural
from modelexport.graph.flat import pause_collector
from modelexport.modules.record import NodeTag
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import transaction
from modelexport.onnx_file.doc_strings import rewrite_doc_strings
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    is_file,
    missing_data_error,
    open_mapped,
    parse_model,
    resolve_data_file,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import (
    METADATA_KEY,
    EmbeddedMap,
    Sidecar,
    encode_embedded,
    encode_sidecar,
    encode_tag,
    looks_like_tag,
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


class Validation(msgspec.Struct, frozen=True):
    """The result of `validate`; `checks` says which checks passed, failed or did not run."""

    file: str
    tagged: bool
    """Whether any node has a tag."""
    checks: dict[str, str]
    """The result of `onnx`, `tags` and `consistency`."""
    findings: tuple[Finding, ...]
    repair: Repair | None = None
    """What was repaired, if a repair was requested."""

    @property
    def valid(self) -> bool:
        """Whether the findings contain no error."""
        return not any(finding.severity == Severity.ERROR for finding in self.findings)


@keyword_aliases(onnx="path")
def validate(path: StrPath, check_consistency: bool = False, repair: bool = False) -> Validation:
    """Check a file with ONNX's full check, and the form of its tags.

    Args:
        path: The ONNX file.
        check_consistency: Whether to check nodes, metadata, sidecar and graph against each other.
        repair: Whether to first restore what the other records prove, with a `.bak` file of
            everything that is replaced; implies `check_consistency`.

    Returns:
        The findings; after a repair, those that remain.

    Raises:
        FileError: If the file cannot be read, or a repaired one cannot be written.
        FormatError: If the file is not an ONNX model.
    """
    path = as_path(path)
    with pause_collector():
        repaired = _repair(path) if repair else None
        return _validate(path, check_consistency or repair, repaired)


def _validate(path: Path, check_consistency: bool, repaired: Repair | None) -> Validation:
    model = load(path)
    has_map = model.is_tagged or model.has_metadata or model.has_sidecar
    # The records are those of the flat graph, so there is nothing to compare functions with.
    has_records = has_map and not model.has_module_functions
    recorded = RecordedMap(model) if check_consistency and has_records else None
    compliance = _check_compliance(model)
    tags = [*_check_metadata(model), *_check_format(model), *_check_coverage(model, recorded)]
    agreement = [] if recorded is None else check_agreement(recorded)
    if recorded is not None and not (tags or agreement):
        embedded = recorded.embedded
        if embedded is not None and embedded.tags_digest and not recorded.tags_intact:
            # No other check can name what was changed.
            message = "a tag was changed after the export"
            agreement.append(make_finding(Code.TAG_WRONG, path.name, message))
    # A sidecar of another graph has no tags for this one.
    has_tags = bool(tags) or model.has_metadata or model.in_effect.source is not None
    skipped = "no tags" if check_consistency else "not asked for"
    if check_consistency and model.has_module_functions:
        skipped = "not possible: modules are functions"
    checks = {
        "onnx": _outcome(compliance),
        "tags": _outcome(tags) if has_tags else "no tags",
        "consistency": skipped if recorded is None else _outcome(agreement),
    }
    findings = (*compliance, *tags, *agreement)
    return Validation(path.name, model.is_tagged, checks, findings, repaired)


def _check_compliance(model: TaggedModel) -> list[Finding]:
    """Run ONNX's full check, unless a data file is missing: the checker cannot run without it."""
    missing = [
        make_finding(Code.DATA_MISSING, location, missing_data_error(model.path, location).message)
        for location in model.data_files
        if not is_file(resolve_data_file(model.path, location))
    ]
    if missing:
        return missing
    message = check_onnx(model.path)
    name = model.path.name
    return [make_finding(Code.ONNX_INVALID, name, " ".join(message.split()))] if message else []


def check_onnx(path: Path) -> str | None:
    """Run ONNX's full check on a file; return its message, or None if the file is valid."""
    try:
        checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated types
        return str(error).strip() or type(error).__name__
    return None


def _outcome(findings: Sequence[Finding]) -> str:
    return "failed" if any(one.severity == Severity.ERROR for one in findings) else "passed"


def _check_metadata(model: TaggedModel) -> Iterator[Finding]:
    try:
        is_missing = model.embedded is None
    except FormatError as error:
        message = first_line(error.__cause__ or error)
        yield make_finding(Code.METADATA_UNREADABLE, METADATA_KEY, message)
        return
    if is_missing and model.is_tagged:
        message = "the nodes have tags, but the model's metadata has no modules"
        yield make_finding(Code.METADATA_MISSING, METADATA_KEY, message)


def _check_format(model: TaggedModel) -> Iterator[Finding]:
    """Check each doc_string by itself; nodes with equal doc_strings share one tag object."""
    distinct = {id(tag): tag for tag in model.tags if tag is not None}
    problems = {key: _format_problem(tag) for key, tag in distinct.items()}
    if not any(problems.values()) and model.coverage == 1.0:
        return
    for index, (node, tag) in enumerate(model.items()):
        if tag is None:
            if looks_like_tag(model.graph.protos[index].doc_string):
                message = "its doc_string is a malformed tag"
                yield make_finding(Code.DOC_MALFORMED, node.key, message)
        elif (problem := problems[id(tag)]) is not None:
            code, message = problem
            yield make_finding(code, node.key, message)


def _format_problem(tag: NodeTag) -> tuple[Code, str] | None:
    path, count, expected = tag.hierarchy_path, tag.hierarchy_count, len(tag.hierarchy_tags)
    if count != expected:
        return Code.COUNT_WRONG, f"hierarchy_count: expected {expected}, got {count}"
    if tag.hierarchy_tags[:1] != (path,) or path[:1] != "/" or len(path.split()) != 1:
        return Code.TAG_FORMAT, f"{path!r} is not a tag, or not the first of the node's tags"
    return None


def _check_coverage(model: TaggedModel, recorded: RecordedMap | None) -> Iterator[Finding]:
    """Find nodes that had a tag at export and have none now."""
    untagged = [
        (index, node.key)
        for index, (node, tag) in enumerate(model.items())
        if tag is None and not looks_like_tag(model.graph.protos[index].doc_string)
    ]
    if not untagged or not (model.is_tagged or model.has_metadata):
        return
    sidecar_tags = None if recorded is None else recorded.sidecar_tags
    metadata = model.readable_metadata
    root = None if metadata is None else metadata.modules.get("")
    exported = 0 if root is None else root.nodes  # with a tag, by the file's own metadata
    missing = exported - sum(tag is not None for tag in model.tags)
    if sidecar_tags is not None or exported >= len(model.tags):
        for index, key in untagged:
            if sidecar_tags is None or sidecar_tags[index] is not None:
                yield make_finding(Code.DOC_MISSING, key, "the node has lost its tag")
    elif missing > 0:  # strategies may leave nodes untagged, so which ones is not known
        message = f"tags are missing on {plural(missing, 'node')}"
        yield make_finding(Code.DOC_MISSING, model.path.name, message)


def _repair(path: Path) -> Repair:
    """Repair what can be repaired without guessing, and keep backups of the earlier files."""
    with open_mapped(path) as data:
        recorded = RecordedMap(TaggedModel(path, parse_model(data, path)))
        if recorded.is_as_exported or recorded.model.has_module_functions:
            return Repair((), False, False, ())
        if sidecar_path(path).is_dir():
            hint = "move it away: the sidecar needs this name"
            raise FileError(f"{sidecar_path(path)} is a folder", hint=hint)
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
        for path in (path for path in contents if path.exists()):
            names = (f"{path.name}.bak{number or ''}" for number in itertools.count())
            backups.append(next(name for name in names if not path.with_name(name).exists()))
            copy = stage.work / backups[-1]
            try:
                os.link(path, copy)  # takes no space, but not every file system has links
            except OSError:
                shutil.copyfile(path, copy)
            stage.publish(copy, copy.name)
        for path, content in contents.items():
            stage.publish(stage.write(path.name, content), path.name)
        stage.commit()
    return tuple(backups)


class _Plan:
    """What to write: new tags for `nodes`, and the metadata and sidecar if they are not None."""

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
        counts = recorded.node_counts()
        return all(counts[path] == record.nodes for path, record in recorded.modules.items())

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
            consumers = graph.consumers_of(index)
            if changed_values.isdisjoint(node.outputs) and all(certain[i] for i in consumers):
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
                message = "the file has more nodes than onnx parses"
                raise FormatError(message, hint="export the model again")
            old, new = pair
            return text if new is None or new == old else encode_tag(new)

        if self.metadata is None:
            return rewrite_doc_strings(data, edit_doc)
        entry = (METADATA_KEY, encode_embedded(self.metadata))
        return rewrite_doc_strings(
            data,
            edit_doc,
            add_metadata=entry,
            rename_metadata=lambda key: None if key == METADATA_KEY else key,
        )
