"""Mutate protobuf messages of ONNX: the encoded fields, or the decoded message."""

from __future__ import annotations

import copy

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from onnx import ModelProto

from fuzz import mutate_bytes, mutate_json
from fuzz.mutate_bytes import Draw, pick_index
from modelexport.errors import FormatError
from modelexport.onnx_file import wire

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINTS = (
    *(b"\x00", b"\x7f", b"\xff\x7f"),
    b"\xff" * 4 + b"\x07",
    b"\xff" * 8 + b"\x7f",
    b"\xff" * 9 + b"\x01",
    b"\xff" * 10,
)
"""Small, huge and invalid varints."""
_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 16, 22, 99, 127),
    *(1 << 31, -(1 << 31), (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63)),
)
_TEXTS = (
    *("", "x", "y", "é", "\0", "a b", "/", "../x", "\x1b[31m", "\n"),
    *("x" * 3000, "{", "ai.onnx", "If", "Loop", "Add"),
)
_INVALID_UTF8 = b"\xff\xfe"


def mutate_fields(draw: Draw, data: bytes) -> bytes:
    """Mutate one encoded field of a message, at any depth."""
    fields = _decode_fields(data)
    if not fields:
        return mutate_bytes.mutate(draw, data, data)
    at = pick_index(draw, len(fields))
    key, value = fields[at]
    if key & 7 == _BYTES and _decode_fields(value) and draw(st.integers(0, 3)):
        fields[at] = key, mutate_fields(draw, value)
    else:
        draw(st.sampled_from(_MUTATIONS))(draw, fields, at)
    return b"".join(_encode_field(*field) for field in fields)


Fields = list[tuple[int, bytes]]
"""The key and the value of each field, without the length of the value.

A negative key stands for bytes that are written as they are.
"""


def _decode_fields(data: bytes) -> Fields:
    """Return the fields of a message; none if the bytes are no message."""
    try:
        fields = list(wire.fields(data, 0, len(data)))
    except FormatError:
        return []
    return [(field.number << 3 | field.kind, data[field.payload : field.end]) for field in fields]


def _encode_field(key: int, value: bytes) -> bytes:
    if key < 0:
        return value
    return _encode_varint(key) + (_encode_varint(len(value)) if key & 7 == _BYTES else b"") + value


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def _drop(draw: Draw, fields: Fields, at: int) -> None:
    del fields[at]


def _double(draw: Draw, fields: Fields, at: int) -> None:
    fields[at:at] = [fields[at]] * draw(st.sampled_from((1, 2, 100)))


def _move(draw: Draw, fields: Fields, at: int) -> None:
    field = fields.pop(at)
    fields.insert(pick_index(draw, len(fields) + 1), field)


def _renumber(draw: Draw, fields: Fields, at: int) -> None:
    key, value = fields[at]
    fields[at] = draw(st.integers(0, 30)) << 3 | key & 7, value


def _retype(draw: Draw, fields: Fields, at: int) -> None:
    """Change the wire type, with a value of that type or the earlier one."""
    key, value = fields[at]
    kind = draw(st.integers(0, 7))
    values = {_VARINT: draw(st.sampled_from(_VARINTS)), _FIXED64: bytes(8), _FIXED32: bytes(4)}
    fields[at] = key & ~7 | kind, values.get(kind, value) if draw(st.booleans()) else value


def _copy(draw: Draw, fields: Fields, at: int) -> None:
    fields[at] = fields[at][0], fields[pick_index(draw, len(fields))][1]


def _replace(draw: Draw, fields: Fields, at: int) -> None:
    """Replace the value by a huge number, invalid UTF-8 or mutated bytes."""
    key, value = fields[at]
    if key & 7 == _VARINT:
        fields[at] = key, draw(st.sampled_from(_VARINTS))
    else:
        new = draw(st.sampled_from((b"", _INVALID_UTF8, None)))
        fields[at] = key, mutate_bytes.mutate(draw, value, value) if new is None else new


def _falsify_length(draw: Draw, fields: Fields, at: int) -> None:
    """Write a length that is not that of the value."""
    key, value = fields[at]
    fields[at] = -1, _encode_varint(key & ~7 | _BYTES) + draw(st.sampled_from(_VARINTS)) + value


def _nest(draw: Draw, fields: Fields, at: int) -> None:
    """Nest a field inside itself many times."""
    key, value = fields[at]
    if len(value) < 4000:
        for _ in range(draw(st.sampled_from((1, 30, 99, 300)))):
            value += _encode_field(key & ~7 | _BYTES, value) if len(value) < 4000 else b""
            value = _encode_field(key & ~7 | _BYTES, value)
        fields[at] = key & ~7 | _BYTES, value


_MUTATIONS = (
    _drop,
    _double,
    _move,
    _renumber,
    _retype,
    _copy,
    _replace,
    _replace,
    _falsify_length,
    _nest,
)


def mutate_message(draw: Draw, data: bytes, kind: type[Message] = ModelProto) -> bytes:
    """Mutate one value of a decoded message; return bytes that are no message as they are."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return data
    messages = _find_messages(message)
    inner = messages[pick_index(draw, len(messages))]
    fields = list(inner.DESCRIPTOR.fields)
    present = [field for field, _ in inner.ListFields()]
    field = draw(st.sampled_from(present if present and draw(st.integers(0, 3)) else fields))
    _change(draw, inner, field, messages)
    return message.SerializeToString()


def _find_messages(message: Message) -> list[Message]:
    """Return a message and all messages inside it."""
    messages = [message]
    for outer in messages:
        for field, value in outer.ListFields():
            if field.message_type is not None:
                messages += value if field.is_repeated else [value]
    return messages


def _change(draw: Draw, message: Message, field: FieldDescriptor, messages: list[Message]) -> None:
    if not field.is_repeated:
        if field.message_type is not None:
            _copy_message(draw, getattr(message, field.name), messages)
        elif draw(st.integers(0, 7)):
            setattr(message, field.name, _draw_scalar(draw, message, field, messages))
        else:
            message.ClearField(field.name)
        return
    values = getattr(message, field.name)
    action = draw(st.sampled_from(("add", "double", "drop", "set", "move")))
    if action == "add" or not values:
        if field.message_type is not None:
            _copy_message(draw, values.add(), messages)
        else:
            values.append(_draw_scalar(draw, message, field, messages))
        return
    at = pick_index(draw, len(values))
    value = values[at]
    if action == "double":
        values.append(value)
    elif action == "drop":
        del values[at]
    elif action == "move":
        kept = [copy.deepcopy(value) for value in values]
        kept.insert(pick_index(draw, len(kept)), kept.pop(at))
        message.ClearField(field.name)
        getattr(message, field.name).extend(kept)
    elif field.message_type is not None:
        _copy_message(draw, value, messages)
    else:
        values[at] = _draw_scalar(draw, message, field, messages)


def _copy_message(draw: Draw, message: Message, messages: list[Message]) -> None:
    """Replace a message by another one of its type, if there is one; a graph may contain itself."""
    same_type = [other for other in messages if other.DESCRIPTOR == message.DESCRIPTOR]
    new = draw(st.sampled_from(same_type)).SerializeToString() if same_type else b""
    message.Clear()
    message.ParseFromString(new)


def _draw_scalar(
    draw: Draw, message: Message, field: FieldDescriptor, messages: list[Message]
) -> object:
    """Draw a value for a field: an odd one or, for a string, one of another field."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw(st.sampled_from([value.number for value in field.enum_type.values]))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.sampled_from((b"", b"x", _INVALID_UTF8, bytes(8), bytes(4096))))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _draw_text(draw, getattr(message, field.name), messages)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw(st.sampled_from((0.0, -1.0, float("inf"), float("nan"), 1e30)))
    bits, signed = (32 if "32" in _type_name(field) else 64), not _type_name(field).startswith("U")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return draw(st.sampled_from([number for number in _NUMBERS if low <= number <= high]))


def _type_name(field: FieldDescriptor) -> str:
    return {FieldDescriptor.CPPTYPE_INT32: "INT32", FieldDescriptor.CPPTYPE_INT64: "INT64"}.get(
        field.cpp_type, "UINT32" if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else "UINT64"
    )


def _draw_text(draw: Draw, old: object, messages: list[Message]) -> str:
    choice = draw(st.integers(0, 3))
    if choice == 0:
        return draw(st.sampled_from(_TEXTS))
    if choice == 1 and isinstance(old, str) and old.startswith("{"):
        return mutate_json.mutate(draw, old.encode()).decode("utf-8", "replace")
    texts = [
        text
        for message in messages
        for field, value in message.ListFields()
        for text in (value if field.is_repeated else [value])
        if isinstance(text, str)
    ]
    return draw(st.sampled_from(texts)) if texts else ""
