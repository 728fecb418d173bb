"""The file: valid GraphML, all that yEd needs, modules nested as in the model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from lxml import etree

import modelexport
from exports import export
from graphml.drawing import Drawing, G, Y
from graphml.handmade import HANDMADE
from modelexport.graphml.format import escape_name
from modelexport.tagged.model import TaggedModel

pytestmark = [pytest.mark.must, pytest.mark.integration]

MODELS = [
    ("bert", "fx"),
    ("bert", "htp"),
    ("t5", "fx"),
    ("swin", "htp"),
    ("conditional_bodies", "fx"),
    ("lent_modules", "fx"),
    ("sixty_levels", "htp"),
    ("no_parameters", "fx"),
]
BODIES = (
    "bodies",
    "functions",
    "odd_names",
    "every_attribute",
    "odd_types",
    "passes_through",
    "nothing",
    "deep",
)


@pytest.fixture(
    params=[*MODELS, *BODIES], ids=lambda case: "-".join(case) if isinstance(case, tuple) else case
)
def drawing(request: pytest.FixtureRequest, tmp_path: Path) -> Drawing:
    path = tmp_path / "model.onnx"
    if isinstance(request.param, tuple):
        export(*request.param, tmp_path)
    else:
        path.write_bytes(HANDMADE[request.param]().SerializeToString())
    return Drawing(modelexport.export_graphml(path).graphml)


def model_of(drawing: Drawing) -> TaggedModel:
    return modelexport.load(drawing.path.with_name("model.onnx"))


def test_is_graphml(drawing: Drawing) -> None:
    """Nesting, ids and references as the GraphML schema has them."""
    assert drawing.root.tag == f"{G}graphml"
    inside = {
        "graphml": ["key", "graph"],
        "graph": ["data", "node", "edge"],
        "node": ["data", "graph"],
        "edge": ["data"],
    }
    for element in drawing.root.iter(*(f"{G}{name}" for name in inside)):
        allowed = inside[element.tag.removeprefix(G)]
        found = [child.tag.removeprefix(G) for child in element]
        assert found == sorted(found, key=allowed.index), "children in the order of the schema"
    identities = [
        e.get("id") for e in drawing.root.iter(f"{G}node", f"{G}edge", f"{G}graph", f"{G}key")
    ]
    assert len(identities) == len(set(identities))
    for node_id, node in drawing.nodes.items():
        for graph in node.findall(f"{G}graph"):
            assert graph.get("id") == f"{node_id}:"
            assert all(
                inner.get("id").startswith(f"{node_id}::") for inner in graph.findall(f"{G}node")
            )
    for edge in drawing.edges:
        assert edge.getparent().getparent() is drawing.root
        assert {edge.get("source"), edge.get("target")} <= set(drawing.nodes)
    for data in drawing.root.iter(f"{G}data"):
        scope, _ = drawing.names[data.get("key")]
        assert data.getparent().tag == f"{G}{scope}"


def test_yed_can_show_everything(drawing: Drawing) -> None:
    for node in drawing.nodes.values():
        faces = drawing.faces(node)
        is_group = node.find(f"{G}graph") is not None
        assert (
            [face.tag for face in faces] == [f"{Y}GroupNode"] * 2 if is_group else [f"{Y}ShapeNode"]
        )
        assert node.get("yfiles.foldertype") == (
            ("group", "folder")[drawing.is_closed(node)] if is_group else None
        )
        for face in faces:
            parts = {part.tag.removeprefix(Y): part for part in face}
            assert {"Geometry", "Fill", "BorderStyle", "NodeLabel", "Shape"} <= set(parts)
            assert parts["NodeLabel"].text
            assert float(parts["Geometry"].get("width")) > 0
            if is_group:
                assert parts["State"].get("closed") == str(face is faces[1]).lower()
    for edge in drawing.edges:
        line = next(d for d in edge.findall(f"{G}data") if d.get("key") == "edgegraphics")[0]
        assert line.tag == f"{Y}PolyLineEdge"
        assert {part.tag.removeprefix(Y) for part in line} >= {"Path", "LineStyle", "Arrows"}


def test_siblings_do_not_overlap(drawing: Drawing) -> None:
    for graph in drawing.graphs():
        boxes = [drawing.box(node) for node in graph.findall(f"{G}node")]
        for (x, y, w, h), (a, b, c, d) in itertools.combinations(boxes, 2):
            assert x + w <= a + 0.1 or a + c <= x + 0.1 or y + h <= b + 0.1 or b + d <= y + 0.1
    for node in drawing.nodes.values():
        group = drawing.parent(node)
        if group is not None:
            (x, y, w, h), (a, b, c, d) = drawing.box(group, closed=False), drawing.box(node)
            assert x <= a <= a + c <= x + w + 0.1
            assert y <= b <= b + d <= y + h + 0.1


def test_labels_fit(drawing: Drawing) -> None:
    """A label of a usual font is narrower than its box."""
    for node in drawing.nodes.values():
        for face in drawing.faces(node):
            label = face.find(f"{Y}NodeLabel")
            longest = max(map(len, label.text.split("\n")))
            assert longest * float(label.get("fontSize")) * 0.53 <= float(
                face.find(f"{Y}Geometry").get("width")
            )


def test_one_edge_for_every_use_of_a_tensor(drawing: Drawing) -> None:
    model = model_of(drawing)
    given = {*model.graph.inputs, *model.graph.initializers, *model.graph.producer}
    for bodies in (*model.graph.subgraphs.values(), list(model.graph.functions.values())):
        for body in bodies:
            given |= {*body.inputs, *body.initializers}
    uses = sum(key in given for node in model.graph.nodes for key in node.inputs)
    ends = [*model.graph.outputs]
    for bodies in (*model.graph.subgraphs.values(), list(model.graph.functions.values())):
        ends += [key for body in bodies for key in body.outputs]
    assert len(drawing.edges) == uses + sum(key in given for key in ends)
    for edge in drawing.edges:
        texts = drawing.texts(edge)
        assert {"source_output", "target_input"} <= set(texts)
        source, target = (
            drawing.texts(drawing.nodes[edge.get(end)]) for end in ("source", "target")
        )
        assert source["kind"] in ("operator", "input", "initializer", "sparse_initializer")
        assert target["kind"] in ("operator", "output")
        if source["kind"] == "operator":
            proto = model.graph.protos[int(source["execution_order"])]
            assert texts.get("tensor", "") == escape_name(proto.output[int(texts["source_output"])])
        if target["kind"] == "operator":
            proto = model.graph.protos[int(target["execution_order"])]
            assert texts.get("tensor", "") == escape_name(proto.input[int(texts["target_input"])])


def test_every_operator_says_what_it_is(drawing: Drawing) -> None:
    model = model_of(drawing)
    operators = {
        int(drawing.texts(node)["execution_order"]): drawing.texts(node)
        for node in drawing.of_kind("operator")
    }
    assert sorted(operators) == list(range(len(model.graph.nodes)))
    for index, (node, tag) in enumerate(model.items()):
        texts = operators[index]
        assert texts["operator"] == node.op_type
        assert texts.get("domain", "") == node.domain
        assert texts.get("name", "") == escape_name(node.name)
        assert set(json.loads(texts.get("attributes", "{}"))) == {
            a.name for a in model.graph.protos[index].attribute
        }
        if tag is not None:
            assert texts["tag"] == tag.hierarchy_path
            assert texts.get("module_path", "") == tag.hierarchy_module
            assert texts["evidence"] == tag.hierarchy_method
            assert texts["class"] == model.modules[tag.hierarchy_module].class_


@pytest.mark.parametrize(("name", "strategy"), MODELS)
def test_modules_are_nested_as_in_the_model(name: str, strategy: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    modules = modelexport.load(path).modules
    drawn = {}
    for group in drawing.of_kind("module"):
        texts = drawing.texts(group)
        module = texts.get("module_path", "")
        drawn.setdefault(module, []).append(group)
        assert texts["class"] == modules[module].class_
        if modules[module].tag is not None:
            assert texts["tag"] == modules[module].tag
        above = drawing.parent(group)
        while above is not None and drawing.kind(above) != "module":
            above = drawing.parent(above)
        expected = module.rpartition(".")[0] if module else None
        assert (None if above is None else drawing.texts(above).get("module_path", "")) == expected
    assert set(drawn) == set(modules)
    assert all(len(groups) == 1 for groups in drawn.values())
    for operator in drawing.of_kind("operator"):
        above = drawing.parent(operator)
        if drawing.kind(above) == "module":
            assert drawing.texts(above).get("module_path", "") == drawing.texts(operator).get(
                "module_path", ""
            )


def test_bodies_and_functions_are_groups(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(HANDMADE["bodies"]().SerializeToString())
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    outer = drawing.find(kind="operator", name="outer")
    bodies = [drawing.texts(node)["name"] for node in outer.find(f"{G}graph")]
    assert bodies == ["else_branch", "then_branch"]
    deep = drawing.find(kind="operator", name="deep")
    assert drawing.texts(drawing.parent(deep))["name"] == "then_branch"
    assert drawing.parent(drawing.parent(deep)) is outer
    path.write_bytes(HANDMADE["functions"]().SerializeToString())
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    assert [drawing.texts(node)["name"] for node in drawing.of_kind("function")] == [
        "own::Scale",
        "own::Twice",
        "own::Scale:other",
    ]
    inside = [
        drawing.texts(drawing.parent(n))["name"]
        for n in drawing.of_kind("operator")
        if drawing.parent(n) is not None
    ]
    assert inside == [
        "own::Scale",
        "own::Scale",
        "own::Twice",
        "own::Twice",
        "own::Scale:other",
        "own::Scale:other",
    ]


def test_a_clean_file_takes_its_modules_from_the_sidecar(tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path, clean=True)
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    texts = [drawing.texts(node) for node in drawing.of_kind("operator")]
    assert all("tag" in found for found in texts)
    assert len(drawing.of_kind("module")) > 20


def test_deep_groups_are_closed_and_the_first_level_is_open(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    root = drawing.find(
        kind="module", tag="/BertModel", **{"class": modelexport.load(path).modules[""].class_}
    )
    assert not drawing.is_closed(root)
    closed = [
        node
        for node in drawing.of_kind("module")
        if drawing.is_closed(node) and len(node.find(f"{G}graph"))
    ]
    assert closed
    depth = {len(node.get("id").split("::")) for node in closed}
    assert min(depth) > 1
    assert all(
        drawing.is_closed(n)
        for n in drawing.of_kind("module")
        if len(n.get("id").split("::")) > min(depth)
    )


def test_ordinary_readers_see_our_data(tmp_path: Path) -> None:
    """networkx knows nothing of groups, but reads nodes, edges and what they say."""
    networkx = pytest.importorskip("networkx")
    path = tmp_path / "model.onnx"
    path.write_bytes(HANDMADE["metadata_everywhere"]().SerializeToString())
    graph = networkx.read_graphml(modelexport.export_graphml(path).graphml, force_multigraph=True)
    said = next(texts for _, texts in graph.nodes(data=True) if texts.get("kind") == "operator")
    assert said["operator"] == "Gemm"
    assert said["execution_order"] == 0
    assert json.loads(said["attributes"]) == {"alpha": 0.1}
    tensors = {
        texts["tensor"]: (texts["type"], texts["shape"]) for _, _, texts in graph.edges(data=True)
    }
    assert tensors == {
        "x": ("float", "[batch,3]"),
        "w": ("float", "[3,4]"),
        "y": ("float", "[?,4]"),
    }


def test_the_picture_in_the_documentation_is_the_demos(tmp_path: Path) -> None:
    """docs/demo_graph.svg is drawn from the GraphML that the demo writes."""
    from click.testing import CliRunner
    from docs.draw_graphml import draw

    from modelexport.cli.main import main

    result = CliRunner().invoke(main, ["demo", str(tmp_path)])
    assert result.exit_code == 0, result.output
    drawn = draw(tmp_path / "bert-tiny_hierarchical_graph.graphml")
    assert drawn == Path("docs/demo_graph.svg").read_text()
    assert etree.fromstring(drawn.encode()).tag.endswith("svg")


@pytest.mark.parametrize(("name", "strategy"), [("bert", "htp"), ("resnet", "htp"), ("bert", "fx")])
def test_edges_have_types_whether_the_file_declares_them_or_not(
    name: str, strategy: str, tmp_path: Path
) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    texts = [drawing.texts(edge) for edge in drawing.edges]
    assert sum("type" in found and "shape" in found for found in texts) / len(texts) > 0.98


@pytest.mark.regression
def test_edges_name_values_that_are_not_utf8(tmp_path: Path) -> None:
    """Also in functions, where the name of a value is not its key."""
    path = tmp_path / "model.onnx"
    path.write_bytes(HANDMADE["functions"]().SerializeToString().replace(b"h", b"\xe9"))
    drawing = Drawing(modelexport.export_graphml(path).graphml)
    names = {drawing.texts(edge).get("tensor", "") for edge in drawing.edges}
    assert "\\xe9" in names
    assert not [name for name in names if name.startswith("b'")]
