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
from graphml.drawing import Drawing, G, Y
from graphml.handmade import HANDMADE, model, value
from modelexport.errors import FormatError
from modelexport.graphml.dialect import MODES
from pieces.running import run

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
    keys = {key.get("id"): f"d{place + 3}" for place, key in enumerate(drawing.root.findall(f"{G}key"))}
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
    path.write_bytes(etree.tostring(drawing.tree, encoding="utf-8", xml_declaration=True).replace(b"\n", b"\r\n"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bodies", "functions", "every_attribute", "odd_types", "odd_names", "passes_through"])
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
    assert [v.name for v in onnx.load(tmp_path / "back.onnx").graph.output] == ["s"]


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
    "an output without an edge": (lambda d: d.remove(d.find(name="clip")), r"output 'y': it needs one edge"),
    "two edges into one input": (
        lambda d: d.add_edge(d.find(name="x"), d.find(name="mul"), target_input="0"),
        r"'mul' .*two edges lead into its input 0",
    ),
    "edges that go round": (
        lambda d: d.into(d.find(name="relu"))[0].set("source", d.find(name="sub").get("id")),
        r"relu: it waits for its own result",
    ),
    "an edge to the card": (lambda d: d.add_edge(d.find(kind="model"), d.find(name="mul")), r"main.*an edge ends here"),
    "an edge into an input": (lambda d: d.add_edge(d.find(name="relu"), d.find(name="x")), r"x: an edge leads into it"),
    "an edge out of an output": (
        lambda d: d.add_edge(d.find(name="y"), d.find(name="mul")),
        r"output 'y': an edge comes",
    ),
    "an unknown operator": (lambda d: d.set(d.find(name="mul"), "operator", "Mull"), r"not valid: .*Mull"),
    "an attribute that is no JSON": (lambda d: d.set(d.find(name="mul"), "attributes", "axis=1"), r"'mul' .*no JSON"),
    "an attribute that is unknown": (
        lambda d: d.set(d.find(name="mul"), "attributes", '{"axis": 1}'),
        r"not valid: .*axis",
    ),
    "a weight of another name": (lambda d: d.set(d.find(name="w"), "name", "v"), r"initializer 'w': its name cannot"),
    "an input of another name": (
        lambda d: d.set(d.find(name="x"), "name", "v"),
        r"input 'x': its name cannot be changed",
    ),
    "a copied node": (
        lambda d: d.add_node("copy", **d.told(d.find(name="relu"))),
        r"'relu' \(\w+\) and 'relu' \(\w+\) are both number 0",
    ),
    "a copied weight": (lambda d: d.add_node("copy", **d.told(d.find(name="w"))), r"'w' \(\w+\) stands there twice"),
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
    refused(drawing, "'m' .*leads out of the body")


def test_a_weight_that_goes_with_its_readers(tmp_path: Path) -> None:
    made = small()
    made.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.float32), "unused"))
    drawing = draw(made, tmp_path)
    drawing.remove(drawing.find(name="unused"))
    target, edits = imported(drawing)
    assert edits == ("1 weight removed",)
    assert [t.name for t in onnx.load(target).graph.initializer] == ["w", "b", "high"]
    assert onnx.load(target).graph.initializer[0].data_type == TensorProto.FLOAT
