"""Counts of `analyze`, for whole files and for selections."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import numpy_helper
from torch import nn

import modelexport
from damage import edit
from modelexport.analysis.analyze import Analysis, analyze
from modelexport.cli.main import main
from modelexport.tagged.records import encode_embedded, encode_sidecar, sidecar_path, tags_digest
from modelexport.tagged.tables import embedded_map
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity


@pytest.mark.smoke
def test_the_counts_are_those_of_the_file(exported: Path) -> None:
    result = analyze(exported)
    loaded = modelexport.load(exported)
    proto = onnx.load(exported)
    tags = [tag for tag in loaded.tags if tag is not None]
    assert result.totals.nodes == len(proto.graph.node) == len(result.nodes)
    assert result.totals.coverage == 1.0
    assert result.by_operator == Counter(node.op_type for node in proto.graph.node)
    assert result.by_tag == Counter(tag.hierarchy_path for tag in tags)
    assert result.by_method == Counter(tag.hierarchy_method for tag in tags)
    assert result.by_depth == Counter(tag.hierarchy_path.count("/") for tag in tags)
    assert sum(module.own_nodes for module in result.modules) == result.totals.nodes
    elements = sum(int(np.prod(tensor.dims)) for tensor in proto.graph.initializer)
    assert result.totals.stored_values == elements
    assert result.totals.bytes == sum(
        numpy_helper.to_array(tensor).nbytes for tensor in proto.graph.initializer
    )
    assert sum(node.stored_values for node in result.nodes) == elements
    for module in result.modules:
        assert module.nodes == loaded.modules[module.module].nodes == sum(module.operators.values())
        assert module.status == loaded.modules[module.module].status
    assert result.absorbed == tuple(m.module for m in result.modules if m.status == "absorbed")


def test_weights_belong_to_the_modules_that_read_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    modelexport.export_model(model, torch.ones(1, 4), tmp_path / "m.onnx", strategy="htp")
    found = {module.module: module for module in analyze(tmp_path / "m.onnx").modules}
    assert found["0"].stored_values == found["0"].own_stored_values == 4 * 8 + 8
    assert found["2"].bytes == 4 * (8 * 2 + 2)
    assert found[""].stored_values == found["0"].stored_values + found["2"].stored_values
    assert found[""].own_stored_values == 0


def test_borders(exported: Path) -> None:
    """The values that enter and leave a module are those of `extract_module_subgraph`."""
    for module in analyze(exported).modules:
        part = (
            modelexport.extract_module_subgraph(exported, None, module.module)
            if module.nodes
            else None
        )
        if part is not None:
            assert set(module.inputs) == set(part.external_inputs)
            assert len(module.outputs) >= len(part.boundary_operations) or module.module == ""


@pytest.mark.parametrize("kind", ["path", "tag", "tag/", "glob", "glob of paths"])
def test_the_ways_to_choose_a_module(exported: Path, kind: str) -> None:
    whole = analyze(exported)
    module = next(m for m in whole.modules if m.module and m.tag and m.nodes > m.own_nodes)
    text = {
        "path": module.module,
        "tag": module.tag,
        "tag/": f"{module.tag}/",
        "glob": f"{module.tag}*",
        "glob of paths": f"{module.module}*",
    }[kind]
    part = analyze(exported, text)
    assert {node.node for node in part.nodes} == {
        node.node for node in whole.nodes if (node.tag or "").startswith(module.tag or "")
    }
    assert part.totals.nodes == module.nodes
    assert part.filter == text
    assert part.file == whole.file


def test_a_tag_does_not_match_its_longer_brother(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4)) for _ in range(11)))
    modelexport.export_model(
        distinct(model), torch.randn(1, 4), tmp_path / "m.onnx", strategy="htp", include="*"
    )
    tags = list(analyze(tmp_path / "m.onnx").by_tag)
    one = next(tag for tag in tags if tag.count("/") == 3 and ".1/" in tag)
    assert list(analyze(tmp_path / "m.onnx", one.rpartition("/")[0]).by_tag) == [one]


def test_brackets_in_a_name_are_no_glob(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.register_module("a[0]", nn.LayerNorm(4))
    modelexport.export_model(model, torch.randn(1, 4), tmp_path / "m.onnx", strategy="htp")
    tag = next(tag for tag in analyze(tmp_path / "m.onnx").by_tag if "LayerNorm" in tag)
    for text in (tag, "a[0]"):
        assert analyze(tmp_path / "m.onnx", text).totals.nodes > 0


def test_auxiliary_nodes(tmp_path: Path) -> None:
    for name in ("conditional_bodies", "encoder_layer", "lstm"):
        model, inputs = ZOO[name]()
        modelexport.export_model(model, inputs, tmp_path / "m.onnx")
        part = analyze(tmp_path / "m.onnx", "auxiliary")
        assert part.totals.nodes == analyze(tmp_path / "m.onnx").totals.auxiliary_nodes
        assert {node.method for node in part.nodes} <= {"dataflow", "root"}


def test_no_match_is_an_answer(exported: Path) -> None:
    result = analyze(exported, "/Net/encodr")
    assert result.totals.nodes == 0
    assert result.modules == result.nodes == ()
    assert "/Net/Encoder" in result.suggestions
    assert analyze(exported).suggestions == ()


def test_untagged_files_are_shown_as_far_as_they_go(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    plain = modelexport.strip(exported, tmp_path / "other" / "plain.onnx")
    result = analyze(plain)
    assert not result.file.tagged
    assert result.totals.nodes == analyze(exported).totals.nodes
    assert result.by_operator == analyze(exported).by_operator
    assert result.modules == ()
    assert analyze(plain, "anything").totals.nodes == 0


def test_a_clean_export_is_read_through_its_sidecar(tmp_path: Path) -> None:
    model, inputs = ZOO["encoder_layer"]()
    modelexport.export_model(distinct(model), inputs, tmp_path / "m.onnx", strategy="htp")
    tagged = analyze(tmp_path / "m.onnx")
    modelexport.export_model(model, inputs, tmp_path / "m.onnx", strategy="htp", clean=True)
    clean = analyze(tmp_path / "m.onnx")
    assert clean.file.map_source == "sidecar"
    assert clean.modules == tagged.modules
    assert clean.nodes == tagged.nodes


class Tied(nn.Module):
    """A parameter and a module with two names each, a norm, and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.norms = nn.ModuleList([self.norm, nn.LayerNorm(4)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(24.0).reshape(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x) + self.table[x]
        for norm in self.norms:
            y = norm(y)
        return self.head(y)


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_parameters_are_those_of_pytorch(strategy: str, tmp_path: Path) -> None:
    """Tied parameters count once, merged ones count, constants do not."""
    model = Tied()
    modelexport.export_model(model, torch.tensor([1, 2]), tmp_path / "m.onnx", strategy=strategy)
    result = analyze(tmp_path / "m.onnx")
    assert result.file.parameters_from == "export"
    for module in result.modules:
        live = model.get_submodule(module.module)
        assert module.parameters == sum(p.numel() for p in live.parameters()), module.module
    assert result.totals.parameters == sum(p.numel() for p in model.parameters())
    assert result.totals.stored_values != result.totals.parameters
    assert (
        analyze(tmp_path / "m.onnx", "norms").totals.parameters == 16
    )  # one of them goes by its other name
    assert analyze(tmp_path / "m.onnx", "head").totals.parameters == 24
    modelexport.extract(tmp_path / "m.onnx", "head", tmp_path / "head.onnx")
    assert analyze(tmp_path / "head.onnx").totals.parameters == 24


@pytest.mark.regression
def test_a_program_counts_parameters_too(tmp_path: Path) -> None:
    model = Tied()
    program = torch.export.export(model, (torch.tensor([1, 2]),))
    modelexport.export_model(program, None, tmp_path / "m.onnx")
    assert analyze(tmp_path / "m.onnx").totals.parameters == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.regression
def test_a_file_that_does_not_record_its_parameters(exported: Path) -> None:
    """Stored values are counted, the result says so, and the file stays valid."""
    model = modelexport.load(exported)
    assert model.sidecar is not None
    old = {
        path: msgspec.structs.replace(record, parameter_count=msgspec.UNSET)
        for path, record in model.sidecar.modules.items()
    }
    sidecar = msgspec.structs.replace(model.sidecar, modules=old)
    sidecar_path(exported).write_bytes(encode_sidecar(sidecar))
    embedded = embedded_map(
        sidecar, tags_digest([node.key for node in model.graph.nodes], model.tags)
    )
    entry = encode_embedded(embedded)
    assert "parameter_count" not in entry

    def damage(proto: onnx.ModelProto) -> None:
        proto.metadata_props[-1].value = entry

    edit(exported, damage)
    assert modelexport.validate(exported, check_consistency=True).findings == ()
    result = analyze(exported)
    assert result.file.parameters_from == "stored"
    assert result.totals.parameters == result.totals.stored_values
    assert all(module.parameters == module.stored_values for module in result.modules)
    shown = CliRunner().invoke(main, ["analyze", str(exported)]).output
    assert "stored values" in shown
    assert "PyTorch's parameters are not recorded" in shown


def test_json_and_csv_are_complete(exported: Path) -> None:
    result = analyze(exported)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Analysis) == result
    content = json.loads(msgspec.json.encode(result))
    assert content["format"] == "modelexport-analysis/1"
    shown = CliRunner().invoke(main, ["analyze", str(exported), "--output-format", "csv"])
    rows = list(csv.DictReader(io.StringIO(shown.stdout)))
    assert Counter(row["kind"] for row in rows) == {
        "module": len(result.modules),
        "node": len(result.nodes),
    }
    nodes = [row for row in rows if row["kind"] == "node"]
    assert [row["node"] for row in nodes] == [node.node for node in result.nodes]
    assert sum(int(row["bytes"]) for row in nodes) == result.totals.bytes
    modules = {row["module"]: row for row in rows if row["kind"] == "module"}
    assert {path: int(row["nodes"]) for path, row in modules.items()} == {
        m.module: m.nodes for m in result.modules
    }


def test_without_details_the_counts_are_the_same(exported: Path) -> None:
    short, full = analyze(exported, details=False), analyze(exported)
    assert short.totals == full.totals
    assert short.by_tag == full.by_tag
    assert short.nodes == ()
