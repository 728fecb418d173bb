"""Validate a model file: the ONNX checker, the tags, and the consistency of all records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from onnx import checker

from modelexport.analysis.consistency import check_agreement
from modelexport.analysis.findings import Code, Finding, Severity, make_finding
from modelexport.analysis.recorded_map import RecordedMap
from modelexport.analysis.repair import Repair, repair_file
from modelexport.errors import FormatError, first_line, plural
from modelexport.garbage import pause_collector
from modelexport.modules.record import NodeTag
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    external_files,
    is_file,
    missing_data_error,
    resolve_data_file,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import METADATA_KEY, looks_like_tag


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
        """Whether there is no error among the findings."""
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
        repaired = repair_file(path) if repair else None
        return _validate(path, check_consistency or repair, repaired)


def _validate(path: Path, check_consistency: bool, repaired: Repair | None) -> Validation:
    model = load(path)
    has_map = model.is_tagged or model.has_metadata or model.has_sidecar
    recorded = RecordedMap(model) if check_consistency and has_map else None
    compliance = _check_compliance(model)
    tags = [*_check_metadata(model), *_check_format(model), *_check_coverage(model, recorded)]
    agreement = [] if recorded is None else check_agreement(recorded)
    if recorded is not None and not (tags or agreement):
        agreement += _check_tags_digest(recorded)
    skipped = "no tags" if check_consistency else "not asked for"
    checks = {
        "onnx": _outcome(compliance),
        "tags": _outcome(tags) if tags or _has_tags(model) else "no tags",
        "consistency": skipped if recorded is None else _outcome(agreement),
    }
    findings = (*compliance, *tags, *agreement)
    return Validation(path.name, model.is_tagged, checks, findings, repaired)


def _check_compliance(model: TaggedModel) -> list[Finding]:
    """Run ONNX's full check, unless a data file is missing: the checker cannot run without it."""
    missing = [
        make_finding(Code.DATA_MISSING, location, missing_data_error(model.path, location).message)
        for location in external_files(model.proto)
        if not is_file(resolve_data_file(model.path, location))
    ]
    if missing:
        return missing
    message = check_onnx(model.path)
    if message is None:
        return []
    return [make_finding(Code.ONNX_INVALID, model.path.name, " ".join(message.split()))]


def _has_tags(model: TaggedModel) -> bool:
    """Tell whether tags are in effect; a sidecar of another graph has none for this one."""
    return model.has_metadata or model.in_effect.source is not None


def check_onnx(path: Path) -> str | None:
    """Run ONNX's full check on a file.

    Args:
        path: The ONNX file.

    Returns:
        The checker's message, or None if the file is valid.
    """
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
    count, expected = tag.hierarchy_count, len(tag.hierarchy_tags)
    if count != expected:
        return Code.COUNT_WRONG, f"hierarchy_count: expected {expected}, got {count}"
    path = tag.hierarchy_path
    if tag.hierarchy_tags[:1] != (path,) or path[:1] != "/" or len(path.split()) != 1:
        return Code.TAG_FORMAT, f"{path!r} is not a tag, or not the first of the node's tags"
    return None


def _check_tags_digest(recorded: RecordedMap) -> Iterator[Finding]:
    """Report a tag that was changed in a way that no other check can name."""
    embedded = recorded.embedded
    if embedded is not None and embedded.tags_digest and not recorded.tags_intact:
        message = "a tag was changed after the export"
        yield make_finding(Code.TAG_WRONG, recorded.model.path.name, message)


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
    exported = _recorded_node_count(model)
    missing = exported - sum(tag is not None for tag in model.tags)
    if sidecar_tags is not None or exported >= len(model.tags):
        for index, key in untagged:
            if sidecar_tags is None or sidecar_tags[index] is not None:
                yield make_finding(Code.DOC_MISSING, key, "the node has lost its tag")
    elif missing > 0:  # strategies may leave nodes untagged, so which ones is not known
        message = f"tags are missing on {plural(missing, 'node')}"
        yield make_finding(Code.DOC_MISSING, model.path.name, message)


def _recorded_node_count(model: TaggedModel) -> int:
    """Return how many nodes had a tag at export by the file's own metadata, or 0."""
    metadata = model.readable_metadata
    root = None if metadata is None else metadata.modules.get("")
    return 0 if root is None else root.nodes
