"""Generate files that are well formed by the rules of their format, with random content."""

from __future__ import annotations

import base64
import io
import zipfile
from typing import Any
from xml.sax.saxutils import escape

import msgspec
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fuzz import mutate_json
from fuzz.mutate_bytes import Draw
from fuzz.mutate_json import Raw
from fuzz.seeds import MODULES
from modelexport.batch.jobs import BatchJob
from modelexport.graphml.format import FORMAT_VERSION, GRAPHML, KEYS, checksum
from modelexport.modules.record import NodeTag
from modelexport.options import PARAMETER_MODES
from modelexport.tagged.records import METADATA_KEY, EmbeddedMap, Sidecar, encode_tag

_NAMES = ("x", "y", "z", "w", "m", "a/b", "é", "", "x ", "main")
_WITHOUT_ATTRIBUTES = (
    *("Add", "Relu", "MatMul", "Identity", "Shape", "Reshape", "Expand", "Range", "Tile", "Slice"),
    *("Squeeze", "SequenceConstruct", "Where", "Unsqueeze"),
)
_OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_WITHOUT_ATTRIBUTES, ()),
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
_tags = tuple(tag for tag in MODULES.values() if tag)
_some_names = st.lists(_names, max_size=3)


def generate_model(draw: Draw) -> bytes:
    """Generate a model of known operators with random edges."""
    proto = onnx.ModelProto(ir_version=draw(st.sampled_from((10, 8, 3, 0, 99))))
    for domain in draw(st.lists(st.sampled_from(("", "own", "ai.onnx", "ai.onnx.ml")), max_size=3)):
        proto.opset_import.add(
            domain=domain, version=draw(st.sampled_from((21, 18, 11, 1, 0, 99, -1)))
        )
    proto.graph.CopyFrom(_generate_graph(draw, 2))
    for _ in range(draw(st.integers(0, 1))):
        function = proto.functions.add(
            name="Own", domain="own", input=draw(_some_names), output=draw(_some_names)
        )
        function.node.extend(_generate_node(draw, 0) for _ in range(draw(st.integers(0, 2))))
    if draw(st.booleans()):
        proto.metadata_props.add(
            key=METADATA_KEY, value=mutate_json.encode(generate_record(draw, EmbeddedMap))
        )
    return proto.SerializeToString()


def _generate_graph(draw: Draw, depth: int) -> onnx.GraphProto:
    graph = onnx.GraphProto(name=draw(_names))
    graph.node.extend(_generate_node(draw, depth) for _ in range(draw(st.integers(0, 4))))
    graph.input.extend(_generate_value_info(draw) for _ in range(draw(st.integers(0, 2))))
    graph.output.extend(_generate_value_info(draw) for _ in range(draw(st.integers(0, 2))))
    graph.value_info.extend(_generate_value_info(draw) for _ in range(draw(st.integers(0, 1))))
    graph.initializer.extend(_generate_tensor(draw) for _ in range(draw(st.integers(0, 2))))
    return graph


def _generate_node(draw: Draw, depth: int) -> onnx.NodeProto:
    kind = draw(st.sampled_from(list(_OPERATORS)))
    node = onnx.NodeProto(
        op_type=kind, input=draw(_some_names), output=draw(_some_names), name=draw(_names)
    )
    node.domain = "own" if kind == "Own" else ""
    for name in _OPERATORS[kind]:
        if draw(st.integers(0, 5)):
            node.attribute.append(_generate_attribute(draw, name, depth))
    if draw(st.booleans()):
        tags = draw(st.lists(st.sampled_from(_tags), min_size=1, max_size=2))
        path = draw(st.sampled_from(list(MODULES)))
        tag = NodeTag(tuple(tags), tags[0], len(tags), "scope", path)
        node.doc_string = encode_tag(tag).decode()
    return node


def _generate_attribute(draw: Draw, name: str, depth: int) -> onnx.AttributeProto:
    graphs = dict.fromkeys(("g", "body", "then_branch", "else_branch"), "g")
    kinds = {"axis": "i", "to": "i", "value": "t", "t": "t", **graphs}
    kind = kinds.get(name) if draw(st.integers(0, 9)) else None
    kind = kind or draw(st.sampled_from(("i", "ints", "f", "s", "t", "g")))
    if kind == "g" and depth:
        return helper.make_attribute(name, _generate_graph(draw, depth - 1))
    if kind == "t":
        return helper.make_attribute(name, _generate_tensor(draw))
    values = {"i": draw(_SIZES), "ints": [draw(_SIZES)], "f": 0.5, "s": draw(_names)}
    return helper.make_attribute(name, values.get(kind, 0))


def _generate_tensor(draw: Draw) -> TensorProto:
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
            value = draw(
                st.sampled_from(
                    ("m.onnx.data", "m.onnx", "../x", "0", "-1", "99", "9" * 30, "x", ".", "\0")
                )
            )
            tensor.external_data.add(key=key, value=value)
    elif field != "none":
        getattr(tensor, field).extend([b"x"] if field == "string_data" else [1, 2])
    return tensor


def _generate_value_info(draw: Draw) -> onnx.ValueInfoProto:
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


def generate_sidecar(draw: Draw) -> bytes:
    """Generate a sidecar with random values."""
    return mutate_json.encode(generate_record(draw, Sidecar)).encode()


def generate_jobs(draw: Draw) -> bytes:
    """Generate a list of jobs with all their fields."""
    jobs = [generate_record(draw, BatchJob) for _ in range(draw(st.integers(0, 3)))]
    document = mutate_json.Object([("jobs", jobs)])
    if draw(st.booleans()):
        document.append(("defaults", generate_record(draw, BatchJob)))
    return mutate_json.encode(document).encode()


_DTYPES = (
    *("float32", "int64", "bool", "int8", "uint8", "bfloat16", "complex64", "float64", "uint64"),
    *("nn", ""),
)


def generate_specs(draw: Draw) -> bytes:
    """Generate input specs, most of them with plausible values."""
    numbers = st.sampled_from(
        (0, 1, -1, 0.5, 2, 300, 1e10, -1e300, 1e308, 9223372036854775807, 1 << 64)
    )
    specs = mutate_json.Object()
    for name in draw(_some_names):
        spec = mutate_json.Object([("shape", draw(st.lists(_SIZES, max_size=4)))])
        if draw(st.integers(0, 3)):
            spec.append(("dtype", draw(st.sampled_from(_DTYPES))))
        if draw(st.booleans()):
            spec.append(("range", draw(st.lists(numbers, min_size=2, max_size=2))))
        specs.append((name, spec))
    return mutate_json.encode(specs).encode()


_NPY_DTYPES = (
    *("<f4", "<i8", "|b1", "|O", "<U4", "|S3", ">f4", "<M8[s]", "|V8", "<c8", "<u8", "<q9"),
    *("[('a', '<f4')]", ""),
)
_NPY_HEADERS = ("{}", "x", "[" * 3000, "{'descr': 1, 'shape': 2, 'fortran_order': 3}", "")
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def generate_arrays(draw: Draw) -> bytes:
    """Generate an .npz file of arrays with random headers."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", draw(st.sampled_from(_COMPRESSIONS))) as archive:
        for number in range(draw(st.integers(0, 3))):
            shape = ", ".join(map(str, draw(st.lists(_SIZES, max_size=3))))
            kind, fortran = draw(st.sampled_from(_NPY_DTYPES)), draw(st.booleans())
            header = f"{{'descr': '{kind}', 'fortran_order': {fortran}, 'shape': ({shape},)}}"
            if not draw(st.integers(0, 9)):
                header = draw(st.sampled_from(_NPY_HEADERS))
            version = draw(st.sampled_from((1, 2, 3, 9)))
            size = len(header).to_bytes(2 if version == 1 else 4, "little")
            values = bytes(draw(st.sampled_from((0, 4, 8, 24, 1 << 14))))
            name = draw(st.sampled_from((f"x{number}", f"../x{number}", "x" * number)))
            content = b"\x93NUMPY" + bytes((version, 0)) + size + header.encode() + values
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def generate_record(draw: Draw, kind: Any) -> object:
    """Generate a value for a record, by the types of its fields."""
    return _generate_value(draw, msgspec.inspect.type_info(kind))


_texts = st.sampled_from((*MODULES, *_tags, *_NAMES, "nodes", "scope", "block", "m.onnx"))


def _generate_value(draw: Draw, kind: msgspec.inspect.Type) -> object:
    match kind:
        case msgspec.inspect.StructType():
            return mutate_json.Object(
                (field.encode_name, _generate_value(draw, field.type)) for field in kind.fields
            )
        case msgspec.inspect.DictType():
            keys = draw(st.lists(_texts, max_size=3))
            return mutate_json.Object((key, _generate_value(draw, kind.value_type)) for key in keys)
        case msgspec.inspect.VarTupleType():
            return [_generate_value(draw, kind.item_type) for _ in range(draw(st.integers(0, 2)))]
        case msgspec.inspect.UnionType():
            return _generate_value(draw, draw(st.sampled_from(kind.types)))
        case msgspec.inspect.BoolType():
            return draw(st.booleans())
        case msgspec.inspect.IntType():
            return draw(_SIZES)
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.StrType():
            return draw(_texts)
    return Raw("null")


def generate_graphml(draw: Draw) -> bytes:
    """Generate GraphML nodes that hold parts of models, each with its checksum."""
    keys = [
        f'<key id="{scope[0]}_{name}" for="{scope}" attr.name="{name}" attr.type="{kind}"/>'
        for scope, names in KEYS.items()
        for name, kind in names.items()
    ]
    proto = onnx.ModelProto(graph=onnx.GraphProto(name="g"), ir_version=10)
    card = _generate_data(draw, "model", proto.SerializeToString())
    mode = draw(st.sampled_from(PARAMETER_MODES))
    parameters = mutate_json.encode(mutate_json.Object([("mode", mode)]))
    card += _format_data("n", format_version=FORMAT_VERSION, parameters=parameters)
    nodes = [f'<node id="n0">{card}</node>', *_generate_nodes(draw, 2, "n")]
    ends = st.integers(0, 6).map("n{}".format)
    edges = [
        f'<edge source="{draw(ends)}" target="{draw(ends)}">'
        + _format_data(
            "e", source_output=draw(st.integers(-1, 2)), target_input=draw(st.integers(-1, 2))
        )
        + "</edge>"
        for _ in range(draw(st.integers(0, 4)))
    ]
    body = "".join((*keys, '<graph edgedefault="directed">', *nodes, *edges, "</graph>"))
    text = f'<?xml version="1.0" encoding="UTF-8"?><graphml xmlns="{GRAPHML}">{body}</graphml>'
    return text.encode()


_GRAPHML_KINDS = (
    *("operator", "input", "output", "initializer", "sparse_initializer", "module", "body"),
)


def _generate_nodes(draw: Draw, depth: int, prefix: str) -> list[str]:
    nodes = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        kind = draw(st.sampled_from(_GRAPHML_KINDS))
        data = _generate_data(draw, kind, _generate_message(draw, kind))
        inner = ""
        if depth and not draw(st.integers(0, 2)):
            inner = "".join(_generate_nodes(draw, depth - 1, f"{prefix}{number}"))
        graph = f"<graph>{inner}</graph>" if inner else ""
        nodes.append(f'<node id="{prefix}{number}">{data}{graph}</node>')
    return nodes


def _generate_message(draw: Draw, kind: str) -> bytes | None:
    """Generate the message that a node of this kind holds, if it holds one."""
    match kind:
        case "operator":
            return _generate_node(draw, 1).SerializeToString()
        case "initializer":
            return _generate_tensor(draw).SerializeToString()
        case "sparse_initializer":
            return onnx.SparseTensorProto(values=_generate_tensor(draw)).SerializeToString()
    return None


def _generate_data(draw: Draw, kind: str, message: bytes | None) -> str:
    """Generate the properties of a GraphML node."""
    small = st.integers(0, 4)
    properties: dict[str, object] = {
        "kind": kind,
        "name": "x",
        "execution_order": draw(small),
        "position": draw(small),
    }
    if not draw(st.integers(0, 3)):
        properties["scope"] = draw(st.sampled_from(("0/0", "1/0", "1/1", "2/0", "f0", "x")))
    if not draw(st.integers(0, 3)):
        operator = draw(st.sampled_from(list(_OPERATORS)))
        properties |= {"operator": operator, "attributes": '{"axis":1}'}
    if message is not None:
        encoded = base64.b64encode(message).decode()
        properties |= {"onnx": encoded, "check": checksum(message, "")}
    return _format_data("n", **properties)


def _format_data(owner: str, /, **properties: object) -> str:
    """Format properties as `data` elements of a node (`n`) or an edge (`e`)."""
    return "".join(
        f'<data key="{owner}_{name}">{escape(str(value))}</data>'
        for name, value in properties.items()
    )
