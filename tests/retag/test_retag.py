"""What retag() takes and refuses: kinds of files, inputs, functions, subgraphs, data files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import modelexport
from damage import everything, net
from exports import export
from modelexport.errors import ArgumentError, FileError, FormatError, NotDescendedError
from modelexport.modules.record import Method
from retag.tools import apply, hide_names
from zoo import distinct


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, inputs = net()
    path = tmp_path_factory.mktemp("original") / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="htp")
    return path


def optimized(path: Path, target: Path, tool: str = "ort-extended") -> Path:
    assert apply(tool, path, target, {})
    return target


def owners(path: Path) -> dict[str, str]:
    return {
        node.key: str(tag and tag.hierarchy_module) for node, tag in modelexport.load(path).items()
    }


def test_a_clean_file_with_its_sidecar_is_an_original(original: Path, tmp_path: Path) -> None:
    model, inputs = net()
    clean = tmp_path / "clean.onnx"
    modelexport.export_model(distinct(model), inputs, clean, strategy="htp", clean=True)
    changed = optimized(clean, tmp_path / "changed.onnx")
    first = modelexport.retag(clean, changed, tmp_path / "a.onnx")
    second = modelexport.retag(original, changed, tmp_path / "b.onnx")
    assert first.methods == second.methods
    assert owners(tmp_path / "a.onnx") == owners(tmp_path / "b.onnx")


def test_an_unchanged_file_keeps_its_map(original: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.onnx"
    copy.write_bytes(original.read_bytes())
    out = tmp_path / "out.onnx"
    modelexport.retag(original, copy, out)
    before, after = modelexport.load(original), modelexport.load(out)
    for (_, old), (_, new) in zip(before.items(), after.items(), strict=True):
        assert old is not None
        assert new is not None
        assert (old.hierarchy_module, old.hierarchy_method, old.hierarchy_tags) == (
            new.hierarchy_module,
            new.hierarchy_method,
            new.hierarchy_tags,
        )
    assert modelexport.strip(out, tmp_path / "back.onnx").read_bytes() == copy.read_bytes()


def test_a_retagged_file_can_be_retagged_again(original: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.onnx"
    modelexport.retag(original, optimized(original, tmp_path / "a.onnx", "ort-basic"), first)
    changed = optimized(first, tmp_path / "b.onnx", "float16")
    second = tmp_path / "second.onnx"
    modelexport.retag(first, changed, second)
    checks = modelexport.validate(second, check_consistency=True).checks
    assert (checks["tags"], checks["consistency"]) == ("passed", "passed")
    assert modelexport.strip(second, tmp_path / "c.onnx").read_bytes() == changed.read_bytes()


def test_without_running_nothing_heavy_is_imported(original: Path, tmp_path: Path) -> None:
    changed = optimized(original, tmp_path / "changed.onnx")
    code = (
        "import sys, modelexport as m; m.retag(*sys.argv[1:], run=False); "
        "print({'torch', 'onnxruntime', 'transformers'} & set(sys.modules))"
    )
    arguments = [str(original), str(changed), str(tmp_path / "out.onnx")]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_another_model_is_refused(original: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 7), nn.Softmax(-1)).eval()
    path = tmp_path / "other.onnx"
    modelexport.export_model(other, torch.rand(2, 4), path, strategy="htp")
    modelexport.strip(path, tmp_path / "stripped.onnx")
    before = everything(tmp_path)
    for run in (True, False):
        with pytest.raises(NotDescendedError, match=r"was not made from m\.onnx"):
            modelexport.retag(original, tmp_path / "stripped.onnx", tmp_path / "out.onnx", run=run)
    assert everything(tmp_path) == before


@pytest.mark.regression
def test_another_model_with_the_same_names_is_refused(tmp_path: Path) -> None:
    """dynamo gives the values of any model names such as `val_1` and `linear`."""
    paths = {}
    for name in ("bert", "llama"):
        (tmp_path / name).mkdir()
        paths[name], _, _ = export(name, "fx", tmp_path / name)
    for run in (True, False):
        with pytest.raises(NotDescendedError, match=r"was not made from model\.onnx"):
            modelexport.retag(paths["bert"], paths["llama"], tmp_path / "out.onnx", run=run)


@pytest.mark.regression
def test_another_batch_size_is_no_other_model(original: Path, tmp_path: Path) -> None:
    model = onnx.load(original)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value += 3
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "batch.onnx")
    modelexport.retag(original, tmp_path / "batch.onnx", tmp_path / "out.onnx", run=False)
    assert modelexport.load(tmp_path / "out.onnx").coverage == 1.0


def test_the_same_architecture_with_other_weights_is_refused(
    original: Path, tmp_path: Path
) -> None:
    model = onnx.load(original)
    random = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor)
            noise = random.standard_normal(array.shape).astype(np.float32) * 3
            tensor.CopyFrom(onnx.numpy_helper.from_array(noise, tensor.name))
    onnx.save(model, tmp_path / "trained.onnx")
    with pytest.raises(NotDescendedError, match="values with the same name"):
        modelexport.retag(original, tmp_path / "trained.onnx", tmp_path / "out.onnx")


def test_a_file_without_tags_is_no_original(original: Path, tmp_path: Path) -> None:
    stripped = modelexport.strip(original, tmp_path / "stripped.onnx")
    with pytest.raises(FormatError, match="has no tags"):
        modelexport.retag(stripped, original, tmp_path / "out.onnx")


def test_inputs_are_checked_before_anything_runs(original: Path, tmp_path: Path) -> None:
    changed = optimized(original, tmp_path / "changed.onnx")
    steps: list[str] = []
    for inputs, problem in (
        ({}, "no value for the input"),
        (tmp_path / "missing.npz", "cannot read"),
    ):
        with pytest.raises((ArgumentError, FileError), match=problem):
            modelexport.retag(
                original, changed, tmp_path / "out.onnx", inputs=inputs, on_step=steps.append
            )
    assert set(steps) == {"read the two files"}


@pytest.mark.regression
def test_a_changed_file_says_that_its_tags_are_not_all(original: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from modelexport.cli.main import main

    changed = optimized(original, tmp_path / "changed.onnx")
    before, after = modelexport.load(original), modelexport.load(changed)
    assert 0 < after.coverage < 1.0
    root = before.modules[""].nodes
    message = rf"nodes have a tag, and {root} had one at export: modelexport retag"
    with pytest.warns(modelexport.ExtractionWarning, match=message):
        modelexport.extract(changed, "head")
    shown = CliRunner().invoke(main, ["select", str(changed), "/", "--op", "Add"])
    assert "modelexport retag" in shown.stderr
    assert "modelexport retag" in CliRunner().invoke(main, ["analyze", str(changed)]).stdout
    assert "retag" not in CliRunner().invoke(main, ["analyze", str(original)]).stdout
    assert "retag" not in CliRunner().invoke(main, ["select", str(original), "/"]).stderr


@pytest.mark.parametrize("name", ["m.onnx", "changed.onnx"])
def test_no_input_is_overwritten(original: Path, tmp_path: Path, name: str) -> None:
    own = tmp_path / "m.onnx"
    own.write_bytes(original.read_bytes())
    changed = optimized(own, tmp_path / "changed.onnx")
    before = everything(tmp_path)
    with pytest.raises(ArgumentError, match="would overwrite the input"):
        modelexport.retag(own, changed, tmp_path / name)
    assert everything(tmp_path) == before


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    path, _, _ = export("encoder_layer", "fx", tmp_path, external_data=True)
    changed = tmp_path / "changed.onnx"
    changed.write_bytes(path.read_bytes())
    moved = tmp_path / "moved"
    moved.mkdir()
    changed = changed.rename(moved / "changed.onnx")
    with pytest.raises(FileError, match=r"model\.onnx\.data"):
        modelexport.retag(path, changed, tmp_path / "out.onnx", run=False)


def test_data_files_come_along_to_another_folder(tmp_path: Path) -> None:
    path, _, _ = export("encoder_layer", "fx", tmp_path, external_data=True)
    changed = tmp_path / "changed.onnx"
    modelexport.strip(path, changed)
    (tmp_path / "elsewhere").mkdir()
    report = modelexport.retag(path, changed, tmp_path / "elsewhere" / "out.onnx")
    assert [file.name for file in report.data_paths] == ["model.onnx.data"]
    assert modelexport.validate(report.onnx_path, check_consistency=True).valid


def test_nodes_in_subgraphs_keep_their_modules(tmp_path: Path) -> None:
    path, _, _ = export("conditional_bodies", "fx", tmp_path)
    before = modelexport.load(path)
    nested = {
        tag.hierarchy_module
        for node, tag in before.items()
        if node.enclosing >= 0 and tag is not None
    }
    assert nested
    for tool in ("onnxscript", "float16", "renamed"):
        changed, out = tmp_path / f"{tool}.onnx", tmp_path / "out.onnx"
        assert apply(tool, path, changed, {})
        modelexport.retag(path, changed, out)
        after = modelexport.load(out)
        assert None not in after.tags
        found = {
            tag.hierarchy_module
            for node, tag in after.items()
            if node.enclosing >= 0 and tag is not None
        }
        assert nested <= found, tool


def as_function(model: onnx.ModelProto, index: int, rename: bool) -> None:
    """Put a node into a local function, whose values may have other names than the node's."""
    node = model.graph.node[index]
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.doc_string = inner.name = ""
    if rename:
        inner.input[:] = [f"in{i}" for i in range(len(node.input))]
        inner.output[:] = [f"out{i}" for i in range(len(node.output))]
    function = helper.make_function(
        "local", f"F{index}", inner.input, inner.output, [inner], model.opset_import
    )
    call = helper.make_node(f"F{index}", node.input, node.output, domain="local")
    model.functions.append(function)
    node.CopyFrom(call)


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("rename", [True, False])
def test_nodes_in_functions_belong_to_the_caller(
    original: Path, tmp_path: Path, rename: bool, run: bool
) -> None:
    model = onnx.load(original)
    before = [tag.hierarchy_module for tag in modelexport.load(original).tags if tag is not None]
    count = len(model.graph.node)
    for index in range(count):
        as_function(model, index, rename)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, tmp_path / "changed.onnx")
    modelexport.retag(original, tmp_path / "changed.onnx", tmp_path / "out.onnx", run=run)
    after = [tag.hierarchy_module for tag in modelexport.load(tmp_path / "out.onnx").tags if tag]
    assert after == [*before, *before]


def test_nodes_reordered_and_renamed(tmp_path: Path) -> None:
    original, _, _ = export("bert", "htp", tmp_path)
    model = onnx.load(original)
    expected = {node.output[0]: index for index, node in enumerate(model.graph.node)}
    depth = depths(model)
    order = sorted(range(len(depth)), key=lambda i: (depth[i], -i))
    assert order != sorted(order)
    nodes = [model.graph.node[i] for i in order]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    names = [node.output[0] for node in model.graph.node]
    onnx.save(hide_names(model), tmp_path / "changed.onnx")
    modelexport.retag(original, tmp_path / "changed.onnx", tmp_path / "out.onnx")
    old, new = modelexport.load(original), modelexport.load(tmp_path / "out.onnx")
    for name, tag in zip(names, new.tags, strict=True):
        before = old.tags[expected[name]]
        assert tag is not None
        assert before is not None
        assert tag.hierarchy_module == before.hierarchy_module


def depths(model: onnx.ModelProto) -> list[int]:
    """Return the length of the longest path that ends in each node."""
    depth: dict[str, int] = {}
    for node in model.graph.node:
        own = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update(dict.fromkeys(node.output, own))
    return [depth[node.output[0]] for node in model.graph.node]


def test_dynamic_shapes(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    path, _, _ = export("two_module_lists", "fx", tmp_path, dynamic_shapes=({0: batch},))
    changed = optimized(path, tmp_path / "changed.onnx")
    report = modelexport.retag(path, changed, tmp_path / "out.onnx")
    assert report.compared == "inputs like the recorded ones"
    assert modelexport.validate(tmp_path / "out.onnx", check_consistency=True).valid


def test_a_fused_node_lists_the_modules_it_covers(tmp_path: Path) -> None:
    path, _, _ = export("resnet", "htp", tmp_path)
    changed = optimized(path, tmp_path / "changed.onnx", "ort-all")
    modelexport.retag(path, changed, tmp_path / "out.onnx")
    fused = [
        tag for _, tag in modelexport.load(tmp_path / "out.onnx").items() if tag.hierarchy_covers
    ]
    assert fused
    for tag in fused:
        assert tag.hierarchy_method in (Method.FUSION, Method.VALUE, Method.SCOPE)
        assert list(tag.hierarchy_covers) == sorted(tag.hierarchy_covers)
    covered = {tuple(path.rpartition(".")[2] for path in tag.hierarchy_covers) for tag in fused}
    assert ("activation", "convolution", "normalization") in covered


def test_modules_of_a_retagged_file_can_be_extracted_and_verified(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "fx", tmp_path)
    changed = optimized(path, tmp_path / "changed.onnx", "ort-all")
    out = tmp_path / "out.onnx"
    modelexport.retag(path, changed, out)
    layer = modelexport.extract(out, "encoder.layer.0", tmp_path / "layer.onnx")
    assert layer.record.outputs
    onnx.checker.check_model(str(tmp_path / "layer.onnx"))
    result = modelexport.verify(model, inputs, out)
    assert result.agrees
    assert set(result.outcomes) <= {"agrees", "absorbed"}
    assert result.modules_compared > 30


def test_verification_blames_the_quantized_module_that_hurts(tmp_path: Path) -> None:
    path, model, inputs = export("bert", "fx", tmp_path)
    changed, out = tmp_path / "changed.onnx", tmp_path / "out.onnx"
    assert apply("int8-dynamic", path, changed, {})
    modelexport.retag(path, changed, out)
    guilty = "encoder.layer.1.intermediate.dense"
    (weight,) = (
        name
        for node, tag in modelexport.load(out).items()
        if tag is not None and tag.hierarchy_module == guilty
        for name in node.inputs
        if name.endswith("_quantized") and node.op_type == "MatMulInteger"
        if name in modelexport.load(out).graph.initializers
    )
    proto = onnx.load(changed)
    (tensor,) = (tensor for tensor in proto.graph.initializer if tensor.name == weight)
    array = np.roll(onnx.numpy_helper.to_array(tensor), 1, axis=0)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, weight))
    onnx.save(proto, changed)
    modelexport.retag(path, changed, out)
    result = modelexport.verify(model, inputs, out, atol=0.05, rtol=0.05)
    assert result.causes[0] == guilty
