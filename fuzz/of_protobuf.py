"""Damage to ONNX's protobuf: in its bytes, field by field, and in what its messages say."""

from __future__ import annotations

import copy

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from onnx import ModelProto

from fuzz import of_bytes, of_json
from fuzz.of_bytes import Draw, place
from modelexport.errors import FormatError
from modelexport.onnx_file import wire

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_HUGE = (
    *(b"\x00", b"\x7f", b"\xff\x7f"),
    b"\xff" * 4 + b"\x07",
    b"\xff" * 8 + b"\x7f",
    b"\xff" * 9 + b"\x01",
    b"\xff" * 10,
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    22,
    99,
    127,
    1 << 31,
    -(1 << 31),
    (1 << 31) - 1,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
)
_TEXTS = (
    "",
    "x",
    "y",
    "é",
    "\0",
    "a b",
    "/",
    "../x",
    "\x1b[31m",
    "\n",
    "x" * 3000,
    "{",
    "ai.onnx",
    "If",
    "Loop",
    "Add",
)
_NO_TEXT = b"\xff\xfe"


def in_fields(draw: Draw, data: bytes) -> bytes:
    """One change in the encoding of a message, at any depth."""
    fields = _fields(data)
    if not fields:
        return of_bytes.damaged(draw, data, data)
    at = place(draw, len(fields))
    key, body = fields[at]
    if key & 7 == _BYTES and _fields(body) and draw(st.integers(0, 3)):
        fields[at] = key, in_fields(draw, body)
    else:
        draw(st.sampled_from(_KINDS))(draw, fields, at)
    return b"".join(_encoded(*field) for field in fields)


Fields = list[tuple[int, bytes]]
"""The key of each field, and its value; a message or text without its length."""


def _fields(data: bytes) -> Fields:
    try:
        found = list(wire.fields(data, 0, len(data)))
    except FormatError:
        return []
    return [(field.number << 3 | field.kind, data[field.body : field.end]) for field in found]


def _encoded(key: int, body: bytes) -> bytes:
    if key < 0:  # as it stands
        return body
    return _varint(key) + (_varint(len(body)) if key & 7 == _BYTES else b"") + body


def _varint(value: int) -> bytes:
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
    fields.insert(place(draw, len(fields) + 1), field)


def _renumber(draw: Draw, fields: Fields, at: int) -> None:
    key, body = fields[at]
    fields[at] = draw(st.integers(0, 30)) << 3 | key & 7, body


def _retype(draw: Draw, fields: Fields, at: int) -> None:
    """Another wire type, with a value of that type or what was there."""
    key, body = fields[at]
    kind = draw(st.integers(0, 7))
    fitting = {_VARINT: draw(st.sampled_from(_HUGE)), _FIXED64: bytes(8), _FIXED32: bytes(4)}
    fields[at] = key & ~7 | kind, fitting.get(kind, body) if draw(st.booleans()) else body


def _swap(draw: Draw, fields: Fields, at: int) -> None:
    fields[at] = fields[at][0], fields[place(draw, len(fields))][1]


def _body(draw: Draw, fields: Fields, at: int) -> None:
    """Other bytes, a number beyond all bounds, or a text that is none."""
    key, body = fields[at]
    if key & 7 == _VARINT:
        fields[at] = key, draw(st.sampled_from(_HUGE))
    else:
        new = draw(st.sampled_from((b"", _NO_TEXT, None)))
        fields[at] = key, of_bytes.damaged(draw, body, body) if new is None else new


def _lie(draw: Draw, fields: Fields, at: int) -> None:
    """A length that is not the one of what follows."""
    key, body = fields[at]
    fields[at] = -1, _varint(key & ~7 | _BYTES) + draw(st.sampled_from(_HUGE)) + body


def _nest(draw: Draw, fields: Fields, at: int) -> None:
    """A field inside itself, again and again."""
    key, body = fields[at]
    if len(body) < 4000:
        for _ in range(draw(st.sampled_from((1, 30, 99, 300)))):
            body += _encoded(key & ~7 | _BYTES, body) if len(body) < 4000 else b""
            body = _encoded(key & ~7 | _BYTES, body)
        fields[at] = key & ~7 | _BYTES, body


_KINDS = (_drop, _double, _move, _renumber, _retype, _swap, _body, _body, _lie, _nest)


def in_meaning(draw: Draw, data: bytes, kind: type[Message] = ModelProto) -> bytes:
    """One change in what a message says, so that it is a message still; what is none comes back as it was."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return data
    everything = _messages(message)
    inner = everything[place(draw, len(everything))]
    fields = list(inner.DESCRIPTOR.fields)
    present = [field for field, _ in inner.ListFields()]
    field = draw(st.sampled_from(present if present and draw(st.integers(0, 3)) else fields))
    _change(draw, inner, field, everything)
    return message.SerializeToString()


def _messages(message: Message) -> list[Message]:
    """A message and all inside it."""
    found = [message]
    for outer in found:
        for field, value in outer.ListFields():
            if field.message_type is not None:
                found += value if field.is_repeated else [value]
    return found


def _change(
    draw: Draw, message: Message, field: FieldDescriptor, everything: list[Message]
) -> None:
    if not field.is_repeated:
        if field.message_type is not None:
            _copy(draw, getattr(message, field.name), everything)
        elif draw(st.integers(0, 7)):
            setattr(message, field.name, _scalar(draw, message, field, everything))
        else:
            message.ClearField(field.name)
        return
    values = getattr(message, field.name)
    action = draw(st.sampled_from(("add", "double", "drop", "set", "move")))
    if action == "add" or not values:
        if field.message_type is not None:
            _copy(draw, values.add(), everything)
        else:
            values.append(_scalar(draw, message, field, everything))
        return
    at = place(draw, len(values))
    value = values[at]
    if action == "double":
        values.append(value)
    elif action == "drop":
        del values[at]
    elif action == "move":
        kept = [copy.deepcopy(value) for value in values]
        kept.insert(place(draw, len(kept)), kept.pop(at))
        message.ClearField(field.name)
        getattr(message, field.name).extend(kept)
    elif field.message_type is not None:
        _copy(draw, value, everything)
    else:
        values[at] = _scalar(draw, message, field, everything)


def _copy(draw: Draw, message: Message, everything: list[Message]) -> None:
    """What another message of the same kind says, or nothing; a graph inside itself is such a case."""
    alike = [other for other in everything if other.DESCRIPTOR == message.DESCRIPTOR]
    new = draw(st.sampled_from(alike)).SerializeToString() if alike else b""
    message.Clear()
    message.ParseFromString(new)


def _scalar(
    draw: Draw, message: Message, field: FieldDescriptor, everything: list[Message]
) -> object:
    """A value of a field: one that the same or any text field has elsewhere, or an odd one."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw(st.sampled_from([value.number for value in field.enum_type.values]))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.sampled_from((b"", b"x", _NO_TEXT, bytes(8), bytes(4096))))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _text(draw, getattr(message, field.name), everything)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw(st.sampled_from((0.0, -1.0, float("inf"), float("nan"), 1e30)))
    bits, signed = (32 if "32" in _name(field) else 64), not _name(field).startswith("U")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return draw(st.sampled_from([number for number in _NUMBERS if low <= number <= high]))


def _name(field: FieldDescriptor) -> str:
    return {FieldDescriptor.CPPTYPE_INT32: "INT32", FieldDescriptor.CPPTYPE_INT64: "INT64"}.get(
        field.cpp_type, "UINT32" if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else "UINT64"
    )


def _text(draw: Draw, old: object, everything: list[Message]) -> str:
    choice = draw(st.integers(0, 3))
    if choice == 0:
        return draw(st.sampled_from(_TEXTS))
    if choice == 1 and isinstance(old, str) and old.startswith("{"):
        return of_json.damaged(draw, old.encode()).decode("utf-8", "replace")
    texts = [
        v
        for m in everything
        for f, found in m.ListFields()
        for v in (found if f.is_repeated else [found])
        if isinstance(v, str)
    ]
    return draw(st.sampled_from(texts)) if texts else ""
