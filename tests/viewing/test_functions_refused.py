"""Files that to_functions() and from_functions() refuse, and other commands on functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import modelexport
from damage import everything
from exports import export
from modelexport.errors import ArgumentError, FormatError
from viewing.handmade import node, write


def strip_tags(model: onnx.ModelProto) -> None:
    for each in model.graph.node:
        each.ClearField("doc_string")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    nodes = [node("a", "Neg", ["x"], ["a1"]), node("a", "Abs", ["a1"], ["y"])]
    return write(tmp_path / "m.onnx", nodes)


def change(path: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    model = onnx.load(path)
    edit(model)
    path.write_bytes(model.SerializeToString())


def test_files_that_cannot_be_converted(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    modelexport.to_functions(plain, out)
    with pytest.raises(FormatError, match="are functions already"):
        modelexport.to_functions(out, tmp_path / "again.onnx")
    for depth in (0, -1, True, 1.5):
        with pytest.raises(ArgumentError, match="depth must be a positive number of levels"):
            modelexport.to_functions(plain, out, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="would overwrite the input"):
        modelexport.to_functions(plain, plain)
    with pytest.raises(ArgumentError, match="would overwrite the input"):
        modelexport.from_functions(out, out)
    change(plain, strip_tags)
    before = everything(tmp_path)
    with pytest.raises(FormatError, match=r"m\.onnx has no tags"):
        modelexport.to_functions(plain, out)
    assert everything(tmp_path) == before


def test_graphs_that_cannot_run(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    cycle = [node("a", "Neg", ["y"], ["a1"]), node("a", "Abs", ["a1"], ["y"])]
    with pytest.raises(FormatError, match="has a cycle"):
        modelexport.to_functions(write(tmp_path / "m.onnx", cycle), out)
    twice = [node("a", "Neg", ["x"], ["y"]), node("a", "Abs", ["x"], ["y"])]
    with pytest.raises(FormatError, match="two nodes produce a value of the same name"):
        modelexport.to_functions(write(tmp_path / "m.onnx", twice), out)
    assert not out.exists()


def test_bytes_that_onnx_would_not_write(plain: Path, tmp_path: Path) -> None:
    """A file whose parts are stored in an unusual way is restored exactly, or refused."""
    model = onnx.load(plain)
    first, rest = onnx.GraphProto(node=model.graph.node[:1]), onnx.GraphProto()
    rest.CopyFrom(model.graph)
    del rest.node[:]
    graph = first.SerializeToString() + rest.SerializeToString()
    graph += onnx.GraphProto(node=model.graph.node[1:]).SerializeToString()
    del model.graph.node[:]
    model.ClearField("graph")
    header = b"\x3a" + bytes([len(graph) & 0x7F | 0x80, len(graph) >> 7])
    plain.write_bytes(model.SerializeToString() + header + graph)
    with pytest.raises(FormatError, match="is not stored as onnx writes it"):
        modelexport.to_functions(plain, tmp_path / "out.onnx")
    plain.write_bytes(plain.read_bytes() + header + graph)
    with pytest.raises(FormatError, match="has its graph in several parts"):
        modelexport.to_functions(plain, tmp_path / "out.onnx")


def add_call(model: onnx.ModelProto) -> None:
    model.graph.node.append(model.graph.node[0])


def recurse(model: onnx.ModelProto) -> None:
    model.functions[0].node.append(model.graph.node[0])


def lose_order(model: onnx.ModelProto) -> None:
    entry = model.metadata_props[-1]
    entry.value = entry.value.replace('"order":[[0,2]]', '"order":[[0,1000000000000]]')


CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "weights": (lambda m: m.graph.initializer[0].float_data.insert(0, 1.0), "does not restore"),
    "operator": (lambda m: setattr(m.functions[0].node[0], "op_type", "Exp"), "does not restore"),
    "node": (lambda m: m.functions[0].node.pop(), "1 node instead of 2"),
    "function": (lambda m: m.functions.pop(), "no function 'a' is left"),
    "call": (lambda m: m.graph.node.pop(), "nothing calls the function 'a'"),
    "second call": (add_call, "no function 'a' is left"),
    "recursion": (recurse, "no function 'a' is left"),
    "order": (lose_order, "2 nodes instead of 1,000,000,000,000"),
    "record": (lambda m: setattr(m.metadata_props[-1], "value", "[]"), "cannot be read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_not_inlined(name: str, plain: Path, tmp_path: Path) -> None:
    edit, reason = CHANGES[name]
    out, back = tmp_path / "out.onnx", tmp_path / "back.onnx"
    modelexport.to_functions(plain, out)
    change(out, edit)
    with pytest.raises(FormatError, match=f"was changed after.*{reason}"):
        modelexport.from_functions(out, back)
    assert not back.exists()


def test_other_commands_on_functions(tmp_path: Path) -> None:
    """What needs the flat graph says so."""
    path, _, _ = export("bert", "htp", tmp_path)
    out = tmp_path / "out.onnx"
    modelexport.to_functions(path, out)
    before = everything(tmp_path)
    result = modelexport.validate(out, repair=True)
    assert result.valid
    assert result.checks["consistency"] == "not possible: modules are functions"
    for work in (modelexport.list_modules, lambda each: list(modelexport.partition(each))):
        with pytest.raises(FormatError, match=r"the modules of out\.onnx are functions"):
            work(out)
    assert everything(tmp_path) == before
    chosen = [set(modelexport.select(each, ["encoder.layer.0"])) for each in (path, out)]
    assert chosen[0] < chosen[1], "nodes, and calls of functions"


def test_another_file_is_not_inlined(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="was not written by modelexport functions"):
        modelexport.from_functions(plain, tmp_path / "back.onnx")
