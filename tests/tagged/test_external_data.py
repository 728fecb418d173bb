"""Models whose initializers are in data files: every reader finds them, or says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import modelexport
from modelexport.cli.main import main
from modelexport.errors import ArgumentError, FileError, FormatError

pytestmark = pytest.mark.sanity
MISSING = "m.onnx.data is missing: initializers of m.onnx are in it"


def with_weights_outside(path: Path) -> modelexport.ExportReport:
    """Export initializers that are large enough for the exporter to write a data file."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return modelexport.export_model(model, torch.ones(1, 64), path, strategy="fx")


def test_strip_copies_the_data_along(tmp_path: Path) -> None:
    report = with_weights_outside(tmp_path / "m.onnx")
    (tmp_path / "other").mkdir()
    stripped = modelexport.strip(report.onnx_path, tmp_path / "other" / "base.onnx")
    assert {path.name for path in stripped.parent.iterdir()} == {"base.onnx", "m.onnx.data"}
    onnx.checker.check_model(str(stripped), full_check=True)
    report.data_paths[0].unlink()
    (tmp_path / "third").mkdir()
    with pytest.raises(FileError, match=MISSING):
        modelexport.strip(report.onnx_path, tmp_path / "third" / "base.onnx")
    assert list((tmp_path / "third").iterdir()) == []


@pytest.mark.regression
@pytest.mark.parametrize("command", ["strip", "functions", "retag"])
def test_the_data_file_of_another_model_is_not_replaced(command: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with_weights_outside(tmp_path / name / "m.onnx")
    original, changed = tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"
    write = {
        "strip": lambda out: modelexport.strip(changed, out),
        "functions": lambda out: modelexport.to_functions(changed, out),
        "retag": lambda out: modelexport.retag(original, changed, out, run=False),
    }[command]
    before = original.with_name("m.onnx.data").read_bytes()
    for _ in ("new", "there already"):
        with pytest.raises(FileError, match=r"m\.onnx\.data already exists, with other data"):
            write(tmp_path / "a" / "out.onnx")
        assert original.with_name("m.onnx.data").read_bytes() == before
        # What the replaced model refers to is not its own, if the original refers to it, too.
        if command == "retag":
            (tmp_path / "a" / "out.onnx").write_bytes(original.read_bytes())
    (tmp_path / "c").mkdir()
    for _ in ("new", "again"):
        write(tmp_path / "c" / "out.onnx")
        with_weights_outside(changed)
        if command == "retag":
            changed.with_name("m.onnx.data").write_bytes(before)


@pytest.mark.regression
@pytest.mark.parametrize("link", ["none", "symbolic", "hard"])
def test_strip_refuses_to_overwrite_its_input(link: str, tmp_path: Path) -> None:
    path = with_weights_outside(tmp_path / "m.onnx").onnx_path
    target = path if link == "none" else tmp_path / "link.onnx"
    if link == "symbolic":
        target.symlink_to(path)
    elif link == "hard":
        target.hardlink_to(path)
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=rf"output {target.name} would overwrite the input"):
        modelexport.strip(path, target)
    assert path.read_bytes() == before
    assert target.exists()


@pytest.mark.regression
def test_strip_refuses_to_overwrite_the_data_of_its_input(tmp_path: Path) -> None:
    path, data = tmp_path / "m.onnx", tmp_path / "data.onnx"
    proto = onnx.load(with_weights_outside(path).onnx_path)
    onnx.save_model(proto, path, save_as_external_data=True, location=data.name)
    before = data.read_bytes()
    with pytest.raises(ArgumentError, match=r"output data\.onnx would overwrite the input"):
        modelexport.strip(path, data)
    assert data.read_bytes() == before
    (tmp_path / "other").mkdir()
    with pytest.raises(ArgumentError, match=r"has the name of a data file of m\.onnx"):
        modelexport.strip(path, tmp_path / "other" / "data.onnx")
    assert CliRunner().invoke(main, ["strip", str(path), str(path)]).exit_code == 2


def test_strip_refuses_data_outside_the_folder(tmp_path: Path) -> None:
    report = with_weights_outside(tmp_path / "m.onnx")
    proto = onnx.load(report.onnx_path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../../secret"
    (tmp_path / "evil.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "other").mkdir()
    with pytest.raises(FormatError, match="outside"):
        modelexport.strip(tmp_path / "evil.onnx", tmp_path / "other" / "x.onnx")


READERS: dict[str, Callable[[Path, Path], object]] = {
    "analyze": lambda model, folder: modelexport.analyze(model),
    "compare": lambda model, folder: modelexport.compare(model, model),
    "extract": lambda model, folder: modelexport.extract(model, "0", folder / "part.onnx"),
    "export_graphml": lambda model, folder: modelexport.export_graphml(model, folder / "m.graphml"),
    "strip": lambda model, folder: modelexport.strip(model, folder / "base.onnx"),
}


def verified(model: Path, folder: Path) -> object:
    live = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return modelexport.verify(live, torch.ones(1, 64), model)


@pytest.mark.regression
@pytest.mark.parametrize("reader", [*READERS, "verify"])
def test_a_data_file_that_is_missing(reader: str, tmp_path: Path) -> None:
    """Every reader that needs the data reports the same error; the others work without it."""
    read = {**READERS, "verify": verified}[reader]
    report = with_weights_outside(tmp_path / "m.onnx")
    report.data_paths[0].unlink()
    before = sorted(tmp_path.iterdir())
    if reader == "analyze":
        read(report.onnx_path, tmp_path)
        return
    with pytest.raises(FileError) as caught:
        read(report.onnx_path, tmp_path)
    assert caught.value.message == MISSING
    assert caught.value.hint == "put it back into the folder of m.onnx"
    assert sorted(tmp_path.iterdir()) == before


def with_weights_below(folder: Path) -> Path:
    """Export a model, and move its data file into a folder below it."""
    path = with_weights_outside(folder / "m.onnx").onnx_path
    (folder / "weights").mkdir()
    (folder / "m.onnx.data").rename(folder / "weights" / "w.bin")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "weights/w.bin"
    path.write_bytes(proto.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    return path


@pytest.mark.regression
@pytest.mark.parametrize("reader", [*READERS, "verify"])
def test_a_data_file_in_a_folder_below(reader: str, tmp_path: Path) -> None:
    source, outputs = tmp_path / "source", tmp_path / "outputs"
    for folder in (source, outputs):
        folder.mkdir()
    path = with_weights_below(source)
    {**READERS, "verify": verified}[reader](path, outputs)
    if reader == "strip":
        assert (outputs / "weights" / "w.bin").read_bytes() == (
            source / "weights" / "w.bin"
        ).read_bytes()
        onnx.checker.check_model(str(outputs / "base.onnx"), full_check=True)
    if reader == "extract":
        assert {file.name for file in outputs.iterdir()} == {
            "part.onnx",
            "part.onnx.data",
            "part_hierarchy.json",
        }


@pytest.mark.regression
@pytest.mark.parametrize("mode", ["sidecar", "embedded", "reference"])
def test_graphml_of_a_data_file_in_a_folder_below(mode: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    path = with_weights_below(tmp_path / "source")
    graphml = modelexport.export_graphml(path, parameters=mode).graphml
    (tmp_path / "back").mkdir()
    imported = modelexport.import_onnx(graphml, tmp_path / "back" / "m.onnx")
    assert imported.onnx.read_bytes() == path.read_bytes()
    assert imported.data == (tmp_path / "back" / "weights" / "w.bin",)
    assert imported.data[0].read_bytes() == (path.parent / "weights" / "w.bin").read_bytes()


@pytest.mark.regression
def test_repair_with_a_data_file_in_a_folder_below(tmp_path: Path) -> None:
    path = with_weights_below(tmp_path)
    before = path.read_bytes()
    proto = onnx.load(path, load_external_data=False)
    proto.graph.node[0].ClearField("doc_string")
    path.write_bytes(proto.SerializeToString())
    assert modelexport.validate(path, repair=True).findings == ()
    assert path.read_bytes() == before


@pytest.mark.regression
def test_a_folder_below_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    for name in ("source", "outputs", "elsewhere"):
        (tmp_path / name).mkdir()
    path = with_weights_below(tmp_path / "source")
    (tmp_path / "outputs" / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="would lie outside"):
        modelexport.strip(path, tmp_path / "outputs" / "base.onnx")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "source" / "weights" / "w.bin").rename(tmp_path / "elsewhere" / "w.bin")
    (tmp_path / "source" / "weights").rmdir()
    (tmp_path / "source" / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=r"'weights/w\.bin' lies outside"):
        modelexport.compare(path, path)


@pytest.mark.parametrize("reader", READERS)
def test_a_data_file_that_is_a_link(reader: str, tmp_path: Path) -> None:
    """It may lead elsewhere only with the model: in the Hugging Face cache both are links."""
    blobs, models, outputs = (tmp_path / name for name in ("blobs", "models", "outputs"))
    for folder in (blobs, models, outputs):
        folder.mkdir()
    report = with_weights_outside(models / "m.onnx")
    report.data_paths[0].rename(blobs / "d")
    report.data_paths[0].symlink_to(blobs / "d")
    with pytest.raises(FormatError, match=r"'m\.onnx\.data' lies outside"):
        READERS[reader](models / "m.onnx", outputs)
    assert list(outputs.iterdir()) == []
    report.onnx_path.rename(blobs / "m")
    report.onnx_path.symlink_to(blobs / "m")
    READERS[reader](models / "m.onnx", outputs)


@pytest.mark.parametrize("where", ["main graph", "subgraph"])
@pytest.mark.parametrize("kind", ["initializer", "t", "tensors", "none"])
def test_data_files_are_found_wherever_a_tensor_is(kind: str, where: str, tmp_path: Path) -> None:
    """A tensor may be an initializer or an attribute, `t` or `tensors`, of any graph."""
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    graph = onnx.GraphProto(name="g")
    if kind == "initializer":
        graph.initializer.append(tensor)
    elif kind != "none":
        value = tensor if kind == "t" else [tensor]
        graph.node.append(onnx.helper.make_node("Op", [], ["y"], domain="test", value=value))
    if where == "subgraph":
        outer = onnx.helper.make_node("Op", [], ["z"], domain="test", body=graph)
        graph = onnx.GraphProto(name="main", node=[outer])
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert modelexport.load(path).data_files == ([] if kind == "none" else ["w.bin"])
