"""Edits of serialised models keep all other bytes, and every edit can be undone."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from modelexport.errors import FormatError
from modelexport.graph.flat import flatten
from modelexport.modules.record import NodeTag
from modelexport.onnx_file import wire
from modelexport.onnx_file.doc_strings import rewrite_doc_strings
from modelexport.tagged.records import decode_tag, encode_tag
from modelexport.tagged.strip import stripped_chunks

pytestmark = pytest.mark.must

docs = st.none() | st.text(max_size=8)


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Models with or without subgraphs, functions, initializers and doc_strings."""

    def node(name: str, depth: int) -> onnx.NodeProto:
        made = helper.make_node("Anything", ["x"], [name])
        text = draw(docs)
        if text is not None:
            made.doc_string = text
        if depth and draw(st.booleans()):
            made.attribute.append(helper.make_attribute("body", graph(f"{name}_b", depth - 1)))
        if draw(st.booleans()):
            made.attribute.append(helper.make_attribute("alpha", 1.5))
        return made

    def graph(name: str, depth: int) -> onnx.GraphProto:
        nodes = [node(f"{name}_{i}", depth) for i in range(draw(st.integers(0, 3)))]
        sizes = draw(st.lists(st.sampled_from([5, 300]), max_size=2))
        weights = [
            numpy_helper.from_array(np.arange(size, dtype=np.float32), f"{name}_w{size}")
            for size in sizes
        ]
        return helper.make_graph(nodes, name, [], [], weights, doc_string=draw(st.text(max_size=3)))

    functions = []
    if draw(st.booleans()):
        functions = [
            helper.make_function(
                "d", "f", ["x"], ["y"], [node("y", 1)], [helper.make_opsetid("", 18)]
            )
        ]
    model = helper.make_model(graph("main", 2), functions=functions)
    for key in draw(st.lists(st.sampled_from(["a", "b"]), unique=True)):
        model.metadata_props.add(key=key, value="1")
    return model


@given(models())
def test_strip_undoes_tagging_to_the_byte(model: onnx.ModelProto) -> None:
    data = model.SerializeToString()
    count = len(flatten(model).nodes)
    tags = [NodeTag(("/T",), "/T", 1, "scope", f"m{i}") for i in range(count)]
    queue = iter(tags)
    pieces = rewrite_doc_strings(
        data,
        lambda old: encode_tag(
            msgspec.structs.replace(next(queue), doc=None if old is None else old.decode())
        ),
        add_metadata=("modelexport.hierarchy", "{}"),
    )
    tagged = b"".join(pieces)
    assert next(queue, None) is None, "one edit a node"
    parsed = onnx.ModelProto.FromString(tagged)
    found = [decode_tag(node.doc_string) for node in flatten(parsed).protos]
    assert [tag.hierarchy_module for tag in found] == [f"m{i}" for i in range(count)]
    assert parsed.SerializeToString() == tagged, (
        "another program that reads and writes the file keeps its bytes"
    )
    assert b"".join(stripped_chunks(tagged)) == data
    assert b"".join(stripped_chunks(memoryview(tagged))) == data


@given(models())
def test_reading_without_weights_keeps_all_else(model: onnx.ModelProto) -> None:
    read = onnx.ModelProto.FromString(wire.without_payload(model.SerializeToString()))
    emptied = onnx.ModelProto()
    emptied.CopyFrom(model)
    for tensor in emptied.graph.initializer:
        if tensor.dims[0] == 300:
            tensor.ClearField("raw_data")
    assert read == emptied


@pytest.mark.parametrize(
    "data_type", [TensorProto.FLOAT, TensorProto.INT64, TensorProto.DOUBLE, TensorProto.INT32]
)
def test_every_kind_of_payload_is_left_out(data_type: int) -> None:
    tensor = helper.make_tensor("w", data_type, [2000], range(2000))
    model = helper.make_model(helper.make_graph([], "g", [], [], [tensor]))
    read = onnx.ModelProto.FromString(wire.without_payload(model.SerializeToString()))
    assert read.graph.initializer[0].dims == [2000]
    assert read.graph.initializer[0].ByteSize() < 20


@given(st.binary(max_size=60))
def test_noise_is_refused_or_read_never_worse(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        wire.without_payload(data)


def test_a_graph_in_an_attribute_of_another_type_is_no_part_of_the_model() -> None:
    body = helper.make_graph([helper.make_node("Inner", [], ["y"])], "body", [], [])
    node = helper.make_node("Outer", ["x"], ["z"], name="outer", body=body)
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    edited: list[bytes | None] = []
    rewrite_doc_strings(model.SerializeToString(), edited.append)
    assert len(edited) == 2
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.FLOAT
    edited.clear()
    assert (
        b"".join(rewrite_doc_strings(model.SerializeToString(), edited.append))
        == model.SerializeToString()
    )
    assert len(edited) == 1 == len(flatten(model).nodes)


def test_a_cut_file_is_refused() -> None:
    model = helper.make_model(helper.make_graph([helper.make_node("A", ["x"], ["y"])], "g", [], []))
    data = model.SerializeToString()
    cuts = [length for length in range(1, len(data)) if _refused(data[:length])]
    whole_fields = len(list(wire.fields(data, 0, len(data)))) - 1
    assert len(cuts) == len(data) - 1 - whole_fields, "every cut inside a field is noticed"


def _refused(data: bytes) -> bool:
    try:
        wire.without_payload(data)
    except FormatError as error:
        return error.hint is not None
    return False


def test_a_tag_reads_back() -> None:
    tag = NodeTag(("/A", "/B"), "/A", 2, "scope", "a.b", 3)
    text = encode_tag(tag)
    assert decode_tag(text) == tag
    assert text.startswith(
        b'{"hierarchy_tags":["/A","/B"],"hierarchy_path":"/A","hierarchy_count":2,'
    )
    assert decode_tag(encode_tag(msgspec.structs.replace(tag, doc="was here"))).doc == "was here"
    for other in ("", "plain text", "{}", '{"hierarchy_path": 3}', "[1, 2"):
        assert decode_tag(other) is None
