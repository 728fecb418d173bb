"""Model Explorer's files: every node and edge once, nested as the modules are."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import onnx
import pytest
from onnx import TensorProto, helper

import modelexport
from exports import cases, export
from graphml.handmade import HANDMADE
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import is_within
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import encode_tag
from modelexport.viewing.explorer import write_model_explorer
from modelexport.viewing.namespaces import Namespaces
from modelexport.viewing.overlays import Overlay

pytestmark = pytest.mark.must

MODELS = cases(
    "bert",
    "resnet",
    "block_three_times",
    "conditional_bodies",
    "module_dict_odd_keys",
    "same_object_two_names",
    "sixty_levels",
    "tied_weights",
    "no_parameters",
)


class Drawn:
    """A model, and the file that was written for Model Explorer."""

    def __init__(self, path: Path) -> None:
        self.model: TaggedModel = modelexport.load(path)
        self.files = write_model_explorer(path, path.with_name("explorer.json"))
        self.text = self.files.graphs.read_text()
        self.content = json.loads(self.text)
        self.graphs = {graph["id"]: graph for graph in self.content["graphs"]}
        self.nodes = {node["id"]: node for node in self.all_nodes()}

    def all_nodes(self) -> Iterator[dict[str, Any]]:
        for graph in self.content["graphs"]:
            yield from graph["nodes"]

    def operator(self, index: int) -> dict[str, Any]:
        return self.nodes[f"op:{self.model.graph.nodes[index].key}"]


@pytest.fixture(
    params=[*(pytest.param(case.values, id=case.id) for case in MODELS), *HANDMADE],
)
def drawn(request: pytest.FixtureRequest, tmp_path: Path) -> Drawn:
    path = tmp_path / "model.onnx"
    if isinstance(request.param, str):
        path.write_bytes(HANDMADE[request.param]().SerializeToString())
    else:
        export(*request.param, tmp_path)
    return Drawn(path)


def attributes(lines: list[dict[str, str]]) -> dict[str, str]:
    return {line["key"]: line["value"] for line in lines}


def test_every_node_and_edge_is_drawn_once(drawn: Drawn) -> None:
    graph, nodes = drawn.model.graph, drawn.nodes
    assert len(nodes) == sum(1 for _ in drawn.all_nodes())
    assert len(drawn.graphs) == len(drawn.content["graphs"])
    operators = [node for name, node in nodes.items() if name.startswith("op:")]
    assert len(operators) == len(graph.nodes) == drawn.files.nodes
    for index, node in enumerate(graph.nodes):
        box = drawn.operator(index)
        expected = [
            (str(slot), key)
            for (slot, name), key in zip(
                ((slot, name) for slot, name in enumerate(graph.protos[index].input) if name),
                node.inputs,
                strict=True,
            )
        ]
        constants = attributes(box.get("attrs", []))
        described = {
            item["id"]: attributes(item["attrs"]) for item in box.get("inputsMetadata", [])
        }
        drawn_edges = {
            edge["targetNodeInputId"]: _source(drawn, edge) for edge in box.get("incomingEdges", [])
        }
        for slot, key in expected:
            if f"input {slot}" in constants:  # a line with its values
                assert constants[f"input {slot}"].startswith(f"{key}: ")
                assert slot not in drawn_edges
                assert key not in graph.producer
            elif slot in drawn_edges:
                assert drawn_edges[slot] == _producer(drawn, key)
            else:
                assert _producer(drawn, key) is None
        captured = len(drawn_edges.keys() - {slot for slot, _ in expected})
        assert captured == sum("used by" in item for item in described.values())
    _check_edges_stay_in_their_graph(drawn)


def _source(drawn: Drawn, edge: dict[str, str]) -> tuple[str, str]:
    """Return the node and output that an edge comes from, followed out of subgraphs."""
    source, output = edge["sourceNodeId"], edge["sourceNodeOutputId"]
    if source.startswith("captured:"):
        key = attributes(drawn.nodes[source]["attrs"])["name"]
        producer = _producer(drawn, key)
        assert producer is not None
        return producer
    return source, output


def _producer(drawn: Drawn, key: str) -> tuple[str, str] | None:
    """Return the node that the flat graph has for a value, and which output of it."""
    graph = drawn.model.graph
    index = graph.producer.get(key)
    if index is not None:
        named = [slot for slot, name in enumerate(graph.protos[index].output) if name]
        slots = dict(zip(graph.nodes[index].outputs, named, strict=True))
        return f"op:{graph.nodes[index].key}", str(slots[key])
    kinds = ("initializer", "sparse_initializer", "input")
    return next(((f"{kind}:{key}", "0") for kind in kinds if f"{kind}:{key}" in drawn.nodes), None)


def _check_edges_stay_in_their_graph(drawn: Drawn) -> None:
    for graph in drawn.graphs.values():
        inside = {node["id"] for node in graph["nodes"]}
        for node in graph["nodes"]:
            assert {edge["sourceNodeId"] for edge in node.get("incomingEdges", [])} <= inside
            assert {*node.get("subgraphIds", [])} <= {*drawn.graphs}


def test_every_graph_and_its_ends_are_drawn(drawn: Drawn) -> None:
    flat, proto = drawn.model.graph, drawn.model.proto
    graphs = [*flat.subgraphs.values()]
    assert len(drawn.graphs) == 1 + sum(map(len, graphs)) + len(flat.functions)
    called = Counter(name for node in drawn.all_nodes() for name in node.get("subgraphIds", []))
    assert all(called[name] == 1 for name in drawn.graphs if not name.startswith(("main", "func")))
    for graph in drawn.graphs.values():
        for node in graph["nodes"]:
            if node["id"].startswith("output:"):
                sources = [_source(drawn, edge) for edge in node.get("incomingEdges", [])]
                key = node["id"].removeprefix("output:").partition("#")[0]
                assert sources == [source for source in [_producer(drawn, key)] if source]
    main = drawn.graphs["main"]["nodes"]
    kinds = Counter(attributes(node["attrs"]).get("kind") for node in main if "attrs" in node)
    assert kinds["output"] == len(proto.graph.output)
    assert kinds["input"] == len(flat.inputs)


def test_namespaces_are_the_nesting_of_modules(drawn: Drawn) -> None:
    for index, tag in enumerate(drawn.model.effective_tags):
        namespace = drawn.operator(index)["namespace"]
        if tag is None:
            assert namespace == ""
            continue
        root, *segments = namespace.split("/")
        modules = drawn.model.modules
        assert root == modules[""].class_.rpartition(".")[2]
        names = [unquote(segment.partition(": ")[0]) for segment in segments]
        assert ".".join(names) == tag.hierarchy_module
        for depth, segment in enumerate(segments, 1):
            class_ = modules[".".join(names[:depth])].class_.rpartition(".")[2]
            assert unquote(segment.partition(": ")[2]) == class_
    for graph in drawn.graphs.values():
        groups = {
            "/".join(parts[:depth])
            for parts in (node["namespace"].split("/") for node in graph["nodes"])
            for depth in range(1, len(parts) + 1)
        } - {""}
        assert groups == graph["groupNodeAttributes"].keys() - {""}
        for lines in graph["groupNodeAttributes"].values():
            path = lines.get("module", "").replace("(root)", "")
            assert "module" not in lines or path in drawn.model.modules or not drawn.model.modules


def test_texts_are_fit_to_draw(drawn: Drawn) -> None:
    for node in drawn.all_nodes():
        assert node["label"].isascii()
        assert node["label"].isprintable()
        assert node["label"]
        assert node["namespace"].isascii()
        assert not {*node["namespace"]} & {*";\\"}
    assert str(drawn.files.graphs.parent) not in drawn.text
    assert "stack_trace" not in drawn.text


def test_initializers_are_in_the_module_that_uses_them(tmp_path: Path) -> None:
    drawn = Drawn(export("bert", "fx", tmp_path)[0])
    weight = drawn.nodes["initializer:embeddings.LayerNorm.weight"]
    assert weight["label"] == "weight"
    assert weight["namespace"] == "BertModel/embeddings: BertEmbeddings/LayerNorm: LayerNorm"
    module = drawn.graphs["main"]["groupNodeAttributes"][weight["namespace"]]
    assert module["class"] == "torch.nn.modules.normalization.LayerNorm"
    assert module["own parameters"] == "weight, bias"
    assert module["status"] == "nodes"


def test_a_clean_file_is_nested_by_its_sidecar(tmp_path: Path) -> None:
    spaces = []
    for options in ({}, {"clean": True}):
        folder = tmp_path / str(len(options))
        drawn = Drawn(export("block_three_times", "fx", folder, **options)[0])
        spaces.append({node["id"]: node["namespace"] for node in drawn.all_nodes()})
    assert spaces[0] == spaces[1]
    assert len({*spaces[0].values()}) > 2


@pytest.mark.regression
def test_names_are_data_only(tmp_path: Path) -> None:
    """Names with a meaning for Model Explorer or for a script, and two values of one name."""
    hostile = ["__proto__", "constructor", "a;b", "a/b", "a\\", "\u202e<script>", "a#2", "", "%"]
    nodes = [
        helper.make_node("Relu", ["x"], [f"{name}!"], doc_string=_tag(f"{name}.inner.{name}"))
        for name in hostile
    ]
    nodes += [helper.make_node("Relu", ["x"], [name], name="n") for name in ("y", "y", "y#2")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    write_model_explorer(path, tmp_path / "out.json")
    (main,) = json.loads((tmp_path / "out.json").read_text())["graphs"]
    assert len({node["id"] for node in main["nodes"]}) == len(nodes) + 2
    spaces = [node["namespace"] for node in main["nodes"][1 : len(hostile) + 1]]
    assert len({*spaces}) == len(hostile)
    assert all(space.isascii() and not {*space} & {*";\\"} for space in spaces)
    assert all(all(space.split("/")) for space in spaces)


def _tag(module: str) -> str:
    return encode_tag(NodeTag(("/M",), "/M", 1, "scope", module)).decode()


def test_lists_of_modules_save_a_box() -> None:
    def record(calls: int, *children: str) -> ModuleRecord:
        return ModuleRecord(None, "t.C", False, "nodes", calls, 0, (), (), (), children, (), 1)

    modules = {"": record(1, "a"), "a": record(0, "0"), "a.0": record(2, "b"), "a.0.b": record(0)}
    assert Namespaces(modules, {"a.0"}).of("a.0") == "C/a.0: C"
    assert Namespaces(modules, {"a.0"}).of("a.0.b") == "C/a.0: C"
    assert Namespaces(modules, {"a.0.b"}).of("a.0.b") == "C/a.0: C/b: C"
    assert Namespaces(modules, {"a", "a.0"}).of("a.0") == "C/a: C/0: C"
    assert Namespaces({}).of("a.0") == "(root)/a/0"


@pytest.mark.parametrize("aggregate", ["sum", "max"])
def test_node_data_adds_up_to_the_values_of_modules(aggregate: str, tmp_path: Path) -> None:
    path = export("conditional_bodies", "fx", tmp_path)[0]
    model = modelexport.load(path)
    values = {"": 12.0, "before": 2.0, "yes": 3.0, "yes.fc": 1.0, "no": 2.5, "no.norm": math.nan}
    overlay = Overlay("Latency (CPU)", "ms", aggregate, values)
    files = write_model_explorer(path, tmp_path / "out.json", [overlay, overlay])
    assert [file.name for file in files.node_data] == [
        "out_latency-cpu.json",
        "out_latency-cpu-2.json",
    ]
    data = json.loads(files.node_data[0].read_text())
    content = json.loads(files.graphs.read_text())
    assert data.keys() == {graph["id"] for graph in content["graphs"]}
    results = {
        node: one["value"] for each in data.values() for node, one in each["results"].items()
    }
    assert len(results) == len(model.graph.nodes)
    combine = math.fsum if aggregate == "sum" else max
    totals = overlay.with_submodules()
    for module in values:
        inside = [
            results[f"op:{node.key}"]
            for node, tag in model.items()
            if tag is not None and is_within(tag.hierarchy_module, module)
        ]
        given = [v for p, v in values.items() if is_within(p, module) and math.isfinite(v)]
        if given:
            assert combine(inside) == pytest.approx(combine(given))
            assert totals[module] == pytest.approx(combine(given))
    group = content["graphs"][0]["groupNodeAttributes"]["Conditional/before: Linear"]
    assert group[overlay.name] == "2 ms"
    assert data["main"]["gradient"][0]["stop"] == 0


@pytest.mark.sanity
def test_no_file_of_the_model_is_overwritten(tmp_path: Path) -> None:
    path = export("no_parameters", "fx", tmp_path)[0]
    sidecar = tmp_path / "model_hierarchy.json"
    before = sidecar.read_bytes()
    for output, overlays in (
        (sidecar, []),
        (tmp_path / "model.json", [Overlay("hierarchy", "", "sum", {})]),
    ):
        with pytest.raises(modelexport.ArgumentError, match="overwrite"):
            write_model_explorer(path, output, overlays)
    with pytest.raises(modelexport.ArgumentError, match=r"\.json"):
        write_model_explorer(path, tmp_path / "model.txt")
    assert sidecar.read_bytes() == before


@pytest.mark.regression
@pytest.mark.parametrize("name", ["model.json", "model_latency.json"])
def test_no_result_that_is_read_is_overwritten(name: str, tmp_path: Path) -> None:
    path = export("no_parameters", "fx", tmp_path)[0]
    overlay = tmp_path / name
    overlay.write_text("{}")
    with pytest.raises(modelexport.ArgumentError, match="would overwrite the input"):
        write_model_explorer(
            path, tmp_path / "model.json", [Overlay("latency", "", "sum", {})], [overlay]
        )
    assert overlay.read_text() == "{}"


def test_the_extension_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['model_explorer'] = None; import modelexport.model_explorer.main"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install ai-edge-model-explorer" in result.stderr.splitlines()[-1]


@dataclass
class Graph:
    """The fields of `model_explorer.graph_builder.Graph` that are needed."""

    id: str
    nodes: list[Any] = field(default_factory=list)
    groupNodeAttributes: dict[str, dict[str, str]] | None = None  # noqa: N815


def test_the_extension_converts_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = types.ModuleType("model_explorer")
    package.graph_builder = types.SimpleNamespace(Graph=Graph)  # type: ignore[attr-defined]
    package.Adapter = object  # type: ignore[attr-defined]
    package.AdapterMetadata = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model_explorer", package)
    monkeypatch.delitem(sys.modules, "modelexport.model_explorer.main", raising=False)
    from modelexport.model_explorer.main import ModelExportAdapter

    drawn = Drawn(export("conditional_bodies", "fx", tmp_path)[0])
    assert ModelExportAdapter.metadata["fileExts"] == ["onnx"]
    converted = ModelExportAdapter().convert(str(drawn.model.path), {})
    graphs = [asdict(graph) for graph in converted["graphs"]]
    assert msgspec.json.decode(msgspec.json.encode(graphs)) == drawn.content["graphs"]
    monkeypatch.delitem(sys.modules, "modelexport.model_explorer.main")


def test_types_and_attributes_are_described(tmp_path: Path) -> None:
    drawn = Drawn(export("conditional_bodies", "fx", tmp_path)[0])
    (index,) = (i for i, node in enumerate(drawn.model.graph.nodes) if node.key == "linear")
    node = drawn.operator(index)
    lines = attributes(node["attrs"])
    assert lines["module"] == "before"
    assert lines["tag"] == "/Conditional"
    assert lines["evidence"] == "scope"
    assert lines["transB"] == "1"
    assert attributes(node["outputsMetadata"][0]["attrs"]) == {
        "__tensor_tag": "linear",
        "tensor_name": "linear",
        "tensor_shape": "float[2,8]",
    }


def test_the_file_is_deterministic(tmp_path: Path) -> None:
    path = export("bert", "htp", tmp_path)[0]
    written = [
        write_model_explorer(path, tmp_path / f"{name}.json").graphs.read_bytes() for name in "ab"
    ]
    assert written[0] == written[1]
    assert onnx.load(str(path)).graph.node
