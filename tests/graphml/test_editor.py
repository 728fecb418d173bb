"""What people do in an editor: the look may change; a changed structure is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from lxml import etree
from onnx import helper, numpy_helper

import modelexport
from exports import export
from graphml.building import model, value
from graphml.drawing import Drawing, G, Y
from graphml.handmade import HANDMADE
from modelexport.errors import FormatError
from modelexport.options import PARAMETER_MODES

pytestmark = [pytest.mark.must, pytest.mark.integration]


def small() -> onnx.ModelProto:
    """x -> Relu -> Mul by w -> Sub b -> Clip -> LeakyRelu -> y, with the types of all tensors."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("Mul", ["r", "w"], ["m"], name="mul"),
        helper.make_node("Sub", ["m", "b"], ["s"], name="sub"),
        helper.make_node("Clip", ["s", "", "high"], ["c"], name="clip"),
        helper.make_node("LeakyRelu", ["c"], ["y"], name="leaky", alpha=0.5),
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


def is_restored(drawing: Drawing) -> bool:
    target = drawing.path.with_name("back.onnx")
    modelexport.import_onnx(drawing.save(), target)
    return target.read_bytes() == drawing.path.with_name("model.onnx").read_bytes()


def refused(drawing: Drawing, match: str) -> None:
    target = drawing.path.with_name("back.onnx")
    target.unlink(missing_ok=True)
    with pytest.raises(FormatError, match=match) as caught:
        modelexport.import_onnx(drawing.save(), target)
    assert "\n" not in caught.value.headline
    assert not target.exists()
    assert not list(target.parent.glob(".modelexport-*"))


def as_yed_saves(path: Path) -> None:
    """Renumber keys, nodes and edges, reverse their order, wrap texts, add an editor's key."""
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


@pytest.mark.parametrize("mode", PARAMETER_MODES)
@pytest.mark.parametrize(
    "name", ["bodies", "functions", "every_attribute", "odd_types", "odd_names", "passes_through"]
)
def test_saved_by_an_editor_nothing_is_lost(name: str, mode: str, tmp_path: Path) -> None:
    drawing = draw(HANDMADE[name](), tmp_path, mode)
    as_yed_saves(drawing.path)
    modelexport.import_onnx(drawing.path, tmp_path / "back.onnx")
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
    assert is_restored(drawing)


def test_empty_values_that_editors_write_do_no_harm(drawing: Drawing) -> None:
    """yEd writes a key without a value on nodes that have no text under it."""
    for element in (*drawing.nodes.values(), *drawing.edges):
        scope = "edge" if element.tag == f"{G}edge" else "node"
        said = drawing.texts(element)
        for found, name in drawing.names.values():
            if found == scope and name and name not in said:
                drawing.set(element, name, "")
    assert is_restored(drawing)


def test_operators_may_be_dragged_into_another_module(tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path)
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    operator = next(n for n in drawing.of_kind("operator") if drawing.parent(n) is not None)
    drawing.root.find(f"{G}graph").append(operator)
    assert is_restored(drawing)


def test_lines_to_notes_do_no_harm(drawing: Drawing) -> None:
    note, other = drawing.add_node("note"), drawing.add_node("other")
    drawing.add_edge(note, drawing.find(name="mul"))
    drawing.add_edge(note, other)
    drawing.add_edge(note, drawing.find(kind="model"))
    assert is_restored(drawing)
    drawing.add_edge(drawing.find(name="mul"), note)
    refused(drawing, "note was added: edges lead in and out")


def rewire(d: Drawing, target: str, slot: int, source: str) -> None:
    d.into(d.find(name=target))[slot].set("source", d.find(name=source).get("id"))


def swap_inputs(d: Drawing) -> None:
    first, second = d.into(d.find(name="sub"))
    d.set(first, "target_input", "1")
    d.set(second, "target_input", "0")


def redraw(d: Drawing) -> None:
    sub = d.find(name="sub")
    d.remove(d.into(sub)[0])
    d.add_edge(d.find(name="mul"), sub)


EDITS: dict[str, tuple[Callable[[Drawing], object], str]] = {
    "an operator removed": (
        lambda d: d.remove(d.find(name="relu")),
        r"an operator was removed: 'mul' \(n\d+\) consumes 'r', which nothing produces",
    ),
    "the last operator removed": (
        lambda d: d.remove(d.find(name="leaky")),
        "an operator was removed: the output 'y' consumes 'y', which nothing produces",
    ),
    "two operators removed": (
        lambda d: d.remove(d.find(name="relu"), d.find(name="sub")),
        r"2 operators were removed: 'mul' \(n\d+\) consumes 'r', which nothing produces",
    ),
    "an initializer removed": (
        lambda d: d.remove(d.find(name="b")),
        r"an initializer was removed: 'sub' \(n\d+\) consumes 'b', which nothing produces",
    ),
    "an input removed": (lambda d: d.remove(d.find(name="x")), "the input 'x' was removed"),
    "an output removed": (lambda d: d.remove(d.find(name="y")), "the output 'y' was removed"),
    "the card removed": (lambda d: d.remove(d.find(kind="model")), "holds no model"),
    "an operator added": (
        lambda d: d.add_node("mine", operator="Neg", name="new"),
        r"'new' \(mine\) was added",
    ),
    "an operator added with its kind": (
        lambda d: d.add_node("mine", kind="operator", operator="Neg"),
        r"the exact form of 'Neg' \(mine\) is missing \(remove the node if it was added",
    ),
    "an operator copied": (
        lambda d: d.add_node("copy", **d.texts(d.find(name="relu"))),
        r"'relu' \(\w+\) was added: it is a copy of 'relu' \(\w+\)",
    ),
    "an initializer copied": (
        lambda d: d.add_node("copy", **d.texts(d.find(name="w"))),
        r"'w' \(\w+\) was added: it is a copy",
    ),
    "the card copied": (
        lambda d: d.add_node("copy", **d.texts(d.find(kind="model"))),
        r"'main' \(\w+\) was added: it is a copy",
    ),
    "another operator": (
        lambda d: d.set(d.find(name="sub"), "operator", "Add"),
        r"'sub' \(n\d+\): the operator changed: expected 'Sub', got 'Add'",
    ),
    "an operator emptied": (
        lambda d: d.set(d.find(name="sub"), "operator", ""),
        r"'sub' \(n\d+\): the operator changed: expected 'Sub', got ''",
    ),
    "another domain": (
        lambda d: d.set(d.find(name="sub"), "domain", "own"),
        r"'sub' \(n\d+\): the domain changed: expected '', got 'own'",
    ),
    "another name": (
        lambda d: d.set(d.find(name="sub"), "name", "other"),
        r"'other' \(n\d+\): the name changed: expected 'sub', got 'other'",
    ),
    "other attributes": (
        lambda d: d.set(d.find(name="leaky"), "attributes", '{"alpha":0.25}'),
        r"""'leaky' \(n\d+\): the attributes changed: """
        r"""expected '{"alpha":0.5}', got '{"alpha":0.25}'""",
    ),
    "attributes emptied": (
        lambda d: d.set(d.find(name="leaky"), "attributes", None),
        r"""'leaky' \(n\d+\): the attributes changed: expected '{"alpha":0.5}', got ''""",
    ),
    "an attribute added": (
        lambda d: d.set(d.find(name="mul"), "attributes", '{"axis":1}'),
        r"'mul' \(n\d+\): the attributes changed",
    ),
    "an initializer renamed": (
        lambda d: d.set(d.find(name="w"), "name", "v"),
        "initializer 'w': the name changed: expected 'w', got 'v'",
    ),
    "an input renamed": (
        lambda d: d.set(d.find(name="x"), "name", "v"),
        "input 'x': the name changed: expected 'x', got 'v'",
    ),
    "an edge removed": (
        lambda d: d.remove(d.into(d.find(name="sub"))[1]),
        r"the edge from 'b' \(n\d+\) to input 1 of 'sub' \(n\d+\) was removed",
    ),
    "the edge to an output removed": (
        lambda d: d.remove(*d.into(d.find(name="y"))),
        r"the edge from 'leaky' \(n\d+\) to input 0 of 'y' \(n\d+\) was removed",
    ),
    "an edge rewired": (
        lambda d: rewire(d, "sub", 0, "x"),
        r"input 0 of 'sub' \(n\d+\) was connected to another source: "
        r"expected output 0 of 'mul' \(n\d+\), got output 0 of 'x' \(n\d+\)",
    ),
    "two inputs swapped": (swap_inputs, r"input \d of 'sub' .* was connected to another source"),
    "an edge drawn again": (redraw, r"the edge from 'mul' .* to input 0 of 'sub' .* was removed"),
    "an edge added": (
        lambda d: d.add_edge(d.find(name="x"), d.find(name="mul"), target_input="0"),
        r"an edge from 'x' \(n\d+\) to 'mul' \(n\d+\) was added",
    ),
    "an edge drawn twice": (
        lambda d: d.add_edge(
            d.find(name="x"), d.find(name="relu"), source_output="0", target_input="0"
        ),
        r"an edge from 'x' \(n\d+\) to 'relu' \(n\d+\) was added",
    ),
    "an edge to the card": (
        lambda d: d.add_edge(d.find(kind="model"), d.find(name="mul")),
        r"an edge from 'main' \(n0\) to 'mul' \(n\d+\) was added",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_changed_structure_is_an_error(case: str, drawing: Drawing) -> None:
    edit, match = EDITS[case]
    edit(drawing)
    refused(drawing, match)


def subgraphs_drawing(folder: Path) -> tuple[Drawing, etree._Element]:
    drawing = draw(HANDMADE["bodies"](), folder)
    inner = next(n for n in drawing.of_kind("operator") if drawing.texts(n)["operator"] == "Neg")
    return drawing, inner


def test_a_change_inside_a_subgraph(tmp_path: Path) -> None:
    drawing, inner = subgraphs_drawing(tmp_path)
    identity = inner.get("id")
    drawing.set(inner, "operator", "Abs")
    refused(drawing, rf"'m' \({identity}\): the operator changed: expected 'Neg', got 'Abs'")


def test_parts_of_a_subgraph_removed(tmp_path: Path) -> None:
    drawing, inner = subgraphs_drawing(tmp_path)
    drawing.remove(inner)
    refused(drawing, "an operator was removed")
    drawing, _ = subgraphs_drawing(tmp_path)
    drawing.remove(
        next(n for n in drawing.of_kind("input") if drawing.texts(n)["name"] == "carried")
    )
    refused(drawing, "the input 'carried' was removed")
    drawing, _ = subgraphs_drawing(tmp_path)
    drawing.remove(
        next(n for n in drawing.of_kind("initializer") if drawing.texts(n)["name"] == "big")
    )
    refused(
        drawing,
        r"an initializer was removed: 'Add' \(\S+\) consumes '\S*big', which nothing produces",
    )
    drawing, _ = subgraphs_drawing(tmp_path)
    drawing.remove(drawing.find(kind="operator", name="loop"))
    refused(drawing, "operators were removed: 'scan'.* consumes 'looped', which nothing produces")


def test_an_operator_dragged_into_another_graph(tmp_path: Path) -> None:
    drawing, inner = subgraphs_drawing(tmp_path)
    drawing.find(kind="operator", name="loop").getparent().append(inner)
    refused(drawing, "'m' .* was moved into or out of a subgraph")


def test_an_operator_with_subgraphs_copied(tmp_path: Path) -> None:
    drawing, _ = subgraphs_drawing(tmp_path)
    copy = etree.fromstring(etree.tostring(drawing.find(kind="operator", name="scan")))
    for node in copy.iter(f"{G}node", f"{G}graph"):
        node.set("id", "x" + node.get("id"))
    drawing.root.find(f"{G}graph").append(copy)
    refused(drawing, r"\(x\S+\) was added: it is a copy")


def test_functions_removed(tmp_path: Path) -> None:
    drawing = draw(HANDMADE["functions"](), tmp_path)
    drawing.remove(*drawing.of_kind("function"))
    refused(drawing, "6 operators were removed")


@pytest.mark.parametrize("mode", PARAMETER_MODES)
def test_attributes_whose_values_are_stored_elsewhere(mode: str, tmp_path: Path) -> None:
    drawing = draw(HANDMADE["odd_constants"](), tmp_path, mode)
    assert is_restored(drawing)
    constant = next(
        n
        for n in drawing.of_kind("operator")
        if "float[0]" in drawing.texts(n).get("attributes", "")
    )
    text = drawing.texts(constant)["attributes"]
    drawing.set(constant, "attributes", text.replace("float[0]", "float[1]"))
    refused(drawing, r"'Constant' \(n\d+\): the attributes changed")
