"""select(): names by module are what other tools take."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import modelexport
from exports import export
from modelexport.cli.main import main
from modelexport.errors import ArgumentError
from modelexport.verification.runtime import ASSIGNMENT
from quantization.models import WIDTH, export_stack, export_unnamed_stack, stack
from retag.tools import apply
from zoo import ZOO

pytestmark = pytest.mark.integration


def names_of(path: Path, module: str) -> list[str]:
    """Return the names of the nodes below a module, straight from the tags."""
    return [
        node.name
        for node, tag in modelexport.load(path).items()
        if tag is not None and f"{tag.hierarchy_module}.".startswith(f"{module}.")
    ]


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_a_path_a_tag_and_a_glob_name_the_same_nodes(strategy: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", strategy, tmp_path)
    expected = names_of(path, "encoder.layer.0")
    tag = modelexport.load(path).modules["encoder.layer.0"].tag
    assert tag is not None
    assert expected
    assert modelexport.select(path, "encoder.layer.0") == expected
    assert modelexport.select(path, [tag]) == expected
    assert modelexport.select(path, "encoder.layer.[0]") == expected
    assert modelexport.select(path, "*.layer.?") == names_of(path, "encoder.layer")
    everything = [node.name for node in modelexport.load(path).graph.nodes]
    rest = modelexport.select(path, "encoder.layer.0", invert=True)
    assert sorted([*expected, *rest]) == sorted(everything)


def test_operators_values_and_initializers(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    graph = onnx.load(path, load_external_data=False).graph
    chosen = set(modelexport.select(path, "pooler"))
    nodes = [node for node in graph.node if node.name in chosen]
    stored = {tensor.name for tensor in graph.initializer}
    assert set(modelexport.select(path, "pooler", what="values")) == {
        name for node in nodes for name in node.output
    }
    read = {name for node in nodes for name in node.input} & stored
    assert set(modelexport.select(path, "pooler", what="initializers")) == read
    rest = modelexport.select(path, "pooler", what="initializers", invert=True)
    assert {*rest, *read} == stored
    assert read.isdisjoint(rest)
    kind = nodes[-1].op_type
    assert modelexport.select(path, "pooler", op_types=[kind]) == [
        node.name for node in nodes if node.op_type == kind
    ]
    elsewhere = modelexport.select(path, "pooler", op_types=["MatMul"], invert=True)
    assert {node.op_type for node in graph.node if node.name in elsewhere} == {"MatMul"}
    assert chosen.isdisjoint(elsewhere)


def test_calls_of_a_module_are_told_apart(tmp_path: Path) -> None:
    model, inputs = ZOO["block_three_times"]()
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, inputs, path, strategy="fx")
    modules = modelexport.load(path).modules
    thrice = next(name for name, record in modules.items() if record.calls == 3)
    calls = [modelexport.select(path, thrice, call=number) for number in range(3)]
    assert sorted(name for names in calls for name in names) == sorted(
        modelexport.select(path, thrice)
    )
    assert len(set(map(len, calls))) == 1
    with pytest.raises(modelexport.ArgumentError, match="there is no call 3"):
        modelexport.select(path, thrice, call=3)


def test_covering_finds_fused_nodes(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    assert apply("ort-extended", path, tmp_path / "fast.onnx", {})
    modelexport.retag(path, tmp_path / "fast.onnx", tmp_path / "tagged.onnx")
    file = modelexport.load(tmp_path / "tagged.onnx")
    node, module = next(
        (node.name, covered)
        for node, tag in file.items()
        if tag is not None
        for covered in tag.hierarchy_covers
        if covered and not f"{tag.hierarchy_module}.".startswith(f"{covered}.")
        and modelexport.select(file.path, covered, covering=True)
    )  # fmt: skip
    assert node in modelexport.select(file.path, module, covering=True)


def test_quantizers_take_the_names(tmp_path: Path) -> None:
    from onnxruntime import quantization

    path, _, _ = export("bert", "fx", tmp_path)
    kept = modelexport.select(path, "encoder.layer.1")
    target = tmp_path / "int8.onnx"
    quantization.quantize_dynamic(str(path), str(target), nodes_to_exclude=kept)
    left = {node.name for node in onnx.load(target).graph.node}
    assert set(kept) <= left
    assert not set(modelexport.select(path, "encoder.layer.0", op_types=["MatMul"])) <= left


def test_nodes_without_names_are_left_out(tmp_path: Path) -> None:
    path = export_unnamed_stack(tmp_path)
    assert modelexport.select(path, "head") == []
    assert modelexport.select(path, "head", what="values") != []


def test_what_people_get_wrong(tmp_path: Path) -> None:
    path = export_stack()
    for patterns, options, words in [
        ("blocs.2", {}, "near it: blocks"),
        ([], {}, "no pattern"),
        ("", {"invert": True}, "nothing is left"),
        ("head", {"op_types": ["Conv"]}, "its operators are"),
        ("head", {"what": "weights"}, "one of nodes, values, initializers"),
        ("blocks.*", {"call": 0}, "matches"),
    ]:
        with pytest.raises(modelexport.ArgumentError) as caught:
            modelexport.select(path, patterns, **options)  # type: ignore[arg-type]
        assert words in str(caught.value)
    wrong: object = 3
    with pytest.raises(modelexport.ArgumentTypeError):
        modelexport.select(path, wrong)  # type: ignore[arg-type]
    bare = tmp_path / "bare.onnx"
    modelexport.strip(path, bare)
    with pytest.raises(modelexport.FormatError, match="no tags"):
        modelexport.select(bare, "head")


def test_a_clean_file_is_read_by_its_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(stack(), torch.randn(2, WIDTH), path, strategy="htp", clean=True)
    assert modelexport.select(path, "head")


def annotations(path: Path) -> dict[str, str]:
    """Return the layer annotation of each node by its name."""
    return {
        node.name: entry.value
        for node in onnx.load(path, load_external_data=False).graph.node
        for entry in node.metadata_props
        if entry.key == "layer_ann"
    }


@pytest.mark.parametrize("strategy", ["fx", "htp"])
def test_layer_annotations_are_accepted_by_the_runtime(strategy: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", strategy, tmp_path)
    before = path.read_bytes()
    result = modelexport.annotate_layers(
        path, tmp_path / "placed.onnx", ["encoder", "encoder.layer.1"]
    )
    expected = dict.fromkeys(names_of(path, "encoder"), "encoder")
    expected |= dict.fromkeys(names_of(path, "encoder.layer.1"), "encoder.layer.1")
    assert annotations(result.onnx_path) == expected
    assert sum(result.layers.values()) == len(expected)
    assert path.read_bytes() == before
    assert modelexport.validate(result.onnx_path, check_consistency=True).valid
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(ASSIGNMENT, f"cpu({result.setting})")
    onnxruntime.InferenceSession(str(result.onnx_path), options, providers=["CPUExecutionProvider"])
    with pytest.raises(ArgumentError, match="has layer annotations already"):
        modelexport.annotate_layers(result.onnx_path, tmp_path / "again.onnx", "encoder")


@pytest.mark.parametrize("pattern", ["", "a(b", "encoder, pooler", "x=y"])
def test_a_pattern_that_cannot_be_an_annotation(pattern: str, tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    with pytest.raises(ArgumentError, match="cannot be a layer annotation"):
        modelexport.annotate_layers(path, tmp_path / "placed.onnx", pattern)
    assert not (tmp_path / "placed.onnx").exists()


def test_the_command_for_layer_annotations(tmp_path: Path) -> None:
    path, _, _ = export("bert", "fx", tmp_path)
    out = tmp_path / "placed.onnx"
    common = ["select", str(path), "pooler", "--format", "layer-annotations"]
    result = CliRunner().invoke(main, [*common, "--output-file", str(out)])
    assert result.exit_code == 0, result.output
    assert "cpu(=pooler)" in result.stdout
    assert set(annotations(out).values()) == {"pooler"}
    for wrong in (["--invert", "--output-file", str(tmp_path / "b.onnx")], []):
        result = CliRunner().invoke(main, [*common, *wrong])
        assert result.exit_code == 2
        assert "--output-file" in result.stderr
