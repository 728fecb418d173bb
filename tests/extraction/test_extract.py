"""One extracted module: names, initializers, files, calls, control flow, and results."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import modelexport
from exports import export
from extraction.running import run, session
from modelexport.cli.main import main
from modelexport.errors import ArgumentError
from modelexport.extraction.extract import list_modules
from proof import onnx_values
from zoo import distinct

LAYER = "encoder.layer.0"


def test_a_tag_a_path_an_alias_and_a_glob_name_the_same_module(bert: Path) -> None:
    by_path = modelexport.extract(bert, LAYER)
    for name in (
        "/BertModel/BertEncoder/BertLayer.0",
        "/BertModel/BertEncoder/BertLayer.0/",
        "*ncoder.layer.0",
    ):
        assert modelexport.extract(bert, name).record == by_path.record
    assert by_path.record.module == LAYER
    assert by_path.record.tag == "/BertModel/BertEncoder/BertLayer.0"
    assert by_path.record.source == "model.onnx"


def test_the_root_is_the_model_itself(bert: Path) -> None:
    model, record = modelexport.extract(bert, "")
    whole = onnx.load(bert)
    assert [value.name for value in model.graph.input] == [
        value.name for value in whole.graph.input
    ]
    assert [value.name for value in model.graph.output] == [
        value.name for value in whole.graph.output
    ]
    assert [node.op_type for node in model.graph.node] == [
        node.op_type for node in whole.graph.node
    ]
    assert record.pulled_in == ()


def test_shapes_and_types_of_boundary_values(bert: Path) -> None:
    record = modelexport.extract(bert, LAYER).record
    hidden = record.inputs[0]
    assert (hidden.dtype, hidden.shape) == ("float", (1, 7, 16))
    assert all(
        None not in value.shape and value.dtype != "undefined"
        for value in (*record.inputs, *record.outputs)
    )


def test_only_the_needed_initializers_are_copied(tmp_path: Path) -> None:
    path, _, inputs = export("bert", "fx", tmp_path)
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "layer.onnx"
    modelexport.extract(path, LAYER, target)
    data = target.with_name("layer.onnx.data")
    proto = onnx.load(target, load_external_data=False)
    stored = sum(
        int(e.value) for t in proto.graph.initializer for e in t.external_data if e.key == "length"
    )
    assert stored <= data.stat().st_size <= stored + 64 * len(proto.graph.initializer)
    assert data.stat().st_size < path.with_name("model.onnx.data").stat().st_size / 2
    assert sorted(file.name for file in target.parent.iterdir()) == [
        "layer.onnx",
        "layer.onnx.data",
        "layer_hierarchy.json",
    ]
    shutil.rmtree(path.parent / "plain", ignore_errors=True)
    values = onnx_values(path, inputs)
    os.remove(path)
    os.remove(path.with_name("model.onnx.data"))
    given = run(target, values)  # it needs nothing of the whole
    assert all(np.allclose(value, values[name], atol=1e-4) for name, value in given.items())


@pytest.mark.parametrize("small", [1 << 30, 0])
def test_initializers_inside_the_file_stay_inside(
    small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the file is parsed with the data of its initializers or without."""
    monkeypatch.setattr("modelexport.extraction.extract.SMALL_FILE", small)
    path, _, inputs = export("bert", "htp", tmp_path)
    target = tmp_path / "layer.onnx"
    modelexport.extract(path, LAYER, target)
    assert not target.with_name("layer.onnx.data").exists()
    whole = {
        tensor.name: tensor.SerializeToString() for tensor in onnx.load(path).graph.initializer
    }
    for tensor in onnx.load(target).graph.initializer:
        assert tensor.SerializeToString() == whole[tensor.name]
    values = onnx_values(path, inputs)
    for found in (target, modelexport.extract(path, LAYER).model):
        assert all(
            np.allclose(value, values[name], atol=1e-4)
            for name, value in run(found, values).items()
        )


def test_the_bytes_are_those_that_protobuf_writes(bert: Path, tmp_path: Path) -> None:
    modelexport.extract(bert, LAYER, tmp_path / "layer.onnx")
    data = (tmp_path / "layer.onnx").read_bytes()
    assert onnx.ModelProto.FromString(data).SerializeToString() == data


def test_an_extracted_model_can_be_extracted_from(bert: Path, tmp_path: Path) -> None:
    modelexport.extract(bert, "encoder", tmp_path / "encoder.onnx")
    modelexport.extract(tmp_path / "encoder.onnx", LAYER, tmp_path / "layer.onnx")
    direct = modelexport.extract(bert, LAYER)
    again = modelexport.load(tmp_path / "layer.onnx")
    assert [node.key for node in again.graph.nodes] == [
        node.output[0] for node in direct.model.graph.node
    ]
    assert again.records is not None
    assert again.records.export.piece is not None
    assert again.records.export.piece.source == "encoder.onnx"
    assert modelexport.analyze(tmp_path / "layer.onnx").file.class_.endswith("BertLayer")


def test_the_list_is_in_the_order_of_the_model_and_can_be_narrowed(bert: Path) -> None:
    found = list_modules(bert)
    assert found[0].module == ""
    (one,) = list_modules(bert, LAYER)
    assert one == next(module for module in found if module.module == LAYER)
    assert one.class_.endswith("BertLayer")
    assert one.nodes == modelexport.load(bert).modules[LAYER].nodes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("encoder.layer.7", "near it: encoder.layer"),
        ("encoder.layr.0", "encoder.layer.0"),
        ("/BertModel/BertEncodr", "/BertModel/BertEncoder"),
        ("attention.self.dense", "near it: "),
        ("*.layer.*", "matches"),
        ("nothing*", "no module matches"),
    ],
)
def test_a_wrong_name_gets_the_closest_ones(bert: Path, name: str, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        modelexport.extract(bert, name, bert.with_name("piece.onnx"))
    assert said in str(error.value)
    assert not bert.with_name("piece.onnx").exists()


def test_a_module_without_nodes_says_why(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    status = {
        name: record.status
        for name, record in modelexport.load(path).modules.items()
        if not record.nodes
    }
    assert set(status.values()) == {"absorbed", "unused"}
    for name, word in status.items():
        with pytest.raises(ArgumentError, match=word) as error:
            modelexport.extract(path, name)
        assert "is the nearest module around it that has nodes" in str(error.value)


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_fused_module_says_which_module_has_its_operations(strategy: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, torch.rand(1, 3, 8, 8), path, strategy=strategy)
    with pytest.raises(ArgumentError, match="its operations are merged into nodes of 1") as error:
        modelexport.extract(path, "0")
    assert error.value.hint == "choose 1"
    assert modelexport.extract(path, "1").record.nodes == 1
    with pytest.raises(ArgumentError, match="its operations are merged into nodes of 1"):
        modelexport.select(path, "0")


def test_one_call_of_a_reused_block(tmp_path: Path) -> None:
    path, _, inputs = export("block_three_times", "fx", tmp_path)
    values = onnx_values(path, inputs)
    names = modelexport.load(path).modules["block"].results
    for call in range(3):
        extracted = modelexport.extract(path, "block", call=call)
        assert extracted.record.call == call
        assert [value.name for value in extracted.record.outputs] == [names[call][0]]
        assert np.allclose(
            run(extracted.model, values)[names[call][0] or ""], values[names[call][0] or ""]
        )
        inner = modelexport.extract(path, "block.fc", call=call)
        assert {n.output[0] for n in inner.model.graph.node} <= {
            n.output[0] for n in extracted.model.graph.node
        }
    for wrong in (3, -1):
        with pytest.raises(ArgumentError, match="ran 3 times"):
            modelexport.extract(path, "block", call=wrong)
    with pytest.raises(ArgumentError, match="ran once"):
        modelexport.extract(path, "", call=1)


class SharedInBranches(nn.Module):
    """The same module in both branches, where its values have equal names, and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.cond(y.sum() > 0, lambda v: self.fc(v), lambda v: self.fc(self.fc(v)), (y,))


def test_a_module_inside_subgraphs_and_outside_them(tmp_path: Path) -> None:
    model = distinct(SharedInBranches())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    modelexport.export_model(model, (x,), tmp_path / "m.onnx", strategy="fx")
    extracted = modelexport.extract(tmp_path / "m.onnx", "fc", tmp_path / "fc.onnx")
    assert modelexport.validate(tmp_path / "fc.onnx", check_consistency=True).findings == ()
    feeds = {value.name: x.numpy() for value in extracted.record.inputs}
    fc = model.get_submodule("fc")
    once, twice, thrice = (value.detach().numpy() for value in (fc(x), fc(fc(x)), fc(fc(fc(x)))))
    given = list(run(tmp_path / "fc.onnx", feeds).values())
    for expected in (once, twice, thrice):
        assert [np.allclose(value, expected, atol=1e-4) for value in given].count(True) == 1
    whole = modelexport.extract(tmp_path / "m.onnx", "")
    assert any(
        attribute.HasField("g") for node in whole.model.graph.node for attribute in node.attribute
    )


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_symbolic_sizes_stay_symbolic(strategy: str, tmp_path: Path) -> None:
    shapes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    path, _, _ = export("bert", strategy, tmp_path, dynamic_shapes=shapes)
    extracted = modelexport.extract(path, "embeddings", tmp_path / "piece.onnx")
    assert extracted.record.inputs[0].shape[0] in ("batch", "s0", "s1", "s77") or isinstance(
        extracted.record.inputs[0].shape[0], str
    )
    ready = session(tmp_path / "piece.onnx")
    assert any(isinstance(size, str) for value in ready.get_inputs() for size in value.shape)


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_result_that_the_exporter_removed_is_warned_of(strategy: str, tmp_path: Path) -> None:
    path, _, _ = export("cancelling_transposes", strategy, tmp_path)
    assert modelexport.load(path).modules["a"].results == ((None,),)
    with pytest.warns(
        modelexport.ExtractionWarning,
        match="lacks outputs that a returned: value 0 is not in the exported graph",
    ):
        modelexport.extract(path, "a")
    modelexport.extract(path, "")  # any other warning is an error
    result = CliRunner().invoke(main, ["extract", str(path), "a", str(tmp_path / "a.onnx")])
    assert result.exit_code == 0
    assert "value 0 is not in the exported graph" in result.stderr
    assert "not in the exported graph" not in result.stdout


class PassesOn(nn.Module):
    """Returns its input or its parameter beside what it computes."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.arange(4.0))
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x) * self.scale, self.scale if self.weight else x


class TakesBoth(nn.Module):
    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.both = PassesOn(weight)

    def forward(self, x: Tensor) -> Tensor:
        made, given = self.both(self.first(x))
        return made - given


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_result_that_is_an_input_counts_as_present(strategy: str, tmp_path: Path) -> None:
    modelexport.export_model(
        TakesBoth(weight=False), torch.ones(2, 4), tmp_path / "m.onnx", strategy=strategy
    )
    modelexport.extract(tmp_path / "m.onnx", "both")
    modelexport.export_model(
        TakesBoth(weight=True), torch.ones(2, 4), tmp_path / "m.onnx", strategy=strategy
    )
    with pytest.warns(modelexport.ExtractionWarning, match="value 1 is not in the exported graph"):
        modelexport.extract(tmp_path / "m.onnx", "both")


@pytest.mark.regression
@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_result_that_the_exporter_folded_is_not_missed(strategy: str, tmp_path: Path) -> None:
    """T5 passes the position bias from block to block; for a fixed length it is a constant."""
    path, _, _ = export("t5", strategy, tmp_path)
    for module in ("encoder.block.0", "encoder.block.1", "decoder.block.1"):
        modelexport.extract(path, module)  # a warning is an error


class GivesBack(nn.Module):
    """Returns a buffer that no node produces."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), self.constant


def test_an_initializer_that_is_an_output_is_in_the_partition(tmp_path: Path) -> None:
    modelexport.export_model(GivesBack(), (torch.ones(2, 4),), tmp_path / "m.onnx", strategy="fx")
    whole = modelexport.extract(tmp_path / "m.onnx", "").record
    given = [
        value.name
        for extracted in modelexport.partition(tmp_path / "m.onnx")
        for value in extracted.record.outputs
    ]
    assert set(given) == {value.name for value in whole.outputs}
