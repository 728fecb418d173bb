"""Mutate GraphML: the XML, and the parts of a model in it, with checksums that match."""

from __future__ import annotations

import base64
import binascii

import onnx
from hypothesis import strategies as st
from lxml import etree

from fuzz import mutate_json, mutate_protobuf
from fuzz.mutate_bytes import Draw, pick_index
from modelexport.graphml.format import GRAPHML, Kind, checksum

_NODE, _EDGE, _DATA, _KEY = (f"{{{GRAPHML}}}{name}" for name in ("node", "edge", "data", "key"))
_MESSAGES = {
    Kind.MODEL: onnx.ModelProto,
    Kind.INITIALIZER: onnx.TensorProto,
    Kind.SPARSE: onnx.SparseTensorProto,
}
_TEXTS = (
    *("", " ", "\n", "0", "-1", "1", "٣", "1e3", "999999999", "9" * 5000, "x", "é"),
    *("0/0", "1/0", "0/9", "n0", "If"),
)
_ENTITIES = (
    b'<!DOCTYPE graphml [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
)
_EXTERNAL = (
    b'<!DOCTYPE graphml SYSTEM "file:///etc/passwd" '
    b'[<!ENTITY % x SYSTEM "file:///etc/passwd"> %x;]>'
)

Element = etree._Element


def mutate(draw: Draw, text: bytes) -> bytes:
    """Apply one mutation to a document; return bytes that are not XML as they are."""
    try:
        root = etree.fromstring(text, etree.XMLParser(huge_tree=True, resolve_entities=False))
    except etree.XMLSyntaxError:
        return text
    elements = [e for e in root.iter(_NODE, _EDGE, _DATA, _KEY) if not len(e) or e.tag != _DATA]
    if not draw(st.integers(0, 9)):
        elements = list(root.iter(etree.Element))
    if elements:
        draw(st.sampled_from(_MUTATIONS))(draw, elements[pick_index(draw, len(elements))], elements)
    if draw(st.integers(0, 3)):
        _write_checksums(root)
    return _mutate_text(draw, etree.tostring(root, xml_declaration=True, encoding="utf-8"))


def _write_checksums(root: Element) -> None:
    """Write checksums that match; otherwise readers would stop at that check."""
    names = {
        key.get("id"): key.get("attr.name") for key in root.iter(_KEY) if key.get("for") == "node"
    }
    for node in root.iter(_NODE):
        texts = {names.get(data.get("key")): data for data in node.iterchildren(_DATA)}
        if "onnx" in texts and "check" in texts:
            try:
                message = base64.b64decode(
                    "".join((texts["onnx"].text or "").split()), validate=True
                )
            except (binascii.Error, ValueError):
                continue
            stored = "" if texts.get("values") is None else texts["values"].text or ""
            texts["check"].text = checksum(message, stored)


def _mutate_text(draw: Draw, text: bytes) -> bytes:
    """Sometimes write text that an XML library would not write."""
    choice = draw(st.integers(0, 30))
    head, _, body = text.partition(b"?>\n")
    if choice == 1:
        return head + b"?>\n" + _ENTITIES + body.replace(b">", b">&b;", 2)
    if choice == 2:
        return head + b"?>\n" + _EXTERNAL + body
    if choice == 3:
        encoding = draw(st.sampled_from((b"utf-16", b"latin-1", b"ascii", b"utf-7", b"none")))
        return head.replace(b"UTF-8", encoding) + b"?>\n" + body
    if choice == 4:
        return text.decode().encode("utf-16")
    if choice == 5:
        depth = draw(st.sampled_from((50, 300, 5000)))
        nodes = b"".join(b'<node id="deep%d"><graph>' % number for number in range(depth))
        return text.replace(
            b"</graph></graphml>", nodes + b"</graph></node>" * depth + b"</graph></graphml>"
        )
    return text


def _drop(draw: Draw, element: Element, elements: list[Element]) -> None:
    if element.getparent() is not None:
        element.getparent().remove(element)


def _double(draw: Draw, element: Element, elements: list[Element]) -> None:
    if element.getparent() is not None:
        element.addnext(etree.fromstring(etree.tostring(element, with_tail=False)))


def _move(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Move an element before another one, or into it."""
    other = elements[pick_index(draw, len(elements))]
    if element in (other, *other.iterancestors()):
        return
    if draw(st.booleans()) and other.getparent() is not None:
        other.addprevious(element)
    else:
        other.append(element)


def _set_attribute(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Remove an attribute, or give it an odd value or that of another element."""
    names = list(element.attrib) or ["id"]
    name = draw(st.sampled_from(names))
    other = elements[pick_index(draw, len(elements))].get(name)
    new = draw(st.sampled_from((None, other, other, *_TEXTS)))
    if new is None:
        element.attrib.pop(name, None)
    else:
        element.set(name, new)


def _set_text(draw: Draw, element: Element, elements: list[Element]) -> None:
    other = elements[pick_index(draw, len(elements))].text
    element.text = draw(st.sampled_from((other, other, *_TEXTS)))


def _swap_texts(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Swap the texts of two elements under the same key."""
    same_key = [e for e in elements if e.get("key") == element.get("key")]
    other = same_key[pick_index(draw, len(same_key))]
    element.text, other.text = other.text, element.text


def _swap_ids(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Swap the ids of two nodes."""
    nodes = [e for e in elements if e.tag == _NODE]
    if len(nodes) > 1:
        first, second = nodes[pick_index(draw, len(nodes))], nodes[pick_index(draw, len(nodes))]
        one, two = first.get("id", ""), second.get("id", "")
        first.set("id", two)
        second.set("id", one)


def _rename(draw: Draw, element: Element, elements: list[Element]) -> None:
    element.tag = draw(
        st.sampled_from((_NODE, _EDGE, _DATA, _KEY, f"{{{GRAPHML}}}graph", "x", "{http://x}node"))
    )


def _mutate_message(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Mutate the message of an operator, an initializer or the model."""
    holders = [e for e in elements if e.get("key") == "n_onnx" and e.text]
    if not holders:
        return
    holder = holders[pick_index(draw, len(holders))]
    kind = next(
        (e.text for e in holder.itersiblings(_DATA, preceding=True) if e.get("key") == "n_kind"), ""
    )
    try:
        message = base64.b64decode(holder.text)
    except (binascii.Error, ValueError):
        return
    if draw(st.booleans()):
        message = mutate_protobuf.mutate_fields(draw, message)
    else:
        message = mutate_protobuf.mutate_message(draw, message, _MESSAGES.get(kind, onnx.NodeProto))
    holder.text = base64.b64encode(message).decode()


def _mutate_json(draw: Draw, element: Element, elements: list[Element]) -> None:
    """Mutate the JSON of attributes, of values or of their location."""
    holders = [
        e
        for e in elements
        if e.get("key") in ("n_values", "n_parameters", "n_attributes") and e.text
    ]
    if holders:
        holder = holders[pick_index(draw, len(holders))]
        new = mutate_json.mutate(draw, holder.text.encode()).decode("utf-8", "replace")
        holder.text = "".join(c for c in new if c >= " " or c in "\t\n")


_MUTATIONS = (
    *(_drop, _double, _move, _set_attribute, _set_text, _swap_texts, _swap_ids, _rename),
    *(_mutate_message,) * 4,
    *(_mutate_json,) * 2,
)
