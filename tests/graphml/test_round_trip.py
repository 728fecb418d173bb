"""ONNX to GraphML and back: equal field for field, and the same results to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import modelexport
from exports import CASES, export
from extraction.running import identical, session
from graphml import building
from graphml.handmade import HANDMADE
from modelexport.errors import FormatError
from modelexport.onnx_file.model_file import external_files
from modelexport.options import PARAMETER_MODES

pytestmark = [pytest.mark.must, pytest.mark.integration]


def round_trip(path: Path, mode: str, folder: Path) -> Path:
    """Go through GraphML in another folder, with the original beside it only in `reference`."""
    written = modelexport.export_graphml(
        path, None if mode == "reference" else folder / "there.graphml", parameters=mode
    )
    assert (written.data is not None) == (mode == "sidecar")
    back = folder / f"{mode}.onnx"
    modelexport.import_onnx(written.graphml, back)
    return back


def zeros(model: Path) -> dict[str, np.ndarray]:
    feeds = {}
    for value in session(model).get_inputs():
        kind = onnx.helper.tensor_dtype_to_np_dtype(
            onnx.TensorProto.DataType.Value(
                value.type.removeprefix("tensor(").removesuffix(")").upper()
            )
        )
        shape = [size if isinstance(size, int) else 1 for size in value.shape]
        feeds[value.name] = np.ones(shape, kind)
    return feeds


def outputs(model: Path) -> list[np.ndarray]:
    found = session(model).run(None, zeros(model))
    return [
        np.asarray(part)
        for value in found
        for part in (value if isinstance(value, list) else [value])
    ]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_exports_come_back(name: str, strategy: str, tmp_path: Path) -> None:
    path, _, _ = export(name, strategy, tmp_path)
    expected = outputs(path)
    for mode in PARAMETER_MODES:
        folder = tmp_path / mode
        folder.mkdir()
        back = round_trip(path, mode, folder)
        assert back.read_bytes() == path.read_bytes()
        for name_of_data in external_files(modelexport.load(path).proto):
            assert (folder / name_of_data).read_bytes() == (tmp_path / name_of_data).read_bytes()
        assert all(map(identical, outputs(back), expected))


RUNS = {
    "bodies",
    "functions",
    "sequences",
    "optional_inputs",
    "weights_as_inputs",
    "passes_through",
    "deep",
}


@pytest.mark.parametrize("mode", PARAMETER_MODES)
@pytest.mark.parametrize("name", HANDMADE)
def test_handmade_models_come_back(name: str, mode: str, tmp_path: Path) -> None:
    model = HANDMADE[name]()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    back = round_trip(path, mode, tmp_path)
    assert back.read_bytes() == path.read_bytes()
    if name in RUNS:
        assert all(map(identical, outputs(back), outputs(path)))


def test_a_model_with_fields_in_another_order_comes_back(tmp_path: Path) -> None:
    """Protobuf allows any order of fields; other writers use it."""
    model = HANDMADE["metadata_everywhere"]()
    graph = model.graph.SerializeToString()
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    swapped = rest.SerializeToString() + b"\x3a" + _varint(len(graph)) + graph
    path = tmp_path / "model.onnx"
    path.write_bytes(swapped)
    back = round_trip(path, "sidecar", tmp_path)
    assert onnx.ModelProto.FromString(back.read_bytes()) == model


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


@pytest.mark.parametrize("mode", PARAMETER_MODES)
@pytest.mark.parametrize("name", ["bodies", "functions", "metadata_everywhere", "like_labels"])
def test_names_that_are_not_utf8_come_back(name: str, mode: str, tmp_path: Path) -> None:
    """Protobuf says that names are UTF-8; some writers do not care."""
    path = tmp_path / "model.onnx"
    content = HANDMADE[name]().SerializeToString()
    odd = [
        content.replace(old, new)
        for old, new in ((b"then_branch", b"then\xff\xfeanch"), (b"own", b"o\xffn"))
    ]
    odd += [
        content.replace(b"x", b"\xff"),
        content.replace(b"branch", b"br\xffnch"),
        content.replace(b"h", b"\xe9"),
    ]
    for number, bad in enumerate(odd):
        path.write_bytes(bad)
        try:
            onnx.ModelProto.FromString(bad)
        except Exception:  # the change hit something else
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        assert round_trip(path, mode, folder).read_bytes() == bad


@pytest.mark.regression
def test_a_name_that_two_nodes_make_comes_back(tmp_path: Path) -> None:
    """By one of them as its second output, by the other as its only one."""
    nodes = [helper.make_node("Split", ["x"], ["a", "y"]), helper.make_node("Relu", ["a"], ["y"])]
    nodes.append(helper.make_node("Abs", ["y"], ["z"]))
    path = tmp_path / "model.onnx"
    ends = [building.value("x")], [building.value("z")]
    path.write_bytes(building.model(nodes, *ends).SerializeToString())
    assert round_trip(path, "sidecar", tmp_path).read_bytes() == path.read_bytes()


@pytest.mark.regression
def test_two_functions_of_one_name_are_refused(tmp_path: Path) -> None:
    made = HANDMADE["functions"]()
    made.functions.append(made.functions[0])
    path = tmp_path / "model.onnx"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(FormatError, match="two local functions have the same name"):
        modelexport.export_graphml(path)


def test_file_names_that_are_odd(tmp_path: Path) -> None:
    folder = tmp_path / "a folder é"
    folder.mkdir()
    path = folder / "back\\slash & <more> 'é' \".onnx"
    path.write_bytes(HANDMADE["passes_through"]().SerializeToString())
    for mode in PARAMETER_MODES:
        written = modelexport.export_graphml(path, parameters=mode)
        modelexport.import_onnx(written.graphml, tmp_path / "back.onnx")
        assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes()


def test_two_ways_to_name_one_data_file(tmp_path: Path) -> None:
    """`./w.bin` and `w.bin` are the same file, and an empty tensor may lie at its end."""
    values = np.arange(1024, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    weights = []
    for number, (location, offset, length) in enumerate(
        (("./w.bin", 0, 2048), ("w.bin", 2048, 2048), ("w.bin", 4096, 0))
    ):
        tensor = onnx.TensorProto(
            name=f"w{number}", data_type=1, dims=[length // 4], data_location=1
        )
        for key, text in (("location", location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(text))
        weights.append(tensor)
    nodes = [onnx.helper.make_node("Concat", ["w0", "w1", "w2"], ["y"], axis=0)]
    graph = onnx.helper.make_graph(
        nodes, "g", [], [onnx.helper.make_tensor_value_info("y", 1, [1024])], weights
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx.helper.make_model(graph, ir_version=10).SerializeToString())
    for mode in PARAMETER_MODES:
        folder = tmp_path / mode
        folder.mkdir()
        back = round_trip(path, mode, folder)
        assert back.read_bytes() == path.read_bytes()
        assert (folder / "w.bin").read_bytes() == values.tobytes()


def test_unknown_fields_come_back(tmp_path: Path) -> None:
    """A newer ONNX may say things that this one does not know."""
    model = HANDMADE["passes_through"]()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString() + b"\xc2\x3e\x03new")
    assert round_trip(path, "sidecar", tmp_path).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("mode", PARAMETER_MODES)
def test_external_data_comes_back(mode: str, tmp_path: Path) -> None:
    """Weights in a data file of the model come back in such a file, at the same places."""
    weights = {
        f"w{n}": np.random.default_rng(n).standard_normal((16, 3 + n), dtype=np.float32)
        for n in range(4)
    }
    nodes = [onnx.helper.make_node("Identity", [name], [f"{name}_out"]) for name in weights]
    graph = onnx.helper.make_graph(
        nodes,
        "main",
        [],
        [
            onnx.helper.make_tensor_value_info(f"{n}_out", 1, list(w.shape))
            for n, w in weights.items()
        ],
        [onnx.numpy_helper.from_array(weight, name) for name, weight in weights.items()],
    )
    path = tmp_path / "model.onnx"
    model = onnx.helper.make_model(
        graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)]
    )
    onnx.save_model(
        model, path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    folder = tmp_path / "back"
    folder.mkdir()
    back = round_trip(path, mode, folder)
    assert back.read_bytes() == path.read_bytes()
    assert (folder / "weights.bin").read_bytes() == (tmp_path / "weights.bin").read_bytes()
    assert all(map(identical, outputs(back), outputs(path)))


def test_the_data_file_that_is_there_stays(tmp_path: Path) -> None:
    """Beside the original, both share the data file; one with other values is kept."""
    path, _, _ = export("bert", "fx", tmp_path, external_data=True)
    data = tmp_path / "model.onnx.data"
    before = data.read_bytes()
    written = modelexport.export_graphml(path)
    modelexport.import_onnx(written.graphml, tmp_path / "back.onnx")
    assert data.read_bytes() == before
    data.write_bytes(bytes(len(before)))
    with pytest.raises(modelexport.ModelExportError, match="already exists, with other values"):
        modelexport.import_onnx(written.graphml, tmp_path / "again.onnx")
    assert not (tmp_path / "again.onnx").exists()
    assert data.read_bytes() == bytes(len(before))


def test_progress_is_reported(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Relu", [f"t{n}"], [f"t{n + 1}"]) for n in range(2000)]
    ends = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("t0", "t2000")]
    path = tmp_path / "m.onnx"
    path.write_bytes(
        onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:])
        ).SerializeToString()
    )
    reported: list[float] = []
    written = modelexport.export_graphml(path, on_progress=reported.append)
    assert len(reported) > 5
    assert reported == sorted(reported)
    assert reported[-1] <= 1
    reported.clear()
    modelexport.import_onnx(written.graphml, tmp_path / "b.onnx", on_progress=reported.append)
    assert len(reported) > 5
    assert reported == sorted(reported)
    assert reported[-1] <= 1
