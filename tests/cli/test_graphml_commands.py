"""export --with-graphml, export-graphml and import-onnx as people use them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

import modelexport
from graphml.drawing import Drawing
from graphml.handmade import HANDMADE, model, value
from modelexport.cli.main import main
from modelexport.errors import GraphmlWarning
from modelexport.verification import runtime

pytestmark = [pytest.mark.integration, pytest.mark.sanity]

FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (torch.randn(2, 6),)
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(FACTORY)
    return f"{tmp_path / 'models.py'}:make"


@pytest.fixture
def handmade(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(HANDMADE["bodies"]().SerializeToString())
    return path


def test_export_with_graphml(factory: str, tmp_path: Path) -> None:
    result = invoke("export", factory, tmp_path / "m.onnx", "--with-graphml")
    assert result.exit_code == 0, result.output
    assert (
        "graphml m_hierarchical_graph.graphml, data in m_hierarchical_graph.onnxdata"
        in result.stdout
    )
    assert (tmp_path / "m_hierarchical_graph.onnxdata").exists()
    back = invoke(
        "import-onnx",
        tmp_path / "m_hierarchical_graph.graphml",
        tmp_path / "back.onnx",
        "--validate",
    )
    assert back.exit_code == 0, back.output
    assert "topology: as recorded" in back.stdout
    assert "ONNX Runtime: loaded the model and ran it on zeros" in back.stdout
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


@pytest.mark.parametrize("mode", ["embedded", "reference"])
def test_export_to_a_named_graphml(mode: str, factory: str, tmp_path: Path) -> None:
    """Naming the file is asking for it."""
    options = ["--graphml-output", tmp_path / "here.graphml", "--graphml-parameters", mode]
    result = invoke("export", factory, tmp_path / "m.onnx", *options)
    assert result.exit_code == 0, result.output
    assert "graphml here.graphml\n" in result.stdout
    assert not list(tmp_path.glob("*.onnxdata"))
    assert not list(tmp_path.glob("*_hierarchical_graph*"))


def test_a_failing_graphml_does_not_cost_the_export(factory: str, tmp_path: Path) -> None:
    (tmp_path / "m_hierarchical_graph.onnxdata").mkdir()
    result = invoke("export", factory, tmp_path / "m.onnx", "--with-graphml")
    assert result.exit_code == 0, result.output
    assert "warning: the model is exported, but its GraphML could not be written:" in result.stderr
    assert "is a folder" in result.stderr
    assert modelexport.validate(tmp_path / "m.onnx", check_consistency=True).findings == ()
    assert not (tmp_path / "m_hierarchical_graph.graphml").exists()
    assert not list(tmp_path.glob(".modelexport-*"))


def test_any_failure_of_the_graphml_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from modelexport import staged_export

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(staged_export, "export_graphml", broken)
    with pytest.warns(GraphmlWarning, match="ZeroDivisionError: odd"):
        report = modelexport.export_model(
            torch.nn.Linear(3, 3), torch.randn(1, 3), tmp_path / "m.onnx", with_graphml=True
        )
    assert report.graphml_path is None
    assert report["summary"]["graphml_error"] == "ZeroDivisionError: odd"
    assert report["summary"]["success"] is True
    assert report.onnx_path.exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--graphml-output", "m.txt"], "does not end in .graphml"),
        (["--graphml-output", "missing/m.graphml"], "does not exist"),
        (["--with-graphml", "--graphml-parameters", "nowhere"], "nowhere"),
        (
            ["--graphml-output", "other/m.graphml", "--graphml-parameters", "reference"],
            "is not beside",
        ),
    ],
)
def test_a_wrong_flag_is_an_error(
    options: list[str], match: str, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    result = invoke("export", factory, "m.onnx", *options)
    assert result.exit_code == 2, result.output
    assert match in result.stderr
    assert not (tmp_path / "m.onnx").exists()


def test_export_graphml_says_what_it_wrote(handmade: Path) -> None:
    result = invoke("export-graphml", handmade)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert " ".join(" ".join(lines).split()).split(": ")[1].startswith("11 nodes in 0 modules, 2")
    assert lines[-1].startswith("  initializers in model_hierarchical_graph.onnxdata, ")
    assert max(map(len, lines[1:])) <= 80  # the path alone is longer
    assert result.stderr == ""


def test_an_import_says_what_was_changed(handmade: Path) -> None:
    graphml = modelexport.export_graphml(handmade).graphml
    drawing = Drawing(graphml)
    drawing.set(
        next(n for n in drawing.of_kind("operator") if drawing.texts(n)["operator"] == "Neg"),
        "operator",
        "Abs",
    )
    drawing.save()
    result = invoke("import-onnx", graphml, handmade.with_name("back.onnx"), "--validate")
    assert result.exit_code == 2, result.output
    assert f"Error: {graphml}: 'm' (n" in result.stderr
    assert "the operator changed: expected 'Neg', got 'Abs' (undo the change; " in result.stderr
    assert result.stdout == ""
    assert not handmade.with_name("back.onnx").exists()


def test_validate_tells_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    """An invalid model comes back as it is; --validate says so."""
    path = tmp_path / "model.onnx"
    broken = model([helper.make_node("Relu", ["x"], ["y"], axis=3)], [value("x")], [value("y")])
    path.write_bytes(broken.SerializeToString())
    graphml = modelexport.export_graphml(path).graphml
    result = invoke("import-onnx", graphml, tmp_path / "back.onnx", "--validate")
    assert result.exit_code == 1, result.output
    assert "checker: Unrecognized attribute: axis" in " ".join(result.stdout.split())
    assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def test_validate_without_onnx_runtime(handmade: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphml = modelexport.export_graphml(handmade).graphml
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    result = invoke("import-onnx", graphml, handmade.with_name("back.onnx"), "--validate")
    assert result.exit_code == 0, result.output
    assert "ONNX Runtime: not installed" in result.stdout


def sequence_model(folder: Path) -> Path:
    """Write a model whose input is no tensor."""
    path = folder / "sequence.onnx"
    sequence = helper.make_value_info(
        "s", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2]))
    )
    made = model(
        [helper.make_node("SequenceLength", ["s"], ["n"])],
        [sequence],
        [value("n", TensorProto.INT64, [])],
    )
    path.write_bytes(made.SerializeToString())
    return path


def test_validate_of_what_onnx_runtime_cannot_be_given(tmp_path: Path) -> None:
    """Inputs that are no tensors are not made up."""
    path = sequence_model(tmp_path)
    result = invoke(
        "import-onnx",
        modelexport.export_graphml(path).graphml,
        tmp_path / "back.onnx",
        "--validate",
    )
    assert result.exit_code == 0, result.output
    assert "loaded the model, did not run it: inputs that are not plain tensors" in " ".join(
        result.stdout.split()
    )


@pytest.mark.regression
def test_a_model_that_was_only_loaded_is_not_said_to_run(handmade: Path, tmp_path: Path) -> None:
    ran = runtime.run_on_zeros(handmade)
    assert ran is not None
    assert (ran.loads, ran.runs) == (True, True)
    path = sequence_model(tmp_path)
    loaded = runtime.run_on_zeros(path)
    assert loaded is not None
    assert (loaded.loads, loaded.runs) == (True, False)


def test_validate_of_a_loop_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On zeros, a sum never reaches its limit."""
    bool_, float_ = TensorProto.BOOL, TensorProto.FLOAT
    body = helper.make_graph(
        [
            helper.make_node("Add", ["sum", "x"], ["next"]),
            helper.make_node("Less", ["next", "limit"], ["again"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("go", bool_, []), value("sum", float_, [])],
        [value("again", bool_, []), value("next", float_, [])],
    )
    weights = [
        helper.make_tensor("limit", float_, [], [100.0]),
        helper.make_tensor("start", float_, [], [0.0]),
        helper.make_tensor("go_on", bool_, [], [True]),
    ]
    nodes = [helper.make_node("Loop", ["", "go_on", "start"], ["y"], body=body)]
    path = tmp_path / "model.onnx"
    made = model(nodes, [value("x", float_, [])], [value("y", float_, [])], weights)
    path.write_bytes(made.SerializeToString())
    monkeypatch.setattr(runtime, "_LONGEST_ZERO_RUN", 0.5)
    result = invoke(
        "import-onnx",
        modelexport.export_graphml(path).graphml,
        tmp_path / "back.onnx",
        "--validate",
    )
    assert result.exit_code == 0, result.output
    assert "loaded the model, could not run it on zeros" in " ".join(result.stdout.split())


def test_the_commands_do_not_load_torch(handmade: Path) -> None:
    code = (
        "import sys; from modelexport.cli.main import main\n"
        f"main(['export-graphml', {str(handmade)!r}], standalone_mode=False)\n"
        f"main(['import-onnx', {str(handmade.with_name('model_hierarchical_graph.graphml'))!r}, "
        f"{str(handmade.with_name('back.onnx'))!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert onnx.load(handmade.with_name("back.onnx")) == onnx.load(handmade)
