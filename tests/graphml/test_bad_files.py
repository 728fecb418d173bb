"""Files that are cut, changed, of another kind or hostile: one line, and nothing written."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

import modelexport
from graphml.drawing import Drawing, G
from graphml.handmade import model, value
from graphml.refusal import flip_a_bit, refused, written
from modelexport.cli.main import main
from modelexport.options import PARAMETER_MODES

pytestmark = [pytest.mark.sanity]

GRAPHML = "http://graphml.graphdrawing.org/xmlns"


@pytest.mark.parametrize("mode", PARAMETER_MODES)
def test_cut_anywhere(mode: str, tmp_path: Path) -> None:
    graphml = written(tmp_path, mode)
    whole = graphml.read_bytes()
    for end in (
        0,
        1,
        30,
        100,
        500,
        len(whole) // 2,
        len(whole) - 300,
        len(whole) - 12,
        len(whole) - 2,
    ):
        graphml.write_bytes(whole[:end])
        refused(graphml, "is not GraphML|is cut short or damaged|is empty")


TEXTS: dict[str, tuple[str, str]] = {
    "another kind": (
        "<html><body/></html>",
        "is not GraphML .pass the file that export-graphml wrote",
    ),
    "another namespace": (
        "<graphml><graph/></graphml>",
        "is not GraphML .pass the file that export-graphml wrote",
    ),
    "no model": (
        f'<graphml xmlns="{GRAPHML}"><graph id="G" edgedefault="directed"/></graphml>',
        "holds no model",
    ),
    "not XML": ("hello", "is not GraphML .pass the file that export-graphml wrote"),
    "entities": (
        '<!DOCTYPE graphml [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
        f'<graphml xmlns="{GRAPHML}">&b;</graphml>',
        "has a document type",
    ),
    "entities in attributes": (
        f'<!DOCTYPE graphml [<!ENTITY a "aaaa">]><graphml xmlns="{GRAPHML}" x="&a;"/>',
        "has a document type",
    ),
    "a file from elsewhere": (
        f'<!DOCTYPE graphml SYSTEM "file:///etc/passwd"><graphml xmlns="{GRAPHML}"/>',
        "has a document type",
    ),
    "undeclared entity": (f'<graphml xmlns="{GRAPHML}">&a;</graphml>', "cut short or damaged"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_other_files(case: str, tmp_path: Path) -> None:
    text, match = TEXTS[case]
    path = tmp_path / "g.graphml"
    path.write_text(text)
    refused(path, match)


def test_a_bomb_costs_nothing(tmp_path: Path) -> None:
    """A billion laughs, and a file that is another encoding to hide them."""
    entities = '<!ENTITY a0 "ha">' + "".join(
        f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9)
    )
    text = f'<!DOCTYPE graphml [{entities}]><graphml xmlns="{GRAPHML}" x="&a9;">&a9;</graphml>'
    path = tmp_path / "g.graphml"
    path.write_text(text)
    refused(path, "has a document type")
    path.write_text('<?xml version="1.0" encoding="UTF-16"?>' + text, encoding="utf-16")
    refused(path, "not GraphML|damaged|document type")
    path.write_text('<?xml version="1.0" encoding="UTF-7"?>' + text)
    refused(path, "document type|damaged|not GraphML")


def test_parts_that_lie_too_deep(tmp_path: Path) -> None:
    """Operators in operators, deeper than protobuf can go."""
    branch = helper.make_graph([], "b", [], [])
    nodes = [
        helper.make_node("If", ["c"], [f"y{n}"], name=f"n{n}", then_branch=branch)
        for n in range(60)
    ]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, [value("c")], [value("y0")]).SerializeToString())
    drawing = Drawing(modelexport.export_graphml(path, tmp_path / "g.graphml").graphml)
    found = [drawing.find(name=f"n{n}") for n in range(60)]
    for outer, inner in pairwise(found):
        body = outer.find(f"{G}graph/{G}node/{G}graph")
        order = drawing.texts(outer)["execution_order"]
        drawing.set(inner, "scope", f"{order}/0")
        body.append(inner)
    drawing.save()
    refused(drawing.path, "its parts are not a model")


def test_nothing_that_is_read_is_written_over(tmp_path: Path) -> None:
    graphml = written(tmp_path)
    content = graphml.read_bytes()
    model_content = (tmp_path / "model.onnx").read_bytes()
    (tmp_path / "g.onnx").write_bytes(content)
    for arguments in (
        ["import-onnx", "g.onnx", "g.onnx"],
        ["export-graphml", "m.graphml", "m.graphml"],
        ["export-graphml", "m.onnxdata", "m.graphml"],
    ):
        source = tmp_path / arguments[1]
        source.write_bytes(content if source.suffix == ".onnx" else model_content)
        before = source.read_bytes()
        result = CliRunner().invoke(
            main, [arguments[0], *(str(tmp_path / name) for name in arguments[1:])]
        )
        assert result.exit_code == 2, result.output
        assert source.read_bytes() == before


@pytest.mark.parametrize("location", ["x.onnxdata", "./x.onnxdata", "x.graphml"])
@pytest.mark.parametrize("where", ["initializer", "attribute"])
def test_the_models_own_data_file_is_not_written_over(
    where: str, location: str, tmp_path: Path
) -> None:
    tensor = onnx.TensorProto(
        name="w", dims=[3], data_type=1, data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value=location)
    made = model([helper.make_node("Identity", ["w"], ["y"])], [], [value("y", shape=[3])])
    if where == "initializer":
        made.graph.initializer.append(tensor)
    else:
        made.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    (tmp_path / location).write_bytes(bytes(12))
    result = CliRunner().invoke(
        main, ["export-graphml", str(tmp_path / "model.onnx"), str(tmp_path / "x.graphml")]
    )
    assert result.exit_code == 2, result.output
    assert "would overwrite a data file of the model" in result.output
    assert (tmp_path / location).read_bytes() == bytes(12)


@pytest.mark.parametrize("command", ["export-graphml", "import-onnx"])
def test_a_pipe_is_no_file(command: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    out = tmp_path / ("out.graphml" if command == "export-graphml" else "out.onnx")
    result = CliRunner().invoke(main, [command, str(pipe), str(out)])
    assert result.exit_code == 2
    assert "is not a regular file" in result.output


def test_damaged_models(tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    for content in (b"\x08\x0a\x3a\x04\x0a\x02\x0a\x05", b"\x3a\x02\x2a\x05", b"\x00"):
        path.write_bytes(content)
        result = CliRunner().invoke(main, ["export-graphml", str(path)])
        assert result.exit_code == 2, result.output
        assert "is not an ONNX model" in result.output


def test_deep_json_and_deep_modules_in_a_model(tmp_path: Path) -> None:
    from modelexport.modules.record import NodeTag
    from modelexport.tagged.records import encode_tag

    path = tmp_path / "m.onnx"
    made = model(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["y"], ["z"])],
        [value("x")],
        [value("z")],
    )
    made.graph.node[0].doc_string = '{"hierarchy_tags":' + "[" * 100_000
    deep = ".".join("m" * 1 for _ in range(1500))
    made.graph.node[1].doc_string = encode_tag(NodeTag(("/A",), "/A", 1, "scope", deep)).decode()
    path.write_bytes(made.SerializeToString())
    written = modelexport.export_graphml(path)
    assert written.modules == 1501


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    graphml = written(tmp_path)
    refused(
        tmp_path / "none.graphml",
        "cannot read .*none.graphml: No such file",
        target=tmp_path / "b.onnx",
    )
    refused(tmp_path, "is a folder", target=tmp_path / "b.onnx")
    refused(graphml, "folder .* does not exist", target=tmp_path / "no" / "b.onnx")
    refused(graphml, "does not end in .onnx", target=tmp_path / "b.txt")
    (tmp_path / "folder.onnx").mkdir()
    refused(graphml, "is a folder", target=tmp_path / "folder.onnx")


def test_what_was_there_stays(tmp_path: Path) -> None:
    """A failed import leaves the earlier model as it was."""
    graphml = written(tmp_path)
    target = tmp_path / "back.onnx"
    target.write_bytes(b"earlier")
    flip_a_bit(graphml)
    refused(graphml, "not the ones that were written", target=target)
    assert target.read_bytes() == b"earlier"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["missing.onnx"], "cannot read"),
        (["model.onnx", "out.txt"], "does not end in .graphml"),
        (["model.onnx", "no/out.graphml"], "does not exist"),
        (["model.onnx", "--graphml-parameters", "cloud"], "cloud"),
        (
            ["model.onnx", "other/out.graphml", "--graphml-parameters", "reference"],
            "is not beside model.onnx",
        ),
        (["broken.onnx"], "is not an ONNX model"),
        (["lost.onnx"], "lost.data is missing"),
    ],
)
def test_bad_arguments_of_export_graphml(
    arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"\x3a\xff\xff")
    lost = onnx.load(tmp_path / "model.onnx")
    onnx.save_model(
        lost,
        tmp_path / "lost.onnx",
        save_as_external_data=True,
        location="lost.data",
        size_threshold=0,
    )
    (tmp_path / "lost.data").unlink()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(main, ["export-graphml", *arguments])
    assert result.exit_code == 2, result.output
    assert re.search(match, result.output), result.output
    assert "Traceback" not in result.output
    assert sorted(tmp_path.rglob("*")) == before
