"""The benchmarks measure what they say: their counts are repeated here, without clocks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import onnx
import pytest
from benchmarks import __main__ as command
from benchmarks.export_cost import sizes
from benchmarks.metadata import SCOPES, by_map, placed, survived, told, torch_says
from benchmarks.models import tower
from benchmarks.peers import cut_all
from benchmarks.rewriting import TOOLS
from benchmarks.table import Row, against, growth, line, page

import modelexport
from exports import export
from proof import onnx_values, pytorch_values

pytestmark = [pytest.mark.sanity, pytest.mark.filterwarnings("ignore")]

STRATEGIES = {"fx": "dynamo", "htp": "torchscript"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_torch_tells_is_real(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("bert", strategy, tmp_path)
    found = told(path, model, inputs)
    assert found.nodes == found.tagged == len(onnx.load(path, load_external_data=False).graph.node)
    assert 0.5 * found.nodes < found.named <= found.nodes
    assert found.same <= found.judged <= found.nodes
    assert found.placed_by_map == found.values > 30
    assert 0 < found.placed_by_torch <= found.values


def test_a_fused_node_is_where_the_map_and_torch_differ(tmp_path: Path) -> None:
    """The torchscript exporter names a convolution with a fused norm after the convolution."""
    path, model, inputs = export("resnet", "htp", tmp_path)
    found = told(path, model, inputs)
    assert found.placed_by_map == found.values > found.placed_by_torch
    assert found.same < found.judged


def test_a_wrong_map_places_fewer_values(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "htp", tmp_path)
    exported, values = modelexport.load(path), onnx_values(path, inputs)
    made = {
        module: [value for call in calls for value in call.given]
        for module, calls in pytorch_values(model, inputs).items()
    }
    right, owners = placed(exported, by_map(exported), made, values), by_map(exported)
    assert len(right) > 30
    assert placed(exported, [""] * len(owners), made, values) == {""}
    assert placed(exported, [None] * len(owners), made, values) == set()
    assert len(placed(exported, [*owners[1:], owners[0]], made, values)) < len(right)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/Cast", ""),
        ("/encoder/layer.0/fc/MatMul", "encoder.layer.0.fc"),
        ("/blocks/blocks.1/fc/MatMul", "blocks.1.fc"),
        ("/ln_1/Add", "ln"),
        ("/blocks/blocks.1_2/Add", "blocks.1"),
        ("/ln/Add/AddFusion", "ln"),
        ("/elsewhere/Add", None),
        ("Identity_30", None),
        ("", None),
    ],
)
def test_names_of_nodes_are_read_as_well_as_they_can_be(name: str, module: str | None) -> None:
    modules = {"", "encoder", "encoder.layer", "encoder.layer.0", "encoder.layer.0.fc", "ln"}
    modules |= {"blocks", "blocks.1", "blocks.1.fc"}
    assert torch_says(onnx.NodeProto(name=name), modules) == module


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_survives_is_counted_right(strategy: str, tmp_path: Path) -> None:
    path, *_ = export("bert", strategy, tmp_path)
    for name, tool in TOOLS.items():
        rewritten = tmp_path / "rewritten.onnx"
        tool(path, rewritten)
        nodes = onnx.load(rewritten, load_external_data=False).graph.node
        found = survived(path, rewritten)
        ours = sum(
            node.doc_string.startswith("{") and "hierarchy_module" in json.loads(node.doc_string)
            for node in nodes
        )
        theirs = sum(
            node.name.startswith("/")
            if strategy == "htp"
            else any(entry.key == SCOPES for entry in node.metadata_props)
            for node in nodes
        )
        assert (found.nodes, found.torch, found.doc_strings) == (len(nodes), theirs, ours), name
        assert ours <= found.with_sidecar <= len(nodes)
        if "save" in name:
            assert found.doc_strings == found.torch == found.nodes
            assert found.torch_moved == found.we_moved == 0


def test_a_stripped_file_tells_nothing_of_ours(tmp_path: Path) -> None:
    path, *_ = export("bert", "fx", tmp_path)
    modelexport.strip(path, tmp_path / "stripped.onnx")
    found = survived(path, tmp_path / "stripped.onnx")
    assert found.doc_strings == 0
    assert found.torch == found.with_sidecar == found.nodes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_module_is_cut_out(strategy: str, tmp_path: Path) -> None:
    cuts = cut_all(*export("bert", strategy, tmp_path))
    assert cuts.ours == cuts.modules > 30
    assert 0 < cuts.peers <= cuts.modules
    assert cuts.names > 1
    assert cuts.our_size > cuts.peer_size > 0


@pytest.mark.parametrize("exporter", STRATEGIES.values())
def test_sizes_are_those_of_the_files(exporter: str) -> None:
    found = sizes(*tower(8), exporter)
    assert found.clean == found.plain
    assert found.tagged > found.plain
    assert found.sidecar > 0


def test_one_table_with_a_command_in_every_row() -> None:
    rows = [
        against("a | b", "peer", 2.0, 1.0, 3.0),
        growth("c", "nodes", {1: 1.0, 2: 2.0}),
        Row("d", "", "e", "f"),
    ]
    assert [row.verdict for row in rows] == ["0.50, aim at most 3", "grows 2.00 times", "f"]
    table = [
        text
        for text in page((row, "python -m benchmarks x") for row in rows).splitlines()
        if text.startswith("|")
    ]
    assert len(table) == 2 + len(rows)
    assert (
        table[2]
        == "| a \\| b | peer 2.000 s | 1.000 s | 0.50, aim at most 3 | `python -m benchmarks x` |"
    )
    assert all(text.endswith("`python -m benchmarks x` |") for text in table[2:])
    assert "peer 2.000 s" in line(rows[0])


def test_every_part_has_rows() -> None:
    for name in (command.PARTS | command.ON_REQUEST).values():
        assert callable(importlib.import_module(f"benchmarks.{name}").rows)


def test_a_part_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nothing"])
    with pytest.raises(SystemExit, match="no part is called nothing"):
        command.main()
