"""What people do in an editor: looks change nothing, structure is changed in the model or refused with the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from lxml import etree
from onnx import TensorProto, helper, numpy_helper

import modelexport
from exports import export
from extraction.running import run
from graphml.drawing import Drawing, G, Y
from graphml.handmade import HANDMADE, model, value
from modelexport.errors import FormatError
from modelexport.graphml.dialect import MODES

pytestmark = [pytest.mark.must, pytest.mark.integration]

X = np.array([[-1, 2, -3], [4, -5, 6]], np.float32)


def small() -> onnx.ModelProto:
    """x -> Relu -> Mul by w -> Add b -> y, with the types of all tensors."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Mul", ["r", "w"], ["m"], name="mul"),
        helper.make_node("Sub", ["m", "b"], ["s"], name="sub"),
        helper.make_node("Clip", ["s", "", "high"], ["y"], name="clip"),
    ]
    weights = [
        numpy_helper.from_array(np.full((2, 3), 2, np.float32), "w"),
        numpy_helper.from_array(np.arange(3, dtype=np.float32), "b"),
        numpy_helper.from_array(np.array(7, np.float32), "high"),
    ]
    made = model(nodes, [value("x")], [value("y")], weights)
    made.graph.value_info.extend([value("r"), value("m"), value("s")])
    return made


@pytest.fixture
def drawing(tmp_path: Path) -> Drawing:
    return draw(small(), tmp_path)


def draw(made: onnx.ModelProto, folder: Path, mode: str = "sidecar") -> Drawing:
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return Drawing(modelexport.export_graphml(path, parameters=mode).graphml)


def imported(drawing: Drawing) -> tuple[Path, tuple[str, ...]]:
    target = drawing.path.with_name("back.onnx")
    told = modelexport.import_onnx(drawing.save(), target)
    onnx.checker.check_model(str(target), full_check=True)
    return target, told.edits


def result(drawing: Drawing, x: np.ndarray = X) -> np.ndarray:
    return next(iter(run(imported(drawing)[0], {"x": x}).values()))


def refused(drawing: Drawing, match: str) -> None:
    target = drawing.path.with_name("back.onnx")
    target.unlink(missing_ok=True)
    with pytest.raises(FormatError, match=match) as caught:
        modelexport.import_onnx(drawing.save(), target)
    assert "\n" not in caught.value.headline
    assert not target.exists()
    assert not list(target.parent.glob(".modelexport-*"))


def as_yed_saves(path: Path) -> None:
    """Number keys, nodes and edges anew, turn everything around, wrap texts, add what an editor adds."""
    drawing = Drawing(path)
    new: dict[str, str] = {}

    def number(graph: etree._Element, prefix: str) -> None:
        nodes = graph.findall(f"{G}node")
        for place, node in enumerate(reversed(nodes)):
            new[node.get("id")] = f"{prefix}n{place}"
            graph.remove(node)
            graph.append(node)
            for inner in node.findall(f"{G}graph"):
                number(inner, f"{prefix}n{place}::")

    number(drawing.root.find(f"{G}graph"), "")
    graphs = {new[node.get("id")]: node.find(f"{G}graph") for node in drawing.nodes.values()}
    for node in drawing.nodes.values():
        node.set("id", new[node.get("id")])
    for graph in graphs.values():
        if graph is not None:
            graph.set("id", graph.getparent().get("id") + ":")
    for place, edge in enumerate(reversed(drawing.edges)):
        ends = [new[edge.get("source")], new[edge.get("target")]]
        edge.set("id", f"e{place}")
        edge.set("source", ends[0])
        edge.set("target", ends[1])
        shared = []
        for first, second in zip(*(end.split("::")[:-1] for end in ends), strict=False):
            if first != second:
                break
            shared.append(first)
        edge.getparent().remove(edge)
        home = graphs["::".join(shared)] if shared else drawing.root.find(f"{G}graph")
        home.append(edge)
    keys = {
        key.get("id"): f"d{place + 3}" for place, key in enumerate(drawing.root.findall(f"{G}key"))
    }
    for key in drawing.root.findall(f"{G}key"):
        key.set("id", keys[key.get("id")])
    for data in list(drawing.root.iter(f"{G}data")):
        data.set("key", keys[data.get("key")])
        data.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
        if data.text and data.text.strip() and not len(data):
            data.text = etree.CDATA(data.text)
        if data.getparent().tag == f"{G}graph":
            data.getparent().remove(data)
    description = etree.Element(
        f"{G}key", {"for": "node", "id": "d0", "attr.name": "description", "attr.type": "string"}
    )
    drawing.root.insert(0, description)
    for node in drawing.nodes.values():
        node.insert(0, etree.Element(f"{G}data", key="d0"))
    etree.indent(drawing.tree)
    path.write_bytes(
        etree.tostring(drawing.tree, encoding="utf-8", xml_declaration=True).replace(b"\n", b"\r\n")
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["bodies", "functions", "every_attribute", "odd_types", "odd_names", "passes_through"]
)
def test_saved_by_an_editor_nothing_is_lost(name: str, mode: str, tmp_path: Path) -> None:
    drawing = draw(HANDMADE[name](), tmp_path, mode)
    as_yed_saves(drawing.path)
    told = modelexport.import_onnx(drawing.path, tmp_path / "back.onnx")
    assert told.edits == ()
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_whole_model_saved_by_an_editor(strategy: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", strategy, tmp_path)
    graphml = modelexport.export_graphml(path).graphml
    as_yed_saves(graphml)
    modelexport.import_onnx(graphml, tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def test_labels_colours_layout_and_notes_do_no_harm(drawing: Drawing) -> None:
    for place, node in enumerate(drawing.nodes.values()):
        for face in drawing.faces(node):
            face.find(f"{Y}NodeLabel").text = "something else"
            face.find(f"{Y}Fill").set("color", "#FF0000")
            face.find(f"{Y}Geometry").set("x", str(place * 1000.0))
    for edge in drawing.edges:
        for label in edge.iter(f"{Y}EdgeLabel"):
            label.text = "other"
    note = drawing.add_node("note")
    assert note is not None
    target, edits = imported(drawing)
    assert edits == ()
    assert target.read_bytes() == drawing.path.with_name("model.onnx").read_bytes()


def test_a_node_taken_out_and_its_neighbours_joined(drawing: Drawing) -> None:
    relu, mul, x = (drawing.find(name=name) for name in ("relu", "mul", "x"))
    drawing.remove(relu)
    drawing.add_edge(x, mul, target_input="0")
    assert (result(drawing) == np.clip(X * 2 - np.arange(3), None, 7)).all()
    back = onnx.load(drawing.path.with_name("back.onnx"))
    assert [node.op_type for node in back.graph.node] == ["Mul", "Sub", "Clip"]
    _, edits = imported(drawing)
    assert edits[0] == "1 operator removed"
    assert re.search(r"'mul' \(n\d+\): reads x, w instead of r, w", edits[1])


def test_an_edge_without_a_number_takes_the_input_that_is_free(drawing: Drawing) -> None:
    mul, x = drawing.find(name="mul"), drawing.find(name="x")
    drawing.remove(drawing.into(mul)[0])
    drawing.add_edge(x, mul)
    assert (result(drawing) == np.clip(X * 2 - np.arange(3), None, 7)).all()


def test_an_edge_drawn_to_another_source(drawing: Drawing) -> None:
    edge = drawing.into(drawing.find(name="sub"))[0]
    edge.set("source", drawing.find(name="x").get("id"))
    assert (result(drawing) == np.clip(X - np.arange(3), None, 7)).all()


def test_two_inputs_swapped(drawing: Drawing) -> None:
    first, second = drawing.into(drawing.find(name="sub"))
    drawing.set(first, "target_input", "1")
    drawing.set(second, "target_input", "0")
    assert (result(drawing) == np.clip(np.arange(3) - np.maximum(X, 0) * 2, None, 7)).all()


def test_an_optional_input_may_go(drawing: Drawing) -> None:
    drawing.remove(drawing.into(drawing.find(name="clip"))[1])
    assert (result(drawing) == np.maximum(X, 0) * 2 - np.arange(3)).all()
    assert list(onnx.load(drawing.path.with_name("back.onnx")).graph.node[3].input) == ["s"]


def test_a_new_operator(drawing: Drawing) -> None:
    sub, clip = drawing.find(name="sub"), drawing.find(name="clip")
    drawing.remove(drawing.into(clip)[0])
    new = drawing.add_node("mine", operator="LeakyRelu", attributes='{"alpha": 0.5}', name="leaky")
    drawing.add_edge(sub, new)
    drawing.add_edge(new, clip, target_input="0")
    before = np.maximum(X, 0) * 2 - np.arange(3)
    assert np.allclose(result(drawing), np.clip(np.where(before < 0, before / 2, before), None, 7))
    back = onnx.load(drawing.path.with_name("back.onnx"))
    assert [node.name for node in back.graph.node] == ["relu", "mul", "sub", "leaky", "clip"]


def test_what_operators_say_may_be_changed(drawing: Drawing) -> None:
    drawing.set(drawing.find(name="sub"), "operator", "Add")
    drawing.set(drawing.find(name="relu"), "name", "other name")
    assert (result(drawing) == np.clip(np.maximum(X, 0) * 2 + np.arange(3), None, 7)).all()
    assert onnx.load(drawing.path.with_name("back.onnx")).graph.node[0].name == "other name"


def test_attributes_may_be_changed_and_types_follow(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], name="t", perm=[0, 1]),
        helper.make_node("LeakyRelu", ["t"], ["y"], name="leaky", alpha=0.1),
    ]
    made = model(nodes, [value("x")], [value("y")])
    made.graph.value_info.append(value("t"))
    drawing = draw(made, tmp_path)
    drawing.set(drawing.find(name="t"), "attributes", '{"perm": [1, 0]}')
    drawing.set(drawing.find(name="leaky"), "attributes", '{"alpha": 2}')
    assert np.allclose(result(drawing), np.where(X < 0, X * 2, X).T)


def test_an_output_led_elsewhere_and_one_removed(tmp_path: Path) -> None:
    made = small()
    made.graph.output.append(value("m"))
    drawing = draw(made, tmp_path)
    y = drawing.find(kind="output", name="y")
    drawing.remove(drawing.find(kind="output", name="m"))
    drawing.remove(*drawing.into(y))
    drawing.add_edge(drawing.find(name="sub"), y)
    assert (result(drawing) == np.maximum(X, 0) * 2 - np.arange(3)).all()
    back = onnx.load(tmp_path / "back.onnx")
    assert [v.name for v in back.graph.output] == ["y"], "an output keeps its name"
    assert list(back.graph.node[2].output) == ["y"]


def test_a_change_inside_a_body(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    inner = next(n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Neg")
    drawing.set(inner, "operator", "Abs")
    added = next(n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Mul")
    body = drawing.parent(added)
    out = next(n for n in body.find(f"{G}graph") if drawing.kind(n) == "output")
    new = drawing.add_node("mine", body, operator="Neg")
    drawing.remove(*drawing.into(out))
    drawing.add_edge(added, new)
    drawing.add_edge(new, out)
    target, _ = imported(drawing)
    start = {"x": X, "c": np.array(True)}
    assert (run(target, start)["last"] == (-X * 2 + 3).sum(0)).all()


BAD_EDITS: dict[str, tuple[Callable[[Drawing], object], str]] = {
    "a node that is needed": (
        lambda d: d.remove(d.find(name="relu")),
        r"'mul' \(n\d+\): nothing leads into its input 0",
    ),
    "an edge that is needed": (
        lambda d: d.remove(d.into(d.find(name="sub"))[1]),
        r"'sub' .*: nothing leads into its inp",
    ),
    "an output without an edge": (
        lambda d: d.remove(d.find(name="clip")),
        r"output 'y': it needs one edge",
    ),
    "two edges into one input": (
        lambda d: d.add_edge(d.find(name="x"), d.find(name="mul"), target_input="0"),
        r"'mul' .*two edges lead into its input 0",
    ),
    "edges that go round": (
        lambda d: d.into(d.find(name="relu"))[0].set("source", d.find(name="sub").get("id")),
        r"relu: it waits for its own result",
    ),
    "an edge to the card": (
        lambda d: d.add_edge(d.find(kind="model"), d.find(name="mul")),
        r"main.*an edge ends here",
    ),
    "an edge into an input": (
        lambda d: d.add_edge(d.find(name="relu"), d.find(name="x")),
        r"x: an edge leads into it",
    ),
    "an edge out of an output": (
        lambda d: d.add_edge(d.find(name="y"), d.find(name="mul")),
        r"output 'y': an edge comes",
    ),
    "an unknown operator": (
        lambda d: d.set(d.find(name="mul"), "operator", "Mull"),
        r"not valid: .*Mull",
    ),
    "an attribute that is no JSON": (
        lambda d: d.set(d.find(name="mul"), "attributes", "axis=1"),
        r"'mul' .*no JSON",
    ),
    "an attribute that is unknown": (
        lambda d: d.set(d.find(name="mul"), "attributes", '{"axis": 1}'),
        r"not valid: .*axis",
    ),
    "a weight of another name": (
        lambda d: d.set(d.find(name="w"), "name", "v"),
        r"initializer 'w': its name cannot",
    ),
    "an input of another name": (
        lambda d: d.set(d.find(name="x"), "name", "v"),
        r"input 'x': its name cannot be changed",
    ),
    "a copied node": (
        lambda d: d.add_node("copy", **d.told(d.find(name="relu"))),
        r"'relu' \(\w+\): nothing leads into its input 0",
    ),
    "a copied weight": (
        lambda d: d.add_node("copy", **d.told(d.find(name="w"))),
        r"'w' \(\w+\) stands there twice",
    ),
    "a removed card": (lambda d: d.remove(d.find(kind="model")), r"holds no model"),
    "a shape that does not fit": (
        lambda d: (
            d.into(d.find(name="sub"))[1].set("source", d.find(name="high").get("id"))
            or d.set(d.find(name="sub"), "operator", "MatMul")
        ),
        r"not valid",
    ),
}


@pytest.mark.parametrize("case", BAD_EDITS)
def test_what_makes_no_valid_model_is_refused(case: str, drawing: Drawing) -> None:
    edit, match = BAD_EDITS[case]
    edit(drawing)
    refused(drawing, match)


def test_an_edge_out_of_a_body_is_refused(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    inner = next(n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Neg")
    loop = drawing.find(kind="operator", name="loop")
    edge = drawing.into(loop)[1]
    edge.set("source", inner.get("id"))
    refused(drawing, "'m' .*crosses the border of a body")


def test_a_weight_that_goes_with_its_readers(tmp_path: Path) -> None:
    made = small()
    made.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.float32), "unused"))
    drawing = draw(made, tmp_path)
    drawing.remove(drawing.find(name="unused"))
    target, edits = imported(drawing)
    assert edits == ("1 weight removed",)
    assert [t.name for t in onnx.load(target).graph.initializer] == ["w", "b", "high"]
    assert onnx.load(target).graph.initializer[0].data_type == TensorProto.FLOAT


def test_empty_values_that_editors_write_do_no_harm(drawing: Drawing) -> None:
    """yEd writes a key without a value on nodes that say nothing under it."""
    for element in (*drawing.nodes.values(), *drawing.edges):
        scope = "edge" if element.tag == f"{G}edge" else "node"
        said = drawing.told(element)
        for found, name in drawing.names.values():
            if found == scope and name and name not in said:
                drawing.set(element, name, "")
    target, edits = imported(drawing)
    assert edits == ()
    assert target.read_bytes() == drawing.path.with_name("model.onnx").read_bytes()


def test_emptying_a_property_is_an_edit(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("LeakyRelu", ["x"], ["y"], name="leaky", alpha=0.5)],
        [value("x")],
        [value("y")],
    )
    drawing = draw(made, tmp_path)
    drawing.set(drawing.find(name="leaky"), "attributes", "")
    assert np.allclose(result(drawing), np.where(X < 0, X * 0.01, X))
    drawing.set(drawing.find(name="leaky"), "operator", "")
    refused(drawing, "does not say which operator it is")


def test_the_hint_for_copies_works(drawing: Drawing) -> None:
    """A copy without its properties onnx and execution_order is a new node, with a name of its own."""
    told = drawing.told(drawing.find(name="relu")) | {"onnx": "", "execution_order": ""}
    copy = drawing.add_node("copy", **told)
    edge = drawing.into(drawing.find(name="sub"))[0]
    drawing.add_edge(drawing.find(name="mul"), copy)
    edge.set("source", "copy")
    assert (
        result(drawing) == np.clip(np.maximum(np.maximum(X, 0) * 2, 0) - np.arange(3), None, 7)
    ).all()
    names = [node.name for node in onnx.load(drawing.path.with_name("back.onnx")).graph.node]
    assert names == ["relu", "mul", "relu_1", "sub", "clip"]


def test_a_weight_removed_with_its_edge_frees_an_optional_input(drawing: Drawing) -> None:
    drawing.remove(drawing.find(name="high"))
    assert (result(drawing) == np.maximum(X, 0) * 2 - np.arange(3)).all()
    drawing.remove(drawing.find(name="b"))
    refused(drawing, r"'sub' .*nothing leads into its input 1 any more, and Sub needs it")


def test_an_operator_that_takes_any_number_closes_up(tmp_path: Path) -> None:
    weights = [numpy_helper.from_array(np.full((2, 3), n, np.float32), f"w{n}") for n in range(3)]
    nodes = [helper.make_node("Concat", ["x", "w0", "w1", "w2"], ["y"], name="cat", axis=0)]
    drawing = draw(model(nodes, [value("x")], [value("y", shape=[8, 3])], weights), tmp_path)
    drawing.remove(drawing.into(drawing.find(name="cat"))[1])
    assert (result(drawing) == np.concatenate([X, np.full((2, 3), 1), np.full((2, 3), 2)])).all()
    back = onnx.load(tmp_path / "back.onnx")
    assert list(back.graph.node[0].input) == ["x", "w1", "w2"]
    assert [dim.dim_value for dim in back.graph.output[0].type.tensor_type.shape.dim] == [6, 3]


def test_an_operator_before_an_output_and_another_type(tmp_path: Path) -> None:
    drawing = draw(small(), tmp_path)
    y, clip = drawing.find(kind="output", name="y"), drawing.find(name="clip")
    new = drawing.add_node("cast", operator="Cast", attributes='{"to": 7}')
    drawing.into(y)[0].set("source", "cast")
    drawing.add_edge(clip, new)
    target, _ = imported(drawing)
    back = onnx.load(target)
    assert [v.name for v in back.graph.output] == ["y"]
    assert back.graph.output[0].type.tensor_type.elem_type == TensorProto.INT64
    assert run(target, {"x": X})["y"].dtype == np.int64


def test_a_change_of_shape_inside_a_body(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Transpose", ["x"], [name], name=name, perm=[0, 1])
        return helper.make_graph([node], name, [], [value(name)])

    nodes = [
        helper.make_node(
            "If", ["c"], ["y"], name="if", then_branch=branch("t"), else_branch=branch("e")
        )
    ]
    made = model(nodes, [value("x"), value("c", TensorProto.BOOL, [])], [value("y")])
    drawing = draw(made, tmp_path)
    for name in ("t", "e"):
        drawing.set(drawing.find(kind="operator", name=name), "attributes", '{"perm": [1, 0]}')
    target, _ = imported(drawing)
    assert run(target, {"x": X, "c": np.array(True)})["y"].shape == (3, 2)


def test_a_change_of_shape_inside_a_function(tmp_path: Path) -> None:
    opset = [helper.make_opsetid("", 21)]
    turn = helper.make_function(
        "own",
        "Turn",
        ["a"],
        ["b"],
        [helper.make_node("Transpose", ["a"], ["b"], name="t", perm=[0, 1])],
        opset,
    )
    nodes = [
        helper.make_node("Turn", ["x"], ["m"], domain="own"),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    made = model(nodes, [value("x")], [value("y")], opsets=[*opset, helper.make_opsetid("own", 1)])
    made.functions.append(turn)
    made.graph.value_info.append(value("m"))
    drawing = draw(made, tmp_path)
    drawing.set(drawing.find(name="t"), "attributes", '{"perm": [1, 0]}')
    assert result(drawing).shape == (3, 2)
    drawing.remove(drawing.find(name="t"))
    refused(drawing, "output 'b': it needs one edge")


def test_functions_that_are_removed(tmp_path: Path) -> None:
    made = HANDMADE["functions"]()
    drawing = draw(made, tmp_path)
    drawing.remove(*drawing.of_kind("function"))
    refused(drawing, r"'call' \(n\d+\): it calls the function own::Twice, which is removed|Twice")
    extra = onnx.FunctionProto()
    extra.CopyFrom(made.functions[0])
    extra.name = "Unused"
    made.functions.append(extra)
    drawing = draw(made, tmp_path)
    drawing.remove(drawing.find(kind="function", name="own::Unused"))
    target, _ = imported(drawing)
    assert [f.name for f in onnx.load(target).functions] == ["Scale", "Twice", "Scale"]


def test_an_edit_of_an_operator_and_one_in_its_body(tmp_path: Path) -> None:
    """Neither is lost over the other."""
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    scan = drawing.find(name="scan")
    drawing.set(
        scan,
        "attributes",
        drawing.told(scan)["attributes"].replace("}", ',"scan_input_directions":[1]}'),
    )
    add = next(
        n
        for n in drawing.of_kind("operator")
        if drawing.told(n)["operator"] == "Add"
        and drawing.told(drawing.into(n)[0])["tensor"] == "state"
    )
    drawing.set(add, "operator", "Sub")
    target, _ = imported(drawing)
    found = onnx.load(target).graph.node[2]
    attributes = {attribute.name: attribute for attribute in found.attribute}
    assert list(attributes["scan_input_directions"].ints) == [1]
    assert [node.op_type for node in attributes["body"].g.node] == ["Sub", "Identity"]


def test_an_edge_to_a_tensor_that_a_body_hides(tmp_path: Path) -> None:
    made = HANDMADE["bodies"]()
    made.graph.initializer.append(numpy_helper.from_array(np.full((2, 3), 10, np.float32), "w"))
    drawing = draw(made, tmp_path)
    mul = next(n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Mul")
    outer = next(
        n
        for n in drawing.of_kind("initializer")
        if drawing.told(n)["name"] == "w" and "::" not in n.get("id")
    )
    drawing.into(mul)[1].set("source", outer.get("id"))
    refused(drawing, "where 'w' is something else")


def test_an_edge_from_a_later_operator_into_a_body(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["b"], name="abs")], "b", [], [value("b")]
    )
    nodes = [
        helper.make_node("If", ["c"], ["i"], name="if", then_branch=body, else_branch=body),
        helper.make_node("Neg", ["x"], ["n"], name="neg"),
        helper.make_node("Add", ["i", "n"], ["y"], name="add"),
    ]
    made = model(nodes, [value("x"), value("c", TensorProto.BOOL, [])], [value("y")])
    drawing = draw(made, tmp_path)
    inner = [n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Abs"]
    for node in inner:
        drawing.into(node)[0].set("source", drawing.find(name="neg").get("id"))
    target, _ = imported(drawing)
    assert (run(target, {"x": X, "c": np.array(True)})["y"] == np.abs(X) - X).all()
    drawing.into(inner[0])[0].set("source", drawing.find(kind="operator", name="if").get("id"))
    refused(drawing, "waits for its own result")


def test_an_operator_dragged_into_another_graph(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    loop = drawing.find(kind="operator", name="loop")
    inner = next(n for n in drawing.of_kind("operator") if drawing.told(n)["operator"] == "Neg")
    loop.getparent().append(inner)
    refused(drawing, "'m' .* was moved into or out of a body")


def test_body_weights_and_outputs_are_part_of_the_structure(tmp_path: Path) -> None:
    made = HANDMADE["bodies"]()
    body = made.graph.node[1].attribute[0].g
    body.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "unused"))
    drawing = draw(made, tmp_path)
    drawing.remove(drawing.find(name="unused"))
    _, edits = imported(drawing)
    assert edits == ("1 weight removed",)


def test_a_new_operator_in_the_box_of_one_with_bodies(tmp_path: Path) -> None:
    """It belongs to the graph that the box stands in."""
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    loop, scan = (
        drawing.find(kind="operator", name="loop"),
        drawing.find(kind="operator", name="scan"),
    )
    new = drawing.add_node("mine", loop, operator="Neg")
    drawing.into(scan)[1].set("source", "mine")
    drawing.add_edge(loop, new)
    target, _ = imported(drawing)
    assert [node.op_type for node in onnx.load(target).graph.node] == ["If", "Loop", "Neg", "Scan"]


def test_notes_may_have_lines(drawing: Drawing) -> None:
    note = drawing.add_node("note")
    other = drawing.add_node("other")
    drawing.add_edge(note, drawing.find(name="mul"))
    drawing.add_edge(note, other)
    drawing.add_edge(note, drawing.find(kind="model"))
    drawing.set(drawing.find(name="relu"), "name", "renamed")
    target, edits = imported(drawing)
    assert len(edits) == 1
    assert len(onnx.load(target).graph.value_info) == 3, "a name changes no types"
    drawing.add_edge(drawing.find(name="mul"), note)
    refused(drawing, "note: edges lead in and out, but its property `operator` is empty")


ATTRIBUTES: list[tuple[str, str | None]] = [
    ('{"axes": "123"}', "cannot be '123'"),
    ('{"alpha": 1e39}', "cannot be 1e+39"),
    ('{"alpha": "much"}', "cannot be 'much'"),
    ('{"alpha": "inf"}', None),
    ('{"floats": [1, 2.5, "nan"], "alpha": 2}', None),
    ('{"text": "base64:/w=="}', None),
    ('{"text": 3}', "cannot be 3"),
    ('{"tensor": "float[1] = 2"}', "is no number or text"),
    ('{"count": 2.5}', "cannot be 2.5"),
    ('{"count": 99999999999999999999}', "cannot be 99999999999999999999"),
    ('{"tensor": "float[1] = 1.0", "alpha":   0.5 }', None),
    ('["alpha"]', "no JSON object"),
]


@pytest.mark.parametrize(("text", "match"), ATTRIBUTES)
def test_attributes_are_read_back_or_refused(text: str, match: str | None) -> None:
    from modelexport.graphml.views import EditError, edited_attributes, readable

    tensor = numpy_helper.from_array(np.ones(1, np.float32))
    node = helper.make_node(
        "Own", [], ["y"], axes=[1], alpha=0.5, floats=[1.0], text="a", count=1, tensor=tensor
    )
    if match is not None:
        with pytest.raises(EditError, match=re.escape(match)):
            edited_attributes(node, text, {})
        return
    edited_attributes(node, text, {})
    said = {attribute.name: readable(attribute) for attribute in node.attribute}
    import json

    assert said == json.loads(text)


def test_lines_to_notes_change_nothing(drawing: Drawing) -> None:
    note, other = drawing.add_node("note"), drawing.add_node("other")
    drawing.add_edge(note, drawing.find(name="mul"))
    drawing.add_edge(note, other)
    target, edits = imported(drawing)
    assert edits == ()
    assert target.read_bytes() == drawing.path.with_name("model.onnx").read_bytes()
    drawing.add_edge(drawing.find(name="mul"), note)
    refused(drawing, "note: edges lead in and out, but its property `operator` is empty")


def test_an_edge_drawn_again_changes_nothing(drawing: Drawing) -> None:
    sub = drawing.find(name="sub")
    drawing.remove(drawing.into(sub)[0])
    drawing.add_edge(drawing.find(name="mul"), sub)
    target, edits = imported(drawing)
    assert edits == ()
    assert target.read_bytes() == drawing.path.with_name("model.onnx").read_bytes()


def test_a_copy_is_a_new_operator_with_all_its_attributes(tmp_path: Path) -> None:
    """Tensors too, which are only described in words."""
    large = numpy_helper.from_array(np.arange(600, dtype=np.float32), "c")
    nodes = [
        helper.make_node("Constant", [], ["c"], name="constant", value=large),
        helper.make_node("Add", ["x", "c"], ["y"], name="add"),
    ]
    drawing = draw(model(nodes, [value("x", shape=[600])], [value("y", shape=[600])]), tmp_path)
    constant, add, y = (
        drawing.find(name=name, kind=kind)
        for name, kind in (("constant", "operator"), ("add", "operator"), ("y", "output"))
    )
    told = [drawing.told(constant), drawing.told(add)]
    copies = []
    for number, said in enumerate(told):
        copies.append(drawing.add_node(f"copy{number}"))
        drawing.root.find(f"{G}graph").append(copies[-1])
        for name, text in said.items():
            drawing.set(copies[-1], name, text)
    drawing.into(y)[0].set("source", "copy1")
    drawing.add_edge(add, copies[1], target_input="0")
    drawing.add_edge(copies[0], copies[1], target_input="1")
    target, edits = imported(drawing)
    assert len(edits) == 3
    x = np.ones(600, np.float32)
    assert (run(target, {"x": x})["y"] == x + 2 * np.arange(600)).all()
    assert [node.name for node in onnx.load(target).graph.node] == [
        "constant",
        "add",
        "constant_1",
        "add_1",
    ]


def test_an_operator_with_bodies_cannot_be_copied(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["bodies"](), tmp_path)
    copy = etree.fromstring(etree.tostring(drawing.find(kind="operator", name="scan")))
    for node in copy.iter(f"{G}node", f"{G}graph"):
        node.set("id", "x" + node.get("id"))
    drawing.root.find(f"{G}graph").append(copy)
    refused(drawing, "stands there twice|'scan' .* is a copy")


def test_a_body_may_use_a_name_from_around_it(tmp_path: Path) -> None:
    """As its own: ONNX and ONNX Runtime take it."""

    def branch(op_type: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node(op_type, ["n"], ["y"], name=op_type)], "g", [], [value("y")]
        )

    nodes = [
        helper.make_node("Neg", ["x"], ["n"], name="neg"),
        helper.make_node(
            "If", ["c"], ["y"], name="if", then_branch=branch("Abs"), else_branch=branch("Relu")
        ),
    ]
    drawing = draw(
        model(nodes, [value("x"), value("c", TensorProto.BOOL, [])], [value("y")]), tmp_path
    )
    drawing.set(drawing.find(name="neg"), "operator", "Abs")
    assert (run(imported(drawing)[0], {"x": X, "c": np.array(True)})["y"] == np.abs(X)).all()


def two_outputs() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Neg", ["x"], ["n"], name="neg"),
        helper.make_node("Abs", ["n"], ["a"], name="abs"),
        helper.make_node("Relu", ["n"], ["b"], name="relu"),
    ]
    return model(nodes, [value("x")], [value("a"), value("b")])


def test_outputs_that_change_places_keep_their_names(tmp_path: Path) -> None:
    drawing = draw(two_outputs(), tmp_path)
    a, b = (drawing.find(kind="output", name=name) for name in "ab")
    first, second = drawing.into(a)[0], drawing.into(b)[0]
    first.set("target", b.get("id"))
    second.set("target", a.get("id"))
    target, _ = imported(drawing)
    assert [v.name for v in onnx.load(target).graph.output] == ["a", "b"]
    found = run(target, {"x": X})
    assert (found["a"] == np.maximum(-X, 0)).all()
    assert (found["b"] == np.abs(X)).all()


def test_outputs_that_cannot_keep_their_names(tmp_path: Path) -> None:
    drawing = draw(two_outputs(), tmp_path)
    edge = drawing.into(drawing.find(kind="output", name="b"))[0]
    edge.set("source", drawing.find(name="abs").get("id"))
    refused(drawing, "output 'b': what leads to it is output 'a' already")
    edge.set("source", drawing.find(name="x").get("id"))
    refused(drawing, "output 'b': an input or weight leads straight to it")
    edge.set("source", drawing.find(name="neg").get("id"))
    assert (run(imported(drawing)[0], {"x": X})["b"] == -X).all()


def test_names_that_change_places_and_names_that_collide(tmp_path: Path) -> None:
    drawing = draw(two_outputs(), tmp_path)
    first, second = drawing.find(name="abs"), drawing.find(name="relu")
    drawing.set(first, "name", "relu")
    drawing.set(second, "name", "abs")
    assert [n.name for n in onnx.load(imported(drawing)[0]).graph.node] == ["neg", "relu", "abs"]
    drawing.set(first, "name", "q")
    drawing.set(second, "name", "q")
    refused(drawing, "another node is called 'q' too")


def test_calls_that_fit_no_function(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["functions"](), tmp_path)
    call = drawing.find(name="call")
    edge = drawing.add_edge(drawing.find(kind="input", name="x", position="0", type="float"), call)
    refused(drawing, "call: the function own::Twice takes or gives less")
    drawing.remove(edge)
    drawing.set(call, "operator", "Thrice")
    refused(drawing, "call: there is no function own::Thrice")


def test_a_function_that_changes_its_shape_and_is_called_in_a_body(tmp_path: Path) -> None:
    opset = [helper.make_opsetid("", 21)]
    turn = helper.make_function(
        "own",
        "Turn",
        ["a"],
        ["b"],
        [helper.make_node("Transpose", ["a"], ["b"], name="t", perm=[0, 1])],
        opset,
    )

    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("Turn", ["x"], [name], domain="own")], "g", [], [value(name)]
        )

    nodes = [
        helper.make_node(
            "If", ["c"], ["y"], name="if", then_branch=branch("p"), else_branch=branch("q")
        )
    ]
    inputs = [value("x"), value("c", TensorProto.BOOL, [])]
    made = model(nodes, inputs, [value("y")], opsets=[*opset, helper.make_opsetid("own", 1)])
    made.functions.append(turn)
    drawing = draw(made, tmp_path)
    drawing.set(drawing.find(name="t"), "attributes", '{"perm": [1, 0]}')
    assert run(imported(drawing)[0], {"x": X, "c": np.array(True)})["y"].shape == (3, 2)


def test_a_new_operator_with_several_outputs(tmp_path: Path) -> None:
    made = small()
    made.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "k"))
    drawing = draw(made, tmp_path)
    new = drawing.add_node("mine", operator="TopK")
    drawing.add_edge(drawing.find(name="relu"), new, target_input="0")
    drawing.add_edge(drawing.find(name="k"), new, target_input="1")
    drawing.into(drawing.find(name="mul"))[0].set("source", "mine")
    target, _ = imported(drawing)
    assert len(onnx.load(target).graph.node[1].output) == 2
