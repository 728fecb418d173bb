"""The data of the page, without a browser: every node, edge and module of the file is in it."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import modelexport
from exports import CASES, export
from modelexport.errors import ArgumentError, FileError, FormatError
from modelexport.modules.tree import is_within
from modelexport.viewing.overlays import read_overlays
from retag.tools import apply
from viewing.pages import PageModel, read_page


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_everything_is_in_the_page(name: str, strategy: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    result = modelexport.view(path, tmp_path / "page.html")
    tagged = modelexport.load(path)
    data = read_page(result.path)
    assert data["format"] == "modelexport-view/1"
    model = PageModel(data["models"][0])
    graph = tagged.graph
    assert result.nodes == len(model.ops) == len(graph.nodes)
    assert model.ops == [node.op_type for node in graph.nodes]
    assert model.node_modules == [tag and tag.hierarchy_module for tag in tagged.tags]
    assert set(model.paths) == set(tagged.modules)
    for node, inputs, outputs in zip(graph.nodes, model.inputs, model.outputs, strict=True):
        assert [model.values[value] for value in inputs] == list(node.inputs)
        assert [model.values[value] for value in outputs] == list(node.outputs)
    for node, box in enumerate(model.node_boxes):
        module = model.node_modules[node]
        assert module is not None
        assert model.box_modules[box] == module
        chain = [model.box_modules[outer] for outer in model.around(box) if outer < model.count]
        for inner, outer in itertools.pairwise(chain):
            assert inner is not None
            assert outer is not None
            assert is_within(inner, outer)


def test_a_module_that_runs_twice_has_a_box_for_each_call(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "fx", tmp_path)
    page = modelexport.view(path, tmp_path / "page.html").path
    model = PageModel(read_page(page)["models"][0])
    tagged = modelexport.load(path)
    calls: dict[tuple[str, int | None], set[int]] = {}
    for tag, box in zip(tagged.tags, model.node_boxes, strict=True):
        assert tag is not None
        calls.setdefault((tag.hierarchy_module, tag.hierarchy_call), set()).add(box)
    assert all(len(boxes) == 1 for boxes in calls.values())
    assert len({next(iter(boxes)) for boxes in calls.values()}) == len(calls)
    assert max(call or 0 for _, call in calls) == 2


class Hostile(nn.Module):
    """A module whose parts have names that attack a page."""

    NAMES = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a\u202eb\x07")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.NAMES:
            x = torch.relu(getattr(self, name)(x))
        return x


def export_hostile(folder: Path) -> Path:
    path = folder / "m.onnx"
    modelexport.export_model(Hostile().eval(), torch.rand(2, 4), path, strategy="htp")
    return path


def test_names_cannot_leave_the_data(tmp_path: Path) -> None:
    page = modelexport.view(export_hostile(tmp_path)).path.read_text()
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "alert(1)" not in page
    model = PageModel(read_page(tmp_path / "m.html")["models"][0])
    assert set(Hostile.NAMES) <= set(model.paths)


def test_only_its_own_script_and_style_are_allowed(tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    page = modelexport.view(path, tmp_path / "p.html").path.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        text = re.search(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy[1]
    assert "unsafe" not in policy[1]
    assert "http" not in policy[1]


def test_no_stack_traces_and_no_absolute_paths(tmp_path: Path) -> None:
    path, _, _ = export("norm_before_dropout", "fx", tmp_path)
    assert b"pkg.torch.onnx.stack_trace" in path.read_bytes()
    data = json.dumps(read_page(modelexport.view(path, tmp_path / "p.html").path))
    assert "stack_trace" not in data
    assert str(tmp_path) not in data
    assert str(Path(__file__).parent) not in data
    assert ".py" not in data


def test_a_file_without_tags_is_shown_flat(tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    modelexport.strip(path, tmp_path / "bare.onnx")
    result = modelexport.view(tmp_path / "bare.onnx")
    model = PageModel(read_page(result.path)["models"][0])
    assert result.modules == 0
    assert set(model.node_boxes) == {0}


def test_the_same_bytes_twice_and_the_sidecar_of_a_clean_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    modelexport.export_model(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.rand(1, 4), path, clean=True
    )
    first = modelexport.view(path).path.read_bytes()
    assert first == modelexport.view(path).path.read_bytes()
    assert PageModel(read_page(tmp_path / "m.html")["models"][0]).paths == ["", "0", "1"]


def test_local_functions_and_empty_subgraphs(tmp_path: Path) -> None:
    body = helper.make_node("Relu", ["a"], ["b"])
    function = helper.make_function(
        "local", "Twice", ["a"], ["c"], [body, helper.make_node("Neg", ["b"], ["c"])],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Twice", ["x"], ["y"], domain="local"),
        helper.make_node("Twice", ["y"], ["z"], domain="local"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xz"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets), path)
    model = PageModel(read_page(modelexport.view(path).path)["models"][0])
    assert model.ops == ["Twice", "Twice", "Relu", "Neg"]
    assert model.parent[model.node_boxes[2]] == model.count  # in the first call
    assert model.columns["graphs"][1]["inputs"]


def test_two_files_and_what_differs(tmp_path: Path) -> None:
    path, _, _ = export("norm_before_dropout", "fx", tmp_path)
    other = tmp_path / "other.onnx"
    model = onnx.load(path)
    changed = model.graph.node[len(model.graph.node) // 2]
    changed.op_type = "Neg" if changed.op_type != "Neg" else "Abs"
    del changed.attribute[:], changed.input[1:]
    onnx.save(model, other)
    data = read_page(modelexport.view(path, tmp_path / "p.html", other=other).path)
    first, second = (PageModel(columns) for columns in data["models"])
    marked = {int(node): mark for node, mark in second.columns["marks"].items()}
    assert changed.op_type in [second.ops[node] for node in marked]
    found = modelexport.compare(path, other).modules
    assert len(marked) == sum(len(each.added) + len(each.changed) for each in found)
    removed = sum(len(each.removed) + len(each.changed) for each in found)
    assert len(first.columns["marks"]) == removed > 0
    same = read_page(modelexport.view(path, tmp_path / "p.html", other=path).path)
    assert not any(columns["marks"] for columns in same["models"])


def test_a_notebook_shows_the_page(tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    result = modelexport.view(path, tmp_path / "p.html")
    shown = result._repr_html_()
    source = re.search(r'srcdoc="([^"]*)"', shown)
    assert source is not None
    assert html.unescape(source[1]) == result.path.read_text()
    assert "allow-same-origin" not in shown


def write_results(path: Path, folder: Path) -> dict[str, Path]:
    """Write the JSON results of the commands that a page can show."""
    from click.testing import CliRunner

    from modelexport.cli.main import main

    commands = {
        "profile": ["profile", str(path), "--runs", "1"],
        "analyze": ["analyze", str(path)],
        "sensitivity": ["quantize", str(path), "--sensitivity"],
    }
    files = {}
    for name, command in commands.items():
        files[name] = folder / f"{name}.json"
        output = ["--output-format", "json", "--output-file", str(files[name])]
        result = CliRunner().invoke(main, [*command, *output], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return files


def test_overlays_of_every_command(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    path = tmp_path / "m.onnx"
    x = torch.rand(2, 16)
    modelexport.export_model(net, x, path, flops=True)
    files = write_results(path, tmp_path)
    files["verify"] = tmp_path / "verify.json"
    import msgspec

    files["verify"].write_bytes(msgspec.json.encode(modelexport.verify(net, x, path)))
    result = modelexport.view(path, overlays=list(files.values()))
    overlays = {each["name"]: each for each in read_page(result.path)["overlays"]}
    assert set(overlays) == {
        "latency", "bytes", "nodes", "operations", "error if quantized to int8-dynamic",
        "difference from PyTorch",
    }  # fmt: skip
    assert sum(overlays["nodes"]["values"].values()) == result.nodes
    assert sum(overlays["operations"]["values"].values()) == 2 * 2 * 16 * (16 + 4)
    assert overlays["bytes"]["values"]["0"] == 4 * (16 * 16 + 16)
    profile = json.loads(files["profile"].read_text())
    assert sum(overlays["latency"]["values"].values()) == pytest.approx(profile["kernel_ms"])
    assert overlays["latency"]["aggregate"] == "sum"
    assert overlays["difference from PyTorch"]["aggregate"] == "max"
    record = modelexport.profile(path, runs=1)
    again = modelexport.view(path, overlays=[record, modelexport.analyze(path)])
    names = [each["name"] for each in read_page(again.path)["overlays"]]
    assert names == ["latency", "bytes", "nodes", "operations"]
    with pytest.raises(FormatError, match="a View is not the result of a known command"):
        modelexport.view(path, overlays=[again])


@pytest.mark.regression
def test_operations_of_a_list_of_modules_count_once(tmp_path: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    path = tmp_path / "m.onnx"
    modelexport.export_model(Listed().eval(), torch.rand(2, 8), path, flops=True)
    whole = next(each.flops for each in modelexport.analyze(path).modules if not each.module)
    overlays = {each.name: each for each in read_overlays(modelexport.analyze(path))}
    assert whole == 3 * 2 * 2 * 8 * 8
    assert overlays["operations"].with_submodules()[""] == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not the result of a command"),
        (b"[]", "is not the result of a command"),
        (b"{}", "a known command"),
        (b'{"kernel_ms": 1}', "is damaged"),
        (b'{"kernel_ms": 1, "modules": [1]}', "is damaged"),
        (b'{"kernel_ms": 1, "modules": []}', "no numbers by module"),
        (b'{"by_operator": {}, "modules": 3}', "is damaged"),
    ],
)
def test_bad_overlays(content: bytes, message: str, tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    overlay = tmp_path / "overlay.json"
    overlay.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        modelexport.view(path, tmp_path / "p.html", overlays=[overlay])
    assert not (tmp_path / "p.html").exists()


def test_bad_arguments(tmp_path: Path) -> None:
    path, _, _ = export("conv_batch_norm", "fx", tmp_path)
    with pytest.raises(ArgumentError, match=r"does not end in \.html"):
        modelexport.view(path, tmp_path / "p.txt")
    with pytest.raises(FileError):
        modelexport.view(path, tmp_path / "p.html", overlays=[tmp_path / "missing.json"])
    overlay = tmp_path / "p.html"
    overlay.write_text("{}")
    with pytest.raises(ArgumentError, match="would be overwritten"):
        modelexport.view(path, overlay, overlays=[overlay])
    with pytest.raises(FileError):
        modelexport.view(tmp_path / "missing.onnx")


def test_an_optimized_and_retagged_file(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    changed, out = tmp_path / "changed.onnx", tmp_path / "out.onnx"
    assert apply("ort-all", path, changed, {})
    modelexport.retag(path, changed, out)
    model = PageModel(read_page(modelexport.view(out).path)["models"][0])
    tags = modelexport.load(out).tags
    covers = {
        str(i): tag.hierarchy_covers for i, tag in enumerate(tags) if tag and tag.hierarchy_covers
    }
    shown = {
        node: tuple(model.paths[module] for module in modules)
        for node, modules in model.columns["nodes"]["covers"].items()
    }
    assert covers
    assert shown == covers


def test_size_grows_with_the_graph(tmp_path: Path) -> None:
    from benchmarks.generated import write_graph

    sizes = {}
    for nodes in (2_000, 20_000):
        write_graph(tmp_path / "m.onnx", nodes)
        sizes[nodes] = modelexport.view(tmp_path / "m.onnx").size
    bundle = modelexport.view(
        export("conv_batch_norm", "fx", tmp_path)[0], tmp_path / "p.html"
    ).size
    assert sizes[20_000] - bundle < 12 * (sizes[2_000] - bundle)
    assert 5 * (sizes[20_000] - bundle) < 3_000_000
