"""The benchmarks measure what they say: their counts are repeated here, without clocks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import onnx
import pytest
from benchmarks import __main__ as command
from benchmarks.export_cost import measure_sizes
from benchmarks.metadata import (
    SCOPES,
    count_metadata,
    count_survivors,
    modules_with_results,
    owners_by_map,
    torch_module,
)
from benchmarks.models import tower
from benchmarks.peers import extract_all
from benchmarks.retagging import count_ways
from benchmarks.rewriting import TOOLS
from benchmarks.shares import import_row, profile_row
from benchmarks.table import Row, format_line, format_page, growth_row, ratio_row

import modelexport
from exports import EXPORTER, export
from proof import onnx_values, pytorch_values
from retag.oracles import example_values
from retag.tools import apply

pytestmark = [pytest.mark.sanity, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("strategy", EXPORTER)
def test_counts_of_metadata_are_plausible(strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export("bert", strategy, tmp_path)
    counts = count_metadata(path, model, inputs)
    assert (
        counts.nodes == counts.tagged == len(onnx.load(path, load_external_data=False).graph.node)
    )
    assert 0.5 * counts.nodes < counts.named <= counts.nodes
    assert counts.same <= counts.judged <= counts.nodes
    assert counts.located_by_map == counts.modules > 30
    assert 0 < counts.located_by_torch <= counts.modules


def test_a_fused_node_is_where_the_map_and_torch_differ(tmp_path: Path) -> None:
    """The torchscript exporter names a convolution with a fused norm after the convolution."""
    path, model, inputs = export("resnet", "htp", tmp_path)
    counts = count_metadata(path, model, inputs)
    assert counts.located_by_map == counts.modules > counts.located_by_torch
    assert counts.same < counts.judged


def test_a_wrong_map_locates_fewer_results(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "htp", tmp_path)
    exported, values = modelexport.load(path), onnx_values(path, inputs)
    results = {
        module: [value for call in calls for value in call.given]
        for module, calls in pytorch_values(model, inputs).items()
    }
    right, owners = (
        modules_with_results(exported, owners_by_map(exported), results, values),
        owners_by_map(exported),
    )
    assert len(right) > 30
    assert modules_with_results(exported, [""] * len(owners), results, values) == {""}
    assert modules_with_results(exported, [None] * len(owners), results, values) == set()
    assert len(modules_with_results(exported, [*owners[1:], owners[0]], results, values)) < len(
        right
    )


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
def test_modules_are_read_from_names_of_nodes(name: str, module: str | None) -> None:
    modules = {"", "encoder", "encoder.layer", "encoder.layer.0", "encoder.layer.0.fc", "ln"}
    modules |= {"blocks", "blocks.1", "blocks.1.fc"}
    assert torch_module(onnx.NodeProto(name=name), modules) == module


@pytest.mark.parametrize("strategy", EXPORTER)
def test_survivors_are_counted_right(strategy: str, tmp_path: Path) -> None:
    path, *_ = export("bert", strategy, tmp_path)
    for name, tool in TOOLS.items():
        rewritten = tmp_path / "rewritten.onnx"
        tool(path, rewritten)
        nodes = onnx.load(rewritten, load_external_data=False).graph.node
        counts = count_survivors(path, rewritten)
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
        assert (counts.nodes, counts.torch, counts.doc_strings) == (len(nodes), theirs, ours), name
        assert ours <= counts.with_sidecar <= len(nodes)
        if "save" in name:
            assert counts.doc_strings == counts.torch == counts.nodes
            assert counts.torch_moved == counts.we_moved == 0


def test_a_stripped_file_has_no_doc_strings(tmp_path: Path) -> None:
    path, *_ = export("bert", "fx", tmp_path)
    modelexport.strip(path, tmp_path / "stripped.onnx")
    counts = count_survivors(path, tmp_path / "stripped.onnx")
    assert counts.doc_strings == 0
    assert counts.torch == counts.with_sidecar == counts.nodes


@pytest.mark.parametrize("strategy", EXPORTER)
def test_every_module_is_extracted(strategy: str, tmp_path: Path) -> None:
    counts = extract_all(*export("bert", strategy, tmp_path))
    assert counts.ours == counts.modules > 30
    assert 0 < counts.peers <= counts.modules
    assert counts.names > 1
    assert counts.our_size > counts.peer_size > 0


@pytest.mark.parametrize("exporter", EXPORTER.values())
def test_sizes_are_those_of_the_files(exporter: str) -> None:
    counts = measure_sizes(*tower(8), exporter)
    assert counts.clean == counts.plain
    assert counts.tagged > counts.plain
    assert counts.sidecar > 0


def test_one_table_with_a_command_in_every_row() -> None:
    rows = [
        ratio_row("a | b", "peer", [2.0, 4.0], [1.0, 3.0], 3.0),
        ratio_row("once", "peer", [2.0], [0.1], typical=max),
        growth_row("c", "nodes", {1: 1.0, 2: 2.0}, 1.5),
        Row("d", "", "e", "f"),
    ]
    assert [row.verdict for row in rows] == [
        "0.50 (0.50 to 0.75), aim at most 3",
        "0.05",
        "grows 2.00 times, aim at most 1.5: missed",
        "f",
    ]
    table = [
        text
        for text in format_page((row, "python -m benchmarks x") for row in rows).splitlines()
        if text.startswith("|")
    ]
    assert len(table) == 2 + len(rows)
    assert (
        table[2] == "| a \\| b | peer 2.000 s | 1.000 s | 0.50 (0.50 to 0.75), aim at most 3 "
        "| `python -m benchmarks x` |"
    )
    assert all(text.endswith("`python -m benchmarks x` |") for text in table[2:])
    assert "peer 2.000 s" in format_line(rows[0])


def test_shares_of_a_profile_name_files_and_packages(tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path)
    files = profile_row("analyze", lambda: modelexport.analyze(path)).ours.split(", ")
    packages = import_row("start", ("-c", "import modelexport.options")).ours.split(", ")
    for parts, expected in ((files, "analysis/analyze"), (packages, "modelexport")):
        named = (part.removesuffix("%").rsplit(" ", 1) for part in parts)
        shares = {name: int(share) for name, share in named}
        assert shares[expected] > 0
        assert 50 < sum(shares.values()) <= 102, "rounded"


def test_timed_functions_exist() -> None:
    scaling = importlib.import_module("benchmarks.scaling")
    for owner, names in scaling.CAPTURE:
        assert all(callable(getattr(owner, name, None)) for name in names), owner


def test_retag_knows_more_than_names(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "fx", tmp_path)
    matched, others = example_values(path, model, inputs, "fx")
    changed = tmp_path / "changed.onnx"
    assert apply("ort-all", path, changed, matched)
    doc_string, names, ours = count_ways(path, changed, matched, others).values()
    assert doc_string.known < names.known < ours.known == ours.nodes
    assert ours.wrong == 0


def test_other_rows_of_the_page_are_kept() -> None:
    rows = [(Row("a", "b", "c", "d"), "python -m benchmarks one")]
    rows += [(Row("e", "f", "g", "h"), "python -m benchmarks two")]
    page = format_page(rows)
    again = format_page([(Row("i", "j", "k", "l"), "python -m benchmarks one")], page)
    assert "| a |" not in again
    assert again.index("| e | f | g | h |") < again.index("| i | j | k | l |")


def test_every_part_has_rows() -> None:
    for name in (command.PARTS | command.ON_REQUEST).values():
        assert callable(importlib.import_module(f"benchmarks.{name}").rows)


def test_a_part_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nothing"])
    with pytest.raises(SystemExit, match="no part is called nothing"):
        command.main()
