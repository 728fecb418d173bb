"""Restore the flat model from one whose modules are local functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import onnx

from modelexport.errors import FormatError, plural
from modelexport.onnx_file import wire
from modelexport.tagged.records import FUNCTIONS_KEY, UNREADABLE
from modelexport.viewing.function_bytes import (
    FORMAT,
    FUNCTION_NODE,
    MODEL_IR_VERSION,
    MODEL_METADATA,
    MODEL_OPSETS,
    FunctionsRecord,
    ir_version_field,
    replace_nodes,
)

_Content = tuple[Sequence[onnx.NodeProto], list[wire.Field]]
"""The nodes of a graph or a function, and where they are in the file."""


def read_record(proto: onnx.ModelProto, name: str) -> FunctionsRecord:
    """Return the record by which a file with functions is inlined.

    Args:
        proto: The model.
        name: The name of its file, for messages.

    Raises:
        FormatError: The file has no record, or one that cannot be read.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == FUNCTIONS_KEY), None)
    if text is None:
        raise FormatError(
            f"{name} was not written by modelexport functions",
            hint="only such a file can be inlined",
        )
    try:
        record = msgspec.json.decode(text, type=FunctionsRecord)
    except UNREADABLE as error:
        raise altered(name, f"its {FUNCTIONS_KEY} metadata cannot be read: {error}") from error
    if record.format != FORMAT:
        raise FormatError(
            f"the functions of {name} are in the format {record.format!r}",
            hint="inline it with the version that wrote it",
        )
    return record


def altered(name: str, reason: str) -> FormatError:
    """Return the error for a file that cannot be inlined because it was changed."""
    return FormatError(
        f"{name} was changed after modelexport functions wrote it: {reason}",
        hint="write it again from the flat file",
    )


def flat_chunks(
    data: wire.Buffer, proto: onnx.ModelProto, record: FunctionsRecord, name: str
) -> Iterator[wire.Buffer]:
    """Iterate over the chunks of the flat model.

    Args:
        data: The model with functions.
        proto: The same, without initializer data.
        record: Its record.
        name: The name of its file, for messages.

    Raises:
        FormatError: The file was changed.
    """
    if len(list(wire.graphs(data))) != 1:
        raise altered(name, "its graph is in several parts")
    functions = iter(proto.functions)
    own: dict[str, _Content] = {}
    added: set[int] = set()
    for field in wire.fields(data, 0, len(data)):
        if field.is_bytes(wire.MODEL_FUNCTIONS):
            function = next(functions)
            if function.domain == record.domain:
                nodes = wire.messages(data, field.payload, field.end, FUNCTION_NODE)
                own[function.name] = function.node, list(nodes)
                added.add(field.start)
    for field in wire.fields(data, 0, len(data)):
        if field.number == MODEL_IR_VERSION:
            yield ir_version_field(record.ir_version)
        elif field.is_bytes(wire.MODEL_GRAPH):
            calls = list(wire.nodes(data, field))
            inlined = _inline((proto.graph.node, calls), own, record.domain, name)
            ordered = _restore_order(inlined, record, name)
            chunks = [chunk for node in ordered for chunk in _as_graph_node(data, node)]
            yield from wire.delimited(wire.MODEL_GRAPH, replace_nodes(data, field, calls, chunks))
        elif field.start not in added and not _is_added(data, field, record.domain):
            yield data[field.start : field.end]


def _as_graph_node(data: wire.Buffer, node: wire.Field) -> tuple[wire.Buffer, wire.Buffer]:
    return wire.header(wire.GRAPH_NODE, node.end - node.payload), data[node.payload : node.end]


def _is_added(data: wire.Buffer, field: wire.Field, domain: str) -> bool:
    """Return whether the functions came with an entry of the model's opsets or metadata."""
    content = data[field.payload : field.end]
    if field.is_bytes(MODEL_OPSETS):
        return bool(onnx.OperatorSetIdProto.FromString(bytes(content)).domain == domain)
    if field.is_bytes(MODEL_METADATA):
        return bool(onnx.StringStringEntryProto.FromString(bytes(content)).key == FUNCTIONS_KEY)
    return False


def _inline(
    main: _Content, functions: dict[str, _Content], domain: str, name: str
) -> list[wire.Field]:
    """Return the nodes of the main graph, with those of a function instead of its call."""
    inlined: list[wire.Field] = []
    remaining = dict(functions)
    pending = [iter(list(zip(*main, strict=True)))]
    while pending:
        node, field = next(pending[-1], (None, None))
        if node is None or field is None:
            pending.pop()
        elif node.domain != domain:
            inlined.append(field)
        else:
            # Each function is called once: another call, or none to be found, is a change.
            content = remaining.pop(node.op_type, None)
            if content is None:
                raise altered(name, f"no function {node.op_type!r} is left for a node")
            pending.append(iter(list(zip(*content, strict=True))))
    if remaining:
        raise altered(name, f"nothing calls the function {next(iter(remaining))!r}")
    return inlined


def _restore_order(
    inlined: list[wire.Field], record: FunctionsRecord, name: str
) -> list[wire.Field]:
    """Return the nodes in the order of the flat file."""
    total = sum(count for _, count in record.order)
    if total != len(inlined):
        raise altered(name, f"it has {plural(len(inlined), 'node')} instead of {total:,}")
    ordered: list[wire.Field] = []
    starts = accumulate((count for _, count in record.order), initial=0)
    for (_, count), start in sorted(zip(record.order, starts, strict=False)):
        ordered += inlined[start : start + count]
    return ordered
