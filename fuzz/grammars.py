"""Files made up from nothing: well formed by the rules of their kind, and otherwise whatever comes."""

from __future__ import annotations

import base64
import io
import zipfile
from typing import Any

import msgspec
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fuzz import of_json
from fuzz.of_bytes import Draw
from fuzz.of_json import Raw
from fuzz.seeds import MODULES
from modelexport.batch.jobs import BatchJob
from modelexport.graphml.format import (
    EDGE_KEYS,
    FORMAT_VERSION,
    GRAPH_KEYS,
    GRAPHML,
    NODE_KEYS,
    checksum,
)
from modelexport.modules.record import NodeTag
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import METADATA_KEY, EmbeddedMap, Sidecar, encode_tag

_NAMES = ("x", "y", "z", "w", "m", "a/b", "é", "", "x ", "main")
_PLAIN = "Add Relu MatMul Identity Shape Reshape Expand Range Tile Slice Squeeze SequenceConstruct Where Unsqueeze"
_OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_PLAIN.split(), ()),
    "Cast": ("to",),
    "Concat": ("axis",),
    "Constant": ("value", "value_ints", "value_float"),
    "ConstantOfShape": ("value",),
    "Conv": ("kernel_shape", "pads", "group"),
    "Einsum": ("equation",),
    "Gather": ("axis",),
    "Gemm": ("alpha", "transB"),
    "If": ("then_branch", "else_branch"),
    "Loop": ("body",),
    "LSTM": ("hidden_size",),
    "Optional": ("type",),
    "Own": ("g", "t", "i"),
    "Pad": ("mode",),
    "RandomNormal": ("shape",),
    "Resize": ("mode",),
    "Scan": ("body", "num_scan_inputs"),
    "Split": ("axis", "num_outputs"),
    "Transpose": ("perm",),
}
_SIZES = st.sampled_from((0, 1, 2, 3, -1, 20, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63)))
_names = st.sampled_from(_NAMES)
_some_names = st.lists(_names, max_size=3)


def model(draw: Draw) -> bytes:
    """A model of known operators, wired at random."""
    proto = onnx.ModelProto(ir_version=draw(st.sampled_from((10, 8, 3, 0, 99))))
    for domain in draw(st.lists(st.sampled_from(("", "own", "ai.onnx", "ai.onnx.ml")), max_size=3)):
        proto.opset_import.add(
            domain=domain, version=draw(st.sampled_from((21, 18, 11, 1, 0, 99, -1)))
        )
    proto.graph.CopyFrom(_graph(draw, 2))
    for _ in range(draw(st.integers(0, 1))):
        function = proto.functions.add(
            name="Own", domain="own", input=draw(_some_names), output=draw(_some_names)
        )
        function.node.extend(_node(draw, 0) for _ in range(draw(st.integers(0, 2))))
    if draw(st.booleans()):
        proto.metadata_props.add(key=METADATA_KEY, value=of_json.written(record(draw, EmbeddedMap)))
    return proto.SerializeToString()


def _graph(draw: Draw, depth: int) -> onnx.GraphProto:
    graph = onnx.GraphProto(name=draw(_names))
    graph.node.extend(_node(draw, depth) for _ in range(draw(st.integers(0, 4))))
    graph.input.extend(_value(draw) for _ in range(draw(st.integers(0, 2))))
    graph.output.extend(_value(draw) for _ in range(draw(st.integers(0, 2))))
    graph.value_info.extend(_value(draw) for _ in range(draw(st.integers(0, 1))))
    graph.initializer.extend(_tensor(draw) for _ in range(draw(st.integers(0, 2))))
    return graph


def _node(draw: Draw, depth: int) -> onnx.NodeProto:
    kind = draw(st.sampled_from(list(_OPERATORS)))
    node = onnx.NodeProto(
        op_type=kind, input=draw(_some_names), output=draw(_some_names), name=draw(_names)
    )
    node.domain = "own" if kind == "Own" else ""
    for name in _OPERATORS[kind]:
        if draw(st.integers(0, 5)):
            node.attribute.append(_attribute(draw, name, depth))
    if draw(st.booleans()):
        tags = draw(
            st.lists(
                st.sampled_from([tag for tag in MODULES.values() if tag]), min_size=1, max_size=2
            )
        )
        path = draw(st.sampled_from(list(MODULES)))
        node.doc_string = encode_tag(
            NodeTag(tuple(tags), tags[0], len(tags), "scope", path)
        ).decode()
    return node


def _attribute(draw: Draw, name: str, depth: int) -> onnx.AttributeProto:
    graphs = dict.fromkeys(("g", "body", "then_branch", "else_branch"), "g")
    kinds = {"axis": "i", "to": "i", "value": "t", "t": "t", **graphs}
    kind = kinds.get(name) if draw(st.integers(0, 9)) else None
    kind = kind or draw(st.sampled_from(("i", "ints", "f", "s", "t", "g")))
    if kind == "g" and depth:
        return helper.make_attribute(name, _graph(draw, depth - 1))
    if kind == "t":
        return helper.make_attribute(name, _tensor(draw))
    made = {"i": draw(_SIZES), "ints": [draw(_SIZES)], "f": 0.5, "s": draw(_names)}
    return helper.make_attribute(name, made.get(kind, 0))


def _tensor(draw: Draw) -> TensorProto:
    tensor = TensorProto(name=draw(_names), data_type=draw(st.integers(0, 26)))
    tensor.dims.extend(draw(st.lists(_SIZES, max_size=3)))
    field = draw(
        st.sampled_from(("raw_data", "int64_data", "float_data", "string_data", "external", "none"))
    )
    if field == "raw_data":
        tensor.raw_data = bytes(draw(st.sampled_from((0, 1, 4, 8, 24, 2000))))
    elif field == "external":
        tensor.data_location = TensorProto.EXTERNAL
        for key in draw(st.lists(st.sampled_from(("location", "offset", "length")), max_size=3)):
            place = draw(
                st.sampled_from(
                    ("m.onnx.data", "m.onnx", "../x", "0", "-1", "99", "9" * 30, "x", ".", "\0")
                )
            )
            tensor.external_data.add(key=key, value=place)
    elif field != "none":
        getattr(tensor, field).extend([b"x"] if field == "string_data" else [1, 2])
    return tensor


def _value(draw: Draw) -> onnx.ValueInfoProto:
    shape = draw(st.none() | st.lists(_SIZES | st.none() | st.just("n"), max_size=3))
    info = onnx.ValueInfoProto(name=draw(_names))
    if draw(st.integers(0, 5)):
        info.type.CopyFrom(helper.make_tensor_type_proto(draw(st.integers(0, 26)), None))
        for size in shape or ():
            dim = info.type.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            elif size:
                dim.dim_param = size
    return info


def sidecar(draw: Draw) -> bytes:
    return of_json.written(record(draw, Sidecar)).encode()


def jobs(draw: Draw) -> bytes:
    """A list of jobs that say all that a job can."""
    told = of_json.Object(
        [("jobs", [record(draw, BatchJob) for _ in range(draw(st.integers(0, 3)))])]
    )
    if draw(st.booleans()):
        told.append(("defaults", record(draw, BatchJob)))
    return of_json.written(told).encode()


def specs(draw: Draw) -> bytes:
    """Descriptions of inputs, most of them such as people write."""
    kinds = (
        "float32",
        "int64",
        "bool",
        "int8",
        "uint8",
        "bfloat16",
        "complex64",
        "float64",
        "uint64",
        "nn",
        "",
    )
    numbers = st.sampled_from(
        (0, 1, -1, 0.5, 2, 300, 1e10, -1e300, 1e308, 9223372036854775807, 1 << 64)
    )
    found = of_json.Object()
    for name in draw(_some_names):
        spec = of_json.Object([("shape", draw(st.lists(_SIZES, max_size=4)))])
        if draw(st.integers(0, 3)):
            spec.append(("dtype", draw(st.sampled_from(kinds))))
        if draw(st.booleans()):
            spec.append(("range", draw(st.lists(numbers, min_size=2, max_size=2))))
        found.append((name, spec))
    return of_json.written(found).encode()


def arrays(draw: Draw) -> bytes:
    """An .npz of arrays whose headers say what they like."""
    kinds = (
        "<f4",
        "<i8",
        "|b1",
        "|O",
        "<U4",
        "|S3",
        ">f4",
        "<M8[s]",
        "|V8",
        "<c8",
        "<u8",
        "<q9",
        "[('a', '<f4')]",
        "",
    )
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    ) as archive:
        for number in range(draw(st.integers(0, 3))):
            shape = ", ".join(map(str, draw(st.lists(_SIZES, max_size=3))))
            kind, turned = draw(st.sampled_from(kinds)), draw(st.booleans())
            header = f"{{'descr': '{kind}', 'fortran_order': {turned}, 'shape': ({shape},)}}"
            if not draw(st.integers(0, 9)):
                header = draw(
                    st.sampled_from(
                        ("{}", "x", "[" * 3000, "{'descr': 1, 'shape': 2, 'fortran_order': 3}", "")
                    )
                )
            version = draw(st.sampled_from((1, 2, 3, 9)))
            size = len(header).to_bytes(2 if version == 1 else 4, "little")
            body = bytes(draw(st.sampled_from((0, 4, 8, 24, 1 << 14))))
            name = draw(st.sampled_from((f"x{number}", f"../x{number}", "x" * number)))
            archive.writestr(
                f"{name}.npy", b"\x93NUMPY" + bytes((version, 0)) + size + header.encode() + body
            )
    return file.getvalue()


def record(draw: Draw, kind: Any) -> object:
    """A value that a record of ours would take, by the types of its fields."""
    return _of_type(draw, msgspec.inspect.type_info(kind))


_texts = st.sampled_from(
    (
        *MODULES,
        *(tag for tag in MODULES.values() if tag),
        *_NAMES,
        "nodes",
        "scope",
        "block",
        "m.onnx",
    )
)


def _of_type(draw: Draw, kind: msgspec.inspect.Type) -> object:
    match kind:
        case msgspec.inspect.StructType():
            return of_json.Object(
                (field.encode_name, _of_type(draw, field.type)) for field in kind.fields
            )
        case msgspec.inspect.DictType():
            keys = draw(st.lists(_texts, max_size=3))
            return of_json.Object((key, _of_type(draw, kind.value_type)) for key in keys)
        case msgspec.inspect.VarTupleType():
            return [_of_type(draw, kind.item_type) for _ in range(draw(st.integers(0, 2)))]
        case msgspec.inspect.UnionType():
            return _of_type(draw, draw(st.sampled_from(kind.types)))
        case msgspec.inspect.BoolType():
            return draw(st.booleans())
        case msgspec.inspect.IntType():
            return draw(_SIZES)
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.StrType():
            return draw(_texts)
    return Raw("null")


def graphml(draw: Draw) -> bytes:
    """Draw nodes that hold parts of models, each with its checksum."""
    keys = [
        f'<key id="{scope[0]}_{name}" for="{scope}" attr.name="{name}" attr.type="{kind}"/>'
        for scope, names in (("graph", GRAPH_KEYS), ("node", NODE_KEYS), ("edge", EDGE_KEYS))
        for name, kind in names.items()
    ]
    card = _drawn(
        draw,
        "model",
        onnx.ModelProto(graph=onnx.GraphProto(name="g"), ir_version=10).SerializeToString(),
    )
    mode = draw(st.sampled_from(PARAMETER_MODES))
    card += _data(
        "n",
        format_version=FORMAT_VERSION,
        parameters=of_json.written(of_json.Object([("mode", mode)])),
    )
    nodes = [f'<node id="n0">{card}</node>', *_nodes(draw, 2, "n")]
    ends = st.integers(0, 6).map("n{}".format)
    edges = [
        f'<edge source="{draw(ends)}" target="{draw(ends)}">'
        + _data("e", source_output=draw(st.integers(-1, 2)), target_input=draw(st.integers(-1, 2)))
        + "</edge>"
        for _ in range(draw(st.integers(0, 4)))
    ]
    body = "".join((*keys, '<graph edgedefault="directed">', *nodes, *edges, "</graph>"))
    text = f'<?xml version="1.0" encoding="UTF-8"?><graphml xmlns="{GRAPHML}">{body}</graphml>'
    return text.encode()


def _nodes(draw: Draw, depth: int, before: str) -> list[str]:
    made = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        kind = draw(
            st.sampled_from(
                (
                    "operator",
                    "input",
                    "output",
                    "initializer",
                    "sparse_initializer",
                    "module",
                    "body",
                )
            )
        )
        parts = {
            "operator": lambda: _node(draw, 1).SerializeToString(),
            "initializer": lambda: _tensor(draw).SerializeToString(),
            "sparse_initializer": lambda: onnx.SparseTensorProto(
                values=_tensor(draw)
            ).SerializeToString(),
        }
        told = _drawn(draw, kind, parts[kind]() if kind in parts else None)
        inner = (
            "".join(_nodes(draw, depth - 1, f"{before}{number}"))
            if depth and not draw(st.integers(0, 2))
            else ""
        )
        graph = f"<graph>{inner}</graph>" if inner else ""
        made.append(f'<node id="{before}{number}">{told}{graph}</node>')
    return made


def _drawn(draw: Draw, kind: str, part: bytes | None) -> str:
    small = st.integers(0, 4)
    told: dict[str, object] = {
        "kind": kind,
        "name": "x",
        "execution_order": draw(small),
        "position": draw(small),
    }
    if not draw(st.integers(0, 3)):
        told["scope"] = draw(st.sampled_from(("0/0", "1/0", "1/1", "2/0", "f0", "x")))
    if not draw(st.integers(0, 3)):
        told |= {"operator": draw(st.sampled_from(list(_OPERATORS))), "attributes": '{"axis":1}'}
    if part is not None:
        told |= {"onnx": base64.b64encode(part).decode(), "check": checksum(part, "")}
    return _data("n", **told)


def _data(on: str, /, **told: object) -> str:
    plain = {
        name: str(text).replace("&", "&amp;").replace("<", "&lt;") for name, text in told.items()
    }
    return "".join(f'<data key="{on}_{name}">{text}</data>' for name, text in plain.items())
