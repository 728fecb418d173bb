"""The findings of a validation: every code with its severity and its fix."""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Code(enum.StrEnum):
    """One code for each kind of damage."""

    ONNX_INVALID = "onnx-invalid"
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


_REPAIR = "validate --repair writes it anew from what is recorded"
_EXPORT = "export the model again, or go back to the file as it was exported"
_FIXES = {
    Code.ONNX_INVALID: _EXPORT,
    Code.DOC_MALFORMED: _REPAIR,
    Code.DOC_MISSING: _REPAIR,
    Code.TAG_FORMAT: _REPAIR,
    Code.COUNT_WRONG: "validate --repair counts again",
    Code.METADATA_MISSING: _REPAIR,
    Code.METADATA_UNREADABLE: _REPAIR,
    Code.METADATA_DISAGREES: _REPAIR,
    Code.SIDECAR_MISSING: "validate --repair rebuilds it from the file",
    Code.SIDECAR_UNREADABLE: "validate --repair rebuilds it from the file",
    Code.SIDECAR_FOREIGN: "put the right sidecar beside the model; validate --repair rebuilds it from the file",
    Code.SIDECAR_WRONG: "validate --repair rebuilds it from the file",
    Code.TAG_UNKNOWN: _REPAIR,
    Code.TAG_WRONG: _REPAIR,
    Code.CONSUMERS_WRONG: "validate --repair finds the consumers again",
    Code.TENSOR_WRONG: "validate --repair rebuilds it from the file",
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
    """One thing that is not as it should be: `place` is a node (its first output), a module path or a file."""

    code: str
    """What kind of damage, as `doc-missing` or `edge-moved`."""
    severity: str
    """Errors make the answer no; warnings do not."""
    place: str
    message: str
    fix: str
    """What to do about it."""


def make_finding(
    code: Code, place: str, message: str, severity: Severity = Severity.ERROR
) -> Finding:
    return Finding(str(code), str(severity), place, message, _FIXES[code])
