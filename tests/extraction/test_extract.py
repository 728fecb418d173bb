"""One extracted module: names, initializers, files, calls, control flow, and errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import modelexport
from exports import export
from extraction.running import run, session
from modelexport.cli.main import main
from modelexport.errors import ArgumentError, FileError, FormatError, ModelExportError
from modelexport.extraction.extract import list_modules
from modelexport.modules.record import NodeTag
from modelexport.tagged.records import encode_tag
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


def hand_made(
    body: list[onnx.NodeProto], functions: list[onnx.FunctionProto] | None = None
) -> onnx.ModelProto:
    for number, node in enumerate(body):
        path, node.name = node.name, f"{node.name}_{number}"
        tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", path)
        node.doc_string = encode_tag(tag).decode()
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    graph = helper.make_graph(body, "main", [x], [y], [weight])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=functions or [], ir_version=10)


def test_a_protobuf_with_nothing_but_tags(tmp_path: Path) -> None:
    model = hand_made(
        [
            helper.make_node("Add", ["x", "w"], ["a"], name="first"),
            helper.make_node("Relu", ["a"], ["b"], name="second"),
            helper.make_node("Mul", ["b", "w"], ["y"], name="second"),
        ]
    )
    extracted = modelexport.extract(model, "second", tmp_path / "second.onnx")
    assert [value.name for value in extracted.record.inputs] == ["a"]
    assert [value.shape for value in extracted.record.inputs] == [(2, 3)]
    onnx.checker.check_model(str(tmp_path / "second.onnx"), full_check=True)
    session(tmp_path / "second.onnx")


def test_functions_that_nodes_call_are_copied() -> None:
    twice = helper.make_function(
        "own",
        "Twice",
        ["v"],
        ["r"],
        [helper.make_node("Add", ["v", "v"], ["r"])],
        [helper.make_opsetid("", 18)],
    )
    other = helper.make_function(
        "own",
        "Other",
        ["v"],
        ["r"],
        [helper.make_node("Neg", ["v"], ["r"])],
        [helper.make_opsetid("", 18)],
    )
    model = hand_made(
        [
            helper.make_node("Other", ["x"], ["a"], domain="own", name="first"),
            helper.make_node("Twice", ["a"], ["y"], domain="own", name="second"),
        ],
        [twice, other],
    )
    extracted = modelexport.extract(model, "second").model
    assert [function.name for function in extracted.functions] == ["Twice"]
    onnx.checker.check_model(extracted, full_check=True)
    assert np.allclose(run(extracted, {"a": np.ones((2, 3), np.float32)})["y"], 2)


@pytest.mark.regression
def test_both_overloads_of_a_function_are_copied() -> None:
    imports = [helper.make_opsetid("", 18)]
    twice = helper.make_function(
        "own",
        "Act",
        ["v"],
        ["r"],
        [helper.make_node("Add", ["v", "v"], ["r"])],
        imports,
        overload="twice",
    )
    minus = helper.make_function(
        "own",
        "Act",
        ["v"],
        ["r"],
        [helper.make_node("Neg", ["v"], ["r"])],
        imports,
        overload="minus",
    )
    model = hand_made(
        [
            helper.make_node("Relu", ["x"], ["a"], name="first"),
            helper.make_node("Act", ["a"], ["b"], domain="own", overload="twice", name="second"),
            helper.make_node("Act", ["b"], ["c"], domain="own", overload="minus", name="second"),
            helper.make_node("Act", ["c"], ["y"], domain="own", overload="minus", name="third"),
        ],
        [twice, minus],
    )
    extracted = modelexport.extract(model, "second").model
    assert [function.overload for function in extracted.functions] == ["twice", "minus"]
    onnx.checker.check_model(extracted, full_check=True)
    assert np.allclose(run(extracted, {"a": np.ones((2, 3), np.float32)})["c"], -2)
    only = modelexport.extract(model, "third").model
    assert [function.overload for function in only.functions] == ["minus"]
    assert np.allclose(run(only, {"c": np.ones((2, 3), np.float32)})["y"], -1)


def test_a_random_value_is_not_copied_as_a_constant() -> None:
    model = hand_made(
        [
            helper.make_node("RandomUniform", [], ["r"], shape=[2, 3], name="noise"),
            helper.make_node("Constant", [], ["c"], value_float=2.0, name="other"),
            helper.make_node("Mul", ["r", "c"], ["s"], name="part"),
            helper.make_node("Add", ["s", "x"], ["y"], name="part"),
        ]
    )
    record = modelexport.extract(model, "part").record
    assert [value.name for value in record.inputs] == ["x", "r"] or [
        v.name for v in record.inputs
    ] == ["r", "x"]
    assert record.pulled_in == ("c",)


def test_sizes_at_fixed_shapes_become_constants() -> None:
    model = hand_made(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0], name="other"),
            helper.make_node("Shape", ["t"], ["s"], name="other"),
            helper.make_node("Reshape", ["x", "s"], ["r"], name="part"),
            helper.make_node("Transpose", ["r"], ["y"], perm=[1, 0], name="part"),
        ]
    )
    extracted = modelexport.extract(model, "part")
    assert [value.name for value in extracted.record.inputs] == ["x"]
    assert extracted.record.pulled_in == ("s",)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(run(extracted.model, {"x": x})["y"], x.reshape(3, 2).T)


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


def test_tags_only_in_the_sidecar(tmp_path: Path) -> None:
    path, _, _ = export("bert", "htp", tmp_path, clean=True)
    extracted = modelexport.extract(path, LAYER, tmp_path / "layer.onnx")
    assert extracted.record.nodes == modelexport.load(path).modules[LAYER].nodes
    assert modelexport.validate(tmp_path / "layer.onnx", check_consistency=True).findings == ()
    path.with_name("model_hierarchy.json").unlink()
    with pytest.raises(FormatError, match="no tags"):
        modelexport.extract(path, LAYER)


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


def test_a_file_without_records(bert: Path) -> None:
    """Tags alone are enough to extract."""
    expected = modelexport.extract(bert, LAYER)
    bert.with_name("model_hierarchy.json").unlink()
    proto = onnx.load(bert, load_external_data=False)
    del proto.metadata_props[:]
    bert.write_bytes(proto.SerializeToString())
    extracted = modelexport.extract(bert, LAYER, bert.with_name("layer.onnx"))
    assert {n.output[0] for n in extracted.model.graph.node} == {
        n.output[0] for n in expected.model.graph.node
    }
    assert not bert.with_name("layer_hierarchy.json").exists()
    with pytest.raises(ArgumentError, match="near it"):
        modelexport.extract(bert, "encoder.layer.9")


def test_the_source_is_never_overwritten(bert: Path) -> None:
    before = bert.read_bytes()
    with pytest.raises(ArgumentError, match="overwrite"):
        modelexport.extract(bert, LAYER, bert)
    assert bert.read_bytes() == before


def test_bad_files_and_folders(bert: Path, tmp_path: Path) -> None:
    for output in (tmp_path / "missing" / "p.onnx", tmp_path / "p.txt", tmp_path):
        with pytest.raises(ModelExportError):
            modelexport.extract(bert, LAYER, output)
    (tmp_path / "cut.onnx").write_bytes(bert.read_bytes()[:-100])
    with pytest.raises(FormatError):
        modelexport.extract(tmp_path / "cut.onnx", LAYER)
    with pytest.raises(FileError):
        modelexport.extract(tmp_path / "none.onnx", LAYER)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_data_file_that_is_not_whole(harm: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    data = path.with_name("model.onnx.data")
    if harm == "missing":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 3])
    before = sorted(tmp_path.iterdir())
    with pytest.raises((FileError, FormatError), match=r"model\.onnx\.data"):
        modelexport.extract(path, "encoder.layer.1", tmp_path / "layer.onnx")
    assert sorted(tmp_path.iterdir()) == before


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


def branch(weight: float) -> onnx.GraphProto:
    """Build a branch with a nested If, with the same names as the other branch."""
    out = helper.make_tensor_value_info("v", TensorProto.FLOAT, [2, 3])
    end = helper.make_tensor_value_info("q", TensorProto.FLOAT, [2, 3])
    inner = [
        helper.make_graph([helper.make_node(op, ["t"], ["q"])], op, [], [end])
        for op in ("Abs", "Neg")
    ]
    nodes = [
        helper.make_node("Mul", ["a", "s"], ["t"]),
        helper.make_node("If", ["c"], ["v"], then_branch=inner[0], else_branch=inner[1]),
    ]
    scale = numpy_helper.from_array(np.array(weight, np.float32), "s")
    return helper.make_graph(nodes, "branch", [], [out], [scale])


def test_names_that_repeat_in_both_branches_and_inside_them() -> None:
    body = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("ReduceSum", ["a"], ["r"], keepdims=0, name="other"),
        helper.make_node("Cast", ["r"], ["c"], to=TensorProto.BOOL, name="other"),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(5), name="other"
        ),
    ]
    model = hand_made(body)
    for attribute in model.graph.node[3].attribute:
        for node in attribute.g.node:
            inner = [node for held in node.attribute for node in held.g.node]
            for number, found in enumerate((node, *inner)):
                module = "part.scale" if node.op_type == "Mul" else "part.end" if number else ""
                tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", module)
                found.doc_string = encode_tag(tag).decode()
    extracted = modelexport.extract(model, "part")
    onnx.checker.check_model(extracted.model, full_check=True)
    x = np.ones((2, 3), np.float32)
    given = sorted({float(value.flat[0]) for value in run(extracted.model, {"a": x}).values()})
    assert given == [-5, -2, 2, 5], "a branch reads what is in the other"


def annotate(graph: onnx.GraphProto, tensor: str, scale: str) -> None:
    note = graph.quantization_annotation.add(tensor_name=tensor)
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)


def annotations(graph: onnx.GraphProto) -> dict[str, str]:
    return {
        note.tensor_name: note.quant_parameter_tensor_names[0].value
        for note in graph.quantization_annotation
    }


@pytest.mark.regression
def test_quantization_annotations_name_tensors_of_the_extracted_model() -> None:
    """Values of both branches have equal names; those of one are renamed with their scales."""
    body = [
        helper.make_node("ReduceSum", ["x"], ["r"], keepdims=0, name="other"),
        helper.make_node("Cast", ["r"], ["c"], to=TensorProto.BOOL, name="other"),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch(2), else_branch=branch(5), name="other"
        ),
    ]
    model = hand_made(body)
    model.graph.input[0].name = "a"
    model.graph.node[0].input[0] = "a"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(7), "unread"))
    annotate(model.graph, "a", "unread")
    annotate(model.graph, "r", "w")
    for attribute in model.graph.node[2].attribute:
        weight = numpy_helper.to_array(attribute.g.initializer[0])
        attribute.g.initializer.append(numpy_helper.from_array(np.float32(10 * weight), "t_scale"))
        annotate(attribute.g, "t", "t_scale")
        tag = NodeTag(("/Net/Part",), "/Net/Part", 1, "scope", "part")
        attribute.g.node[0].doc_string = encode_tag(tag).decode()
    extracted = modelexport.extract(model, "part").model
    onnx.checker.check_model(extracted, full_check=True)
    found = annotations(extracted.graph)
    scales = {
        tensor.name: float(numpy_helper.to_array(tensor)) for tensor in extracted.graph.initializer
    }
    made = {node.output[0]: scales[node.input[1]] for node in extracted.graph.node}
    assert set(found) == {"a", *made}  # `r` is not in it
    assert found["a"] == "unread"
    assert {made[name]: scales[scale] for name, scale in found.items() if name != "a"} == {
        2: 20,
        5: 50,
    }
    run(extracted, {"a": np.ones((2, 3), np.float32)})


def test_calls_without_records(tmp_path: Path) -> None:
    path, _, _ = export("block_three_times", "htp", tmp_path)
    proto = onnx.load(path)
    del proto.metadata_props[:]
    assert [
        modelexport.extract(proto, "block.fc", call=call).record.nodes for call in range(3)
    ] == [1, 1, 1]
    with pytest.raises(ArgumentError, match="records of the export are lost"):
        modelexport.extract(proto, "block", call=0)


def test_a_sidecar_of_another_graph_is_not_used(tmp_path: Path) -> None:
    export("bert", "htp", tmp_path, clean=True)
    other, _, _ = export(
        "distilbert", "htp", tmp_path.joinpath("other").mkdir() or tmp_path / "other", clean=True
    )
    shutil.copy(other, tmp_path / "model.onnx")
    with pytest.raises(FormatError, match="it is of another graph"):
        modelexport.extract(tmp_path / "model.onnx", LAYER)


def test_tags_that_another_tool_dropped_are_in_the_sidecar(bert: Path) -> None:
    nodes = modelexport.extract(bert, LAYER).record.nodes
    proto = onnx.load(bert, load_external_data=False)
    for node in proto.graph.node:
        node.ClearField("doc_string")
    bert.write_bytes(proto.SerializeToString())
    assert modelexport.extract(bert, LAYER).record.nodes == nodes


def test_a_file_whose_nodes_are_not_sorted(bert: Path) -> None:
    expected = modelexport.extract(bert, LAYER)
    proto = onnx.load(bert, load_external_data=False)
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    bert.write_bytes(proto.SerializeToString())
    extracted = modelexport.extract(bert, LAYER)
    assert {v.name for v in extracted.record.inputs} == {v.name for v in expected.record.inputs}
    onnx.checker.check_model(extracted.model, full_check=True)


def test_files_of_an_earlier_extracted_model_are_removed(bert: Path, tmp_path: Path) -> None:
    target = tmp_path / "piece.onnx"
    modelexport.extract(bert, LAYER, target)
    target.with_name("piece.onnx.data").write_bytes(b"old")
    modelexport.extract(bert, "encoder.layer.0.intermediate.intermediate_act_fn", target)
    assert not target.with_name("piece.onnx.data").exists()


@pytest.mark.regression
@pytest.mark.parametrize("size", [-2, (1 << 63) - 1])
def test_impossible_sizes(size: int, bert: Path) -> None:
    """Nothing is inferred from them, and nothing of that size is allocated."""
    model = onnx.load(bert)
    for value in (*model.graph.input, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = size
    for weight in model.graph.initializer:
        weight.data_type, weight.dims[:] = -(1 << 31), [size, 0]
    with contextlib.suppress(FormatError):
        modelexport.extract(model, LAYER)


@pytest.mark.regression
def test_a_value_with_two_producers(bert: Path) -> None:
    model = onnx.load(bert)
    model.graph.node.add().CopyFrom(model.graph.node[-1])
    extracted, record = modelexport.extract(model, "")
    assert record.nodes == len(extracted.graph.node) == len(model.graph.node)


@pytest.mark.regression
def test_an_unknown_status(bert: Path) -> None:
    model = onnx.load(bert)
    entry = next(entry for entry in model.metadata_props if entry.key == "modelexport.hierarchy")
    entry.value = entry.value.replace('"status":"absorbed"', '"status":"gone"').replace(
        '"unused"', '"gone"'
    )
    gone = next(
        path
        for path, record in json.loads(entry.value)["modules"].items()
        if record["status"] == "gone"
    )
    with pytest.raises(ArgumentError, match="has no nodes: its nodes are not in the file"):
        modelexport.extract(model, gone)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    path, _, _ = export("one_leaf_root", "htp", tmp_path)
    data = bytearray(path.read_bytes())
    for place in range(40, len(data) - 40, 11):
        broken = bytearray(data)
        broken[place] = 0xFF
        path.write_bytes(broken)
        try:
            modelexport.extract(path, "")
        except ModelExportError:
            continue
