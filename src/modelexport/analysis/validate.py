"""Validate a model file: the ONNX checker, the tags, and the consistency of all records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from modelexport.analysis.checker import checking
from modelexport.analysis.consistency import Story, cause
from modelexport.analysis.consistency import check_consistency as check_agreement
from modelexport.analysis.findings import Code, Finding, Severity, make_finding
from modelexport.analysis.repair import Repair, repair_file
from modelexport.errors import FormatError, plural
from modelexport.garbage import pause_collector
from modelexport.modules.record import NodeTag
from modelexport.onnx_file.model_file import StrPath, as_path
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import METADATA_KEY, looks_like_tag


class Validation(msgspec.Struct, frozen=True):
    """The answer; `checks` says of each check whether it passed, failed or was not asked for."""

    file: str
    tagged: bool
    """Whether any node has a tag."""
    checks: dict[str, str]
    """`onnx`, `tags` and `consistency`."""
    findings: tuple[Finding, ...]
    repair: Repair | None = None
    """What was mended, if that was asked for."""

    @property
    def valid(self) -> bool:
        """Whether there is no error among the findings."""
        return not any(found.severity == Severity.ERROR for found in self.findings)


@keyword_aliases(onnx="path")
def validate(path: StrPath, check_consistency: bool = False, repair: bool = False) -> Validation:
    """Check a file: ONNX's own full check and the form of its tags.

    `check_consistency` also checks nodes, metadata, sidecar and graph against each other. `repair`, which implies it,
    first mends from what is recorded and keeps the files as they were as `.bak`; the findings are what is left.
    """
    path = as_path(path)
    with pause_collector():
        mended = repair_file(path) if repair else None
        return _validate(path, check_consistency or repair, mended)


def _validate(path: Path, deep: bool, mended: Repair | None) -> Validation:
    model = load(path)
    with checking(path) as complaint:
        story = Story(model) if deep and _has_map(model) else None
        tags = [*_check_metadata(model), *_check_format(model), *_check_coverage(model, story)]
        agreement = [] if story is None else check_agreement(story)
        if story is not None and not (tags or agreement):
            agreement += _check_tags_digest(story)
        told = complaint()
    compliance = (
        [] if told is None else [make_finding(Code.ONNX_INVALID, path.name, " ".join(told.split()))]
    )
    checks = {
        "onnx": _word(compliance),
        "tags": _word(tags) if _has_map(model) else "no tags",
        "consistency": _word(agreement)
        if story is not None
        else "no tags"
        if deep
        else "not asked for",
    }
    return Validation(path.name, model.is_tagged, checks, (*compliance, *tags, *agreement), mended)


def _word(findings: Sequence[Finding]) -> str:
    return "failed" if any(found.severity == Severity.ERROR for found in findings) else "passed"


def _has_map(model: TaggedModel) -> bool:
    return model.is_tagged or model.has_metadata or model.has_sidecar


def _check_metadata(model: TaggedModel) -> Iterator[Finding]:
    try:
        missing = model.embedded is None
    except FormatError as error:
        yield make_finding(Code.METADATA_UNREADABLE, METADATA_KEY, cause(error))
        return
    if missing and model.is_tagged:
        yield make_finding(
            Code.METADATA_MISSING,
            METADATA_KEY,
            "the nodes have tags, the model's metadata has no modules",
        )


def _check_format(model: TaggedModel) -> Iterator[Finding]:
    """Each doc_string by itself; nodes that say the same share one tag object."""
    distinct = {id(tag): tag for tag in model.tags if tag is not None}
    problems = {key: _format_problem(tag) for key, tag in distinct.items()}
    if not any(problems.values()) and model.coverage == 1.0:
        return
    for index, (node, tag) in enumerate(model.items()):
        if tag is None:
            if looks_like_tag(model.graph.protos[index].doc_string):
                yield make_finding(Code.DOC_MALFORMED, node.key, "its doc_string is a broken tag")
        elif (problem := problems[id(tag)]) is not None:
            code, told = problem
            yield make_finding(code, node.key, told)


def _format_problem(tag: NodeTag) -> tuple[Code, str] | None:
    if tag.hierarchy_count != len(tag.hierarchy_tags):
        told = f"hierarchy_count is {tag.hierarchy_count}, expected {len(tag.hierarchy_tags)}, the number of its tags"
        return Code.COUNT_WRONG, told
    path = tag.hierarchy_path
    if tag.hierarchy_tags[:1] != (path,) or path[:1] != "/" or len(path.split()) != 1:
        return Code.TAG_FORMAT, f"{path!r} is not a tag, or not the first of the node's tags"
    return None


def _check_tags_digest(story: Story) -> Iterator[Finding]:
    """The last resort: nothing is wrong that could be named, and yet a tag is not as it was written."""
    if story.embedded is not None and not story.tags_intact and story.embedded.tags_digest:
        yield make_finding(
            Code.TAG_WRONG, story.model.path.name, "a tag was changed after the export"
        )


def _check_coverage(model: TaggedModel, story: Story | None) -> Iterator[Finding]:
    """Nodes that had a tag at export and have none now."""
    bare = [
        (index, node.key)
        for index, (node, tag) in enumerate(model.items())
        if tag is None and not looks_like_tag(model.graph.protos[index].doc_string)
    ]
    if not bare or not (model.is_tagged or model.has_metadata):
        return
    recorded = None if story is None else story.recorded
    if recorded is not None:
        lost = [key for index, key in bare if recorded[index] is not None]
    elif _recorded_nodes(model) >= len(model.tags):
        lost = [key for _, key in bare]
    else:
        count = _recorded_nodes(model) - sum(tag is not None for tag in model.tags)
        if count > 0:
            yield make_finding(
                Code.DOC_MISSING, model.path.name, f"tags are missing on {plural(count, 'node')}"
            )
        return
    for key in lost:
        yield make_finding(Code.DOC_MISSING, key, "the node has lost its tag")


def _recorded_nodes(model: TaggedModel) -> int:
    """How many nodes had a tag at export, as the file's own metadata tells; 0 where it does not."""
    metadata = model.readable_metadata
    root = None if metadata is None else metadata.modules.get("")
    return 0 if root is None else root.nodes
