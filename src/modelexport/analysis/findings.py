"""The findings of a validation: the code of each kind of damage, and its fix."""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"


_REPAIR = "validate --repair restores it from the other records"
_REBUILD = "validate --repair rebuilds it from the file"
_EXPORT = "export it again, or restore it; retag what another tool made"


class Code(enum.StrEnum):
    """The kinds of damage, each with its fix."""

    fix: str

    def __new__(cls, code: str, fix: str) -> Code:
        """Create a member whose value is the code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.fix = fix
        return member

    ONNX_INVALID = "onnx-invalid", _EXPORT
    DATA_MISSING = "data-missing", "put it back into the folder of the model"
    DOC_MALFORMED = "doc-malformed", _REPAIR
    DOC_MISSING = "doc-missing", _REPAIR
    TAG_FORMAT = "tag-format", _REPAIR
    COUNT_WRONG = "count-wrong", "validate --repair corrects it"
    METADATA_MISSING = "metadata-missing", _REPAIR
    METADATA_UNREADABLE = "metadata-unreadable", _REPAIR
    METADATA_DISAGREES = "metadata-disagrees", _REPAIR
    SIDECAR_MISSING = "sidecar-missing", _REBUILD
    SIDECAR_UNREADABLE = "sidecar-unreadable", _REBUILD
    SIDECAR_FOREIGN = "sidecar-foreign", f"put the right sidecar beside the model; {_REBUILD}"
    SIDECAR_WRONG = "sidecar-wrong", _REBUILD
    TAG_UNKNOWN = "tag-unknown", _REPAIR
    TAG_WRONG = "tag-wrong", _REPAIR
    CONSUMERS_WRONG = "consumers-wrong", "validate --repair recomputes it from the graph"
    TENSOR_WRONG = "tensor-wrong", _REBUILD
    NODE_ADDED = "node-added", _EXPORT
    NODE_REMOVED = "node-removed", _EXPORT
    OPERATOR_CHANGED = "operator-changed", _EXPORT
    EDGE_MOVED = "edge-moved", _EXPORT
    ATTRIBUTE_CHANGED = "attribute-changed", _EXPORT
    TOPOLOGY_CHANGED = "topology-changed", _EXPORT
    PARENT_MISSING = "parent-missing", _EXPORT
    HIERARCHY_UNMET = "hierarchy-unmet", _EXPORT
    MODULE_UNACCOUNTED = "module-unaccounted", _EXPORT


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


def make_finding(code: Code, subject: str, message: str) -> Finding:
    """Create an error about a node, value, module or file, with the fix for its kind of damage."""
    return Finding(str(code), str(Severity.ERROR), subject, message, code.fix)
