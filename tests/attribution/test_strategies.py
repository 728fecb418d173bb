"""Strategies and their registry, calls of reused modules, and the status of each module."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import modelexport
from modelexport.attribution import strategies
from modelexport.attribution.evidence import Evidence, Facts, by_parameter
from modelexport.capture.trace import Site, Trace
from modelexport.errors import ArgumentError, ExportError
from modelexport.graph.flat import flatten
from modelexport.modules.tree import ModuleInfo, ModuleTree
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity
BOTH = pytest.mark.parametrize("strategy", ["fx", "htp"])


def export(name: str, strategy: str, folder: Path, **options: object) -> modelexport.TaggedModel:
    model, inputs = ZOO[name]()
    report = modelexport.export_model(
        distinct(model), inputs, folder / "m.onnx", strategy=strategy, **options
    )
    return modelexport.load(report.onnx_path)


@BOTH
def test_each_call_of_a_block_is_numbered(strategy: str, tmp_path: Path) -> None:
    exported = export("block_three_times", strategy, tmp_path)
    assert exported.modules["block"].calls == 3
    calls: dict[str, Counter[int | None]] = {}
    for tag in exported.tags:
        assert tag is not None
        calls.setdefault(tag.hierarchy_module, Counter())[tag.hierarchy_call] += 1
    for path in ("block", "block.fc", "block.norm"):
        assert set(calls[path]) == {0, 1, 2}, path
    assert set(calls["head"]) == {None}


@BOTH
def test_two_calls_of_ln_beside_ln_1(strategy: str, tmp_path: Path) -> None:
    exported = export("ln_twice_beside_ln_1", strategy, tmp_path)
    norms = [tag for node, tag in exported.items() if node.op_type == "LayerNormalization"]
    found = [(tag.hierarchy_module, tag.hierarchy_call) for tag in norms if tag is not None]
    assert found == [("ln", 0), ("ln", 1), ("ln_1", None)]


@BOTH
def test_status_of_modules(strategy: str, tmp_path: Path) -> None:
    modules = export("folded_module", strategy, tmp_path).modules
    assert modules["fc"].status == "nodes"
    assert modules["coder"].status == "absorbed"
    assert modules["unused"].status == "unused"
    assert modules["unused"].calls == 0
    assert modules[""].nodes == sum(modules[path].nodes for path in ("fc", "coder")) + 1
    weight_only = export("child_only_by_weight", strategy, tmp_path).modules
    assert weight_only["child"].status == "unused"
    lists = export("two_module_lists", strategy, tmp_path).modules
    assert lists["down"].status == "nodes", "a container goes by what it contains"
    assert lists["down"].calls == 0


@BOTH
def test_a_fused_convolution_is_absorbed_by_the_norm(strategy: str, tmp_path: Path) -> None:
    modules = export("conv_batch_norm", strategy, tmp_path).modules
    if modules["0.conv"].status == "absorbed":
        assert modules["0.bn"].status == "nodes"
    else:
        assert strategy == "fx"
        assert modules["0.bn"].status == "nodes"


def test_nodes_in_conditional_subgraphs_are_tagged(tmp_path: Path) -> None:
    exported = export("conditional_bodies", "fx", tmp_path)
    inside = {node.key: tag for node, tag in exported.items() if node.enclosing >= 0}
    assert inside
    modules = {tag.hierarchy_module for tag in inside.values() if tag is not None}
    assert {"yes.fc", "yes.norm", "no.fc", "no.norm"} <= modules
    assert exported.modules["yes.act"].status in ("nodes", "absorbed")
    assert all("/then_branch/" in key or "/else_branch/" in key for key in inside)
    assert exported.sidecar is not None
    assert set(inside) <= set(exported.sidecar.nodes)


def test_auto_falls_back_with_a_warning(tmp_path: Path) -> None:
    class OnlyTraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * (1.0 if float(x.sum()) > 1e9 else 2.0)

    with pytest.warns(modelexport.FallbackWarning) as caught:
        report = modelexport.export_model(OnlyTraceable(), (torch.ones(1, 4),), tmp_path / "m.onnx")
    (message,) = (str(one.message) for one in caught)
    assert message == report.fallback_message
    assert "\n" not in message
    assert report.fallback_reason
    assert report.fallback_reason in message
    assert "branches and loops" in message
    assert 'strategy="fx"' in message
    assert "--no-fallback" in message
    assert (report.requested, report.strategy, report.exporter) == ("auto", "htp", "torchscript")
    assert report.fallback_reason
    assert report.hierarchy.export.fallback_reason == report.fallback_reason
    assert report["summary"]["final_strategy"] == "htp"
    assert report.coverage == 1.0
    with pytest.warns(modelexport.FallbackWarning) as caught:
        modelexport.HierarchyExporter().export(
            OnlyTraceable(), (torch.ones(1, 4),), tmp_path / "n.onnx"
        )
    assert caught[0].filename == __file__


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x * 2 if x.sum() > 0 else x
        return x.reshape(int(x.shape[0]), -1)


@pytest.mark.regression
def test_each_tracer_warning_is_noted_once(tmp_path: Path) -> None:
    report = modelexport.export_model(
        Decides(), torch.ones(1, 4), tmp_path / "m.onnx", strategy="htp", with_report=True
    )
    line = inspect.getsourcelines(Decides.forward)[1] + 2
    assert report.notes[0] == (
        f"attribution/test_strategies.py:{line}: "
        "Converting a tensor to a Python boolean might cause the trace to be incorrect"
    )
    assert len(set(report.notes)) == len(report.notes) == 2
    assert report["summary"]["notes"] == list(report.notes)
    assert report.report_path is not None
    assert f"test_strategies.py:{line}" in report.report_path.read_text()
    plain = modelexport.export_model(
        nn.Linear(4, 4), torch.ones(1, 4), tmp_path / "n.onnx", strategy="htp"
    )
    assert plain.notes == ()


@pytest.mark.regression
def test_without_a_fallback_only_dynamo_is_tried(tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        modelexport.export_model(Decides(), torch.ones(1, 4), tmp_path / "m.onnx", fallback=False)
    assert caught.value.details[0].startswith("  dynamo: ")
    assert not any("torchscript" in line for line in caught.value.details)
    assert list(tmp_path.iterdir()) == []


def test_exporter_overrides_the_strategy(tmp_path: Path) -> None:
    model, inputs = ZOO["two_module_lists"]()
    report = modelexport.export_model(
        model, inputs, tmp_path / "m.onnx", strategy="fx", exporter="torchscript"
    )
    assert (report.strategy, report.exporter, report.coverage) == ("fx", "torchscript", 1.0)


def test_usage_based_leaves_the_uncertain_out(tmp_path: Path) -> None:
    certain = export("split_outputs", "usage_based", tmp_path)
    full = export("split_outputs", "htp", tmp_path)
    assert certain.coverage <= full.coverage == 1.0
    assert any(tag and tag.hierarchy_method == "parameter" for tag in certain.tags)


def test_a_registered_strategy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
    everything_root = Evidence(
        "mine", lambda facts, settled: {i: Site("") for i in range(len(facts.graph.nodes))}
    )
    modelexport.register_strategy(modelexport.Strategy("rooted", "torchscript", (everything_root,)))
    exported = export("two_module_lists", "rooted", tmp_path)
    assert {tag.hierarchy_method for tag in exported.tags if tag} == {"mine"}
    with pytest.raises(ArgumentError, match="exists already"):
        modelexport.register_strategy(modelexport.Strategy("rooted", "dynamo", ()))
    with pytest.raises(ArgumentError, match="exporter"):
        modelexport.register_strategy(modelexport.Strategy("other", "abacus", ()))


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "from_a_package"

        def load(self) -> modelexport.Strategy:
            return modelexport.Strategy("from_a_package", "dynamo", strategies.FULL_CHAIN)

    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
    monkeypatch.setattr(
        strategies,
        "entry_points",
        lambda group: [Point()] if group == strategies.ENTRY_POINTS else [],
    )
    assert strategies.find_strategy("from_a_package").exporter == "dynamo"


def test_a_broken_package_is_reported_only_when_its_strategy_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Point:
        name = "broken"

        def load(self) -> modelexport.Strategy:
            raise ImportError("no such module")

    monkeypatch.setattr(strategies, "entry_points", lambda group: [Point()])
    with pytest.raises(
        ArgumentError,
        match="'broken' of an installed package cannot be loaded: ImportError: no such",
    ):
        strategies.find_strategy("broken")
    with pytest.raises(
        ArgumentError, match=r"no strategy 'absent' \(known: auto, fx, htp, usage_based, broken\)"
    ):
        strategies.find_strategy("absent")


def test_usage_based_gives_nothing_to_a_module_that_did_not_run(tmp_path: Path) -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.lender.weight).relu()

    report = modelexport.export_model(
        Borrows(), torch.ones(1, 4), tmp_path / "m.onnx", strategy="usage_based"
    )
    assert report.hierarchy.modules["lender"].status == "unused"
    assert {record.module for record in report.hierarchy.nodes.values()} == {""}


def test_recommendation_has_a_reason() -> None:
    name, reason = modelexport.recommend_strategy(nn.Linear(2, 2))
    assert (name, bool(reason)) == ("fx", True)
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    name, reason = modelexport.recommend_strategy(scripted)
    assert name == "htp"
    assert "torch.jit" in reason


def test_a_compiled_model_exports_with_the_recommended_strategy(tmp_path: Path) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)))
    strategy, _ = modelexport.recommend_strategy(model)
    report = modelexport.export_model(
        model, torch.ones(1, 4), tmp_path / "m.onnx", strategy=strategy
    )
    assert report.coverage == 1.0
    assert report.hierarchy.modules["2"].status == "nodes"


@pytest.mark.regression
def test_the_nearer_module_has_the_deeper_common_ancestor_not_the_longer_name() -> None:
    """Two norms have equal parameters, of which the exporter keeps one initializer."""
    paths = ["", "a_module_with_a_long_name", "s", "s.t"]
    names = {
        path: tuple(other.rpartition(".")[2] for other in paths if other and parent(other) == path)
        for path in paths
    }
    tree = ModuleTree(
        {
            path: ModuleInfo(
                path,
                "m.M",
                (*names[path], *(("fc", "norm") if path in LEAVES_IN else ())),
                (),
                (),
                (),
            )
            for path in paths
        }
        | {f"{path}.fc": ModuleInfo(f"{path}.fc", "m.M", (), (), (), ()) for path in LEAVES_IN}
        | {
            f"{path}.norm": ModuleInfo(f"{path}.norm", "m.M", (), ("weight",), (), ())
            for path in LEAVES_IN
        },
        {f"{path}.norm.weight": (4,) for path in LEAVES_IN},
    )
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["a"]),
        onnx.helper.make_node("Mul", ["a", "s.t.norm.weight"], ["b"]),
        onnx.helper.make_node("Relu", ["b"], ["c"]),
    ]
    weight = onnx.helper.make_tensor("s.t.norm.weight", onnx.TensorProto.FLOAT, [4], [1.0] * 4)
    graph = flatten(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [], [weight])))
    settled = {0: Site("a_module_with_a_long_name.fc"), 2: Site("s.t.fc")}
    assert by_parameter(Facts(graph, tree, Trace()), settled) == {1: Site("s.t.norm")}


LEAVES_IN = ("a_module_with_a_long_name", "s.t")


def parent(path: str) -> str:
    return path.rpartition(".")[0]
