"""The findings of a validation: the code of each kind of damage, and its fix."""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"


class Code(enum.StrEnum):
    """The kinds of damage."""

    ONNX_INVALID = "onnx-invalid"
    DATA_MISSING = "data-missing"
    DOC_MALFORMED = "doc-malformed"
    DOC_MISSING = "doc-missing"
    TAG_FORMAT = "tag-format"
    COUNT_WRONG = "count-wrong"
    METADATA_MISSING = "metadata-missing"
    METADATA_UNREADABLE = "metadata-unreadable"
    METADATA_DISAGREES = "metadata-disagrees"
    SIDECAR_MISSING = "sidecar-missing"
    SIDECAR_UNREADABLE = "sidecar-unreadable"
    SIDECAR_FOREIGN = "sidecar-foreign"
    SIDECAR_WRONG = "sidecar-wrong"
    TAG_UNKNOWN = "tag-unknown"
    TAG_WRONG = "tag-wrong"
    CONSUMERS_WRONG = "consumers-wrong"
    TENSOR_WRONG = "tensor-wrong"
    NODE_ADDED = "node-added"
    NODE_REMOVED = "node-removed"
    OPERATOR_CHANGED = "operator-changed"
    EDGE_MOVED = "edge-moved"
    ATTRIBUTE_CHANGED = "attribute-changed"
    TOPOLOGY_CHANGED = "topology-changed"
    PARENT_MISSING = "parent-missing"
    HIERARCHY_UNMET = "hierarchy-unmet"
    MODULE_UNACCOUNTED = "module-unaccounted"


_REPAIR = "validate --repair restores it from the other records"
_REBUILD = "validate --repair rebuilds it from the file"
_EXPORT = "export the model again, or restore the exported file"
_FIXES = {
    Code.ONNX_INVALID: _EXPORT,
    Code.DATA_MISSING: "put it back into the folder of the model",
    Code.DOC_MALFORMED: _REPAIR,
    Code.DOC_MISSING: _REPAIR,
    Code.TAG_FORMAT: _REPAIR,
    Code.COUNT_WRONG: "validate --repair corrects it",
    Code.METADATA_MISSING: _REPAIR,
    Code.METADATA_UNREADABLE: _REPAIR,
    Code.METADATA_DISAGREES: _REPAIR,
    Code.SIDECAR_MISSING: _REBUILD,
    Code.SIDECAR_UNREADABLE: _REBUILD,
    Code.SIDECAR_FOREIGN: f"put the right sidecar beside the model; {_REBUILD}",
    Code.SIDECAR_WRONG: _REBUILD,
    Code.TAG_UNKNOWN: _REPAIR,
    Code.TAG_WRONG: _REPAIR,
    Code.CONSUMERS_WRONG: "validate --repair recomputes it from the graph",
    Code.TENSOR_WRONG: _REBUILD,
    Code.NODE_ADDED: _EXPORT,
    Code.NODE_REMOVED: _EXPORT,
    Code.OPERATOR_CHANGED: _EXPORT,
    Code.EDGE_MOVED: _EXPORT,
    Code.ATTRIBUTE_CHANGED: _EXPORT,
    Code.TOPOLOGY_CHANGED: _EXPORT,
    Code.PARENT_MISSING: _EXPORT,
    Code.HIERARCHY_UNMET: _EXPORT,
    Code.MODULE_UNACCOUNTED: _EXPORT,
}


class Finding(msgspec.Struct, frozen=True):
    """One defect; `place` is a node (by its first output), a value, a module path or a file."""

    code: str
    """The kind of damage, such as `doc-missing` or `edge-moved`."""
    severity: str
    """`error` makes the file invalid; `warning` does not."""
    place: str
    message: str
    fix: str
    """What to do about it."""


def make_finding(code: Code, place: str, message: str) -> Finding:
    """Create an error with the fix for its kind of damage.

    Args:
        code: The kind of damage.
        place: The node, value, module path or file that is damaged.
        message: What is wrong there.

    Returns:
        The finding.
    """
    return Finding(str(code), str(Severity.ERROR), place, message, _FIXES[code])
