"""Files that are cut, changed, of another kind or hostile: one line, and nothing written."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

import modelexport
from graphml.drawing import Drawing, G
from graphml.handmade import model, value
from modelexport.cli.main import main
from modelexport.graphml.format import checksum
from modelexport.options import PARAMETER_MODES

pytestmark = [pytest.mark.sanity]

GRAPHML = "http://graphml.graphdrawing.org/xmlns"


def written(folder: Path, mode: str = "sidecar") -> Path:
    path = folder / "model.onnx"
    weight = numpy_helper.from_array(np.arange(3000, dtype=np.float32).reshape(1000, 3), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "t"], ["y"]),
        helper.make_node("Transpose", ["w"], ["t"]),
    ][::-1]
    path.write_bytes(
        model(nodes, [value("x")], [value("y", shape=[2, 1000])], [weight]).SerializeToString()
    )
    return modelexport.export_graphml(path, folder / "g.graphml", parameters=mode).graphml


def refused(graphml: Path, match: str, *, target: Path | None = None) -> None:
    """Check that the command prints one line and leaves nothing."""
    target = target or graphml.with_name("back.onnx")
    before = sorted(target.parent.iterdir()) if target.parent.is_dir() else []
    result = CliRunner().invoke(main, ["import-onnx", str(graphml), str(target)])
    assert result.exit_code == 2, result.output
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1, result.output
    assert re.search(match, result.output), result.output
    if target.parent.is_dir():
        assert sorted(target.parent.iterdir()) == before


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


def changed(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(graphml: Path) -> None:
        text = graphml.read_text()
        new = change(text)
        assert new != text
        graphml.write_text(new)

    return apply


def _data(graphml: Path) -> Path:
    return graphml.with_suffix(".onnxdata")


def _flip(graphml: Path) -> None:
    content = bytearray(_data(graphml).read_bytes())
    content[100] ^= 1
    _data(graphml).write_bytes(content)


def located(name: str) -> Callable[[Path], None]:
    return changed(lambda text: text.replace('"file":"g.onnxdata"', f'"file":{json.dumps(name)}'))


def _other_shape() -> str:
    tensor = onnx.TensorProto(name="w", dims=[3, 1000], data_type=1)
    return base64.b64encode(tensor.SerializeToString()).decode()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "version": (
        changed(lambda t: t.replace(">1.1<", ">2.0<")),
        "format version is '2.0', expected 1.1",
    ),
    "version on the card": (
        changed(lambda t: re.sub(r'(n_format_version">)1.1', r"\g<1>9", t)),
        "format version is '9'",
    ),
    "no version": (
        changed(lambda t: re.sub(r'<data key="n_format_version">1.1</data>', "", t)),
        "format version",
    ),
    "missing data": (
        lambda g: _data(g).unlink(),
        r"g.onnxdata is missing: initializers of g.graphml are in it \(put",
    ),
    "short data": (
        lambda g: _data(g).write_bytes(_data(g).read_bytes()[:-1]),
        "g.onnxdata is too short for the values of 'w'",
    ),
    "empty data": (lambda g: _data(g).write_bytes(b""), "g.onnxdata is too short"),
    "other data": (_flip, "the values of 'w' .* are not the ones that were written"),
    "a folder as data": (lambda g: (_data(g).unlink(), _data(g).mkdir()), "g.onnxdata is missing"),
    "checksum": (
        changed(lambda t: re.sub(r'"sha256":"..', '"sha256":"zz', t)),
        "not the ones that were written",
    ),
    "checksum emptied": (
        changed(lambda t: re.sub(r'"sha256":"[^"]*"', '"sha256":""', t)),
        "not the ones that were written",
    ),
    "location above": (located("../g.onnxdata"), "outside the GraphML's folder"),
    "location absolute": (located("/etc/hostname"), "outside the GraphML's folder"),
    "location inside": (located("sub/g.onnxdata"), "sub/g.onnxdata is missing"),
    "location of windows": (located("..\\g.onnxdata"), "outside the GraphML's folder|missing"),
    "location a link": (
        lambda g: (
            _data(g).rename(g.parent.parent / "away"),
            _data(g).symlink_to(g.parent.parent / "away"),
        ),
        "outside the GraphML's folder",
    ),
    "values emptied": (
        changed(lambda t: re.sub(r'(n_values">)[^<]*', r"\g<1>", t)),
        "exact form of 'w' .*is damaged",
    ),
    "values dropped": (
        changed(lambda t: re.sub(r'<key id="n_values"[^>]*>', "", t)),
        "exact form of 'w' .*is damaged",
    ),
    "shape changed": (
        changed(
            lambda t: re.sub(r'(name">w<.*?n_onnx">)[^<]*', lambda m: m[1] + _other_shape(), t)
        ),
        "exact form of 'w' .*is damaged",
    ),
    "deep JSON": (
        changed(lambda t: re.sub(r'(n_parameters">)[^<]*', r"\g<1>" + '{"x":' + "[" * 100_000, t)),
        "where its initializers are",
    ),
    "deep attributes": (
        changed(
            lambda t: t.replace(
                '<data key="n_operator">MatMul<',
                '<data key="n_attributes">{"x":'
                + "[" * 100_000
                + '</data><data key="n_operator">MatMul<',
            )
        ),
        r"'MatMul' \(n\d+\): the attributes changed: expected '', got",
    ),
    "location empty": (located(""), "outside the GraphML's folder|missing"),
    "location a dot": (located("."), "outside the GraphML's folder"),
    "location with a null": (located("a\0b"), "outside the GraphML's folder"),
    "offset negative": (
        changed(lambda t: re.sub(r'"offset":\d+', '"offset":-8', t)),
        "too short|damaged",
    ),
    "offset huge": (
        changed(lambda t: re.sub(r'"offset":\d+', '"offset":99999999999999', t)),
        "too short",
    ),
    "length text": (
        changed(lambda t: re.sub(r'"length":\d+', '"length":"12"', t)),
        "values of 'w' .* is damaged",
    ),
    "field unknown": (
        changed(lambda t: t.replace('"field":"raw_data"', '"field":"segment"')),
        "unknown kind",
    ),
    "values no JSON": (changed(lambda t: re.sub(r'(n_values">)\[', r"\g<1>(", t)), "is damaged"),
    "parameters no JSON": (
        changed(lambda t: re.sub(r'(n_parameters">)\{', r"\g<1>", t)),
        "where its initializers are",
    ),
    "mode unknown": (
        changed(lambda t: t.replace('"mode":"sidecar"', '"mode":"cloud"')),
        "no parameter mode 'cloud'",
    ),
    "exact form no base64": (
        changed(lambda t: re.sub(r'(n_onnx">)...', r"\g<1>!!!", t)),
        "not base64",
    ),
    "exact form damaged": (
        changed(lambda t: re.sub(r'(n_onnx">)\w{8}', r"\g<1>/////w==", t)),
        "damaged|not base64",
    ),
    "exact form gone": (
        changed(lambda t: re.sub(r'<data key="n_onnx">[^<]*</data>', "", t)),
        "holds no model|is missing",
    ),
    "order gone": (
        changed(lambda t: re.sub(r'<data key="n_execution_order">\d+</data>', "", t)),
        "no execution_order",
    ),
    "order text": (
        changed(lambda t: re.sub(r'(n_execution_order">)\d+', r"\g<1>x", t)),
        "no execution_order",
    ),
    "scope unknown": (
        changed(
            lambda t: t.replace(
                '<data key="n_execution_order">0<',
                '<data key="n_scope">7/0</data><data key="n_execution_order">0<',
            )
        ),
        "was moved into or out of a subgraph",
    ),
    "scope itself": (
        changed(
            lambda t: t.replace(
                '<data key="n_execution_order">0<',
                '<data key="n_scope">0/0</data><data key="n_execution_order">0<',
            )
        ),
        "was moved into or out of a subgraph",
    ),
    "scope later": (
        changed(
            lambda t: t.replace(
                '<data key="n_execution_order">0<',
                '<data key="n_scope">1/0</data><data key="n_execution_order">0<',
            )
        ),
        "was moved into or out of a subgraph",
    ),
    "ids twice": (
        changed(lambda t: t.replace('<node id="n1">', '<node id="n0">')),
        "two nodes have the id",
    ),
    "edge to nowhere": (
        changed(lambda t: t.replace('target="n1"', 'target="n77"')),
        "'n77', which is not a node",
    ),
}


BEHIND_THE_CHECK = {
    "checksum",
    "checksum emptied",
    "offset negative",
    "offset huge",
    "length text",
    "field unknown",
    "values no JSON",
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_files(case: str, tmp_path: Path) -> None:
    graphml = written(tmp_path)
    apply, match = CHANGES[case]
    apply(graphml)
    if case in BEHIND_THE_CHECK:
        refused(graphml, "the exact form of 'w' .* is damaged")
        with_checks(graphml)
    refused(graphml, match)


def test_embedded_values(tmp_path: Path) -> None:
    graphml = written(tmp_path, "embedded")
    whole = graphml.read_text()
    for new, match in (
        (re.sub(r'(n_bytes">)....', r"\g<1>!!!!", whole), "not base64"),
        (re.sub(r'(n_bytes">)........', r"\g<1>", whole), "cut short"),
        (re.sub(r'(n_bytes">)....', r"\g<1>zzzz", whole), "not the ones that were written"),
        (re.sub(r';(</data><data key="n_values)', r"\g<1>", whole), "cut short"),
        (re.sub(r'<data key="n_bytes">[^<]*</data>', "", whole), "cut short"),
        (whole.replace('n_bytes">', 'n_bytes"><data key="other"/>'), "cut short"),
    ):
        assert new != whole
        graphml.write_text(new)
        refused(graphml, match)


def with_checks(graphml: Path) -> None:
    """Write checksums that match."""
    drawing = Drawing(graphml)
    for node in drawing.nodes.values():
        texts = drawing.texts(node)
        if texts.get("onnx"):
            drawing.set(
                node, "check", checksum(base64.b64decode(texts["onnx"]), texts.get("values", ""))
            )
    drawing.save()


def external(folder: Path, **places: str) -> Path:
    """Write a GraphML whose only initializer lies in a data file, with other entries."""
    path = folder / "model.onnx"
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], [value("x")], [value("y")], [weight])
    onnx.save_model(made, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    graphml = modelexport.export_graphml(path, folder / "g.graphml").graphml
    (folder / "w.bin").unlink()
    drawing = Drawing(graphml)
    node = drawing.find(name="w")
    tensor = onnx.TensorProto.FromString(base64.b64decode(drawing.texts(node)["onnx"]))
    for entry in tensor.external_data:
        entry.value = places.get(entry.key, entry.value)
    drawing.set(node, "onnx", base64.b64encode(tensor.SerializeToString()).decode())
    drawing.save()
    with_checks(graphml)
    return graphml


@pytest.mark.parametrize(
    ("places", "match"),
    [
        ({"offset": "1000000000000"}, "nearly all of them zeros"),
        ({"offset": "1" + "0" * 19}, "not in any file"),
        ({"offset": "1" * 5000}, "is not a number"),
        ({"offset": "-8"}, "not in any file"),
        ({"offset": "٣٣"}, "|"),
        ({"length": "25"}, "not as long"),
        ({"location": "../w.bin"}, "outside the model's folder"),
        ({"location": "back.onnx"}, "has the name of the output"),
        ({"location": "./back.onnx"}, "has the name of the output"),
    ],
)
def test_made_up_places(places: dict[str, str], match: str, tmp_path: Path) -> None:
    graphml = external(tmp_path, **places)
    if match.endswith("|"):
        assert (
            CliRunner()
            .invoke(main, ["import-onnx", str(graphml), str(tmp_path / "back.onnx")])
            .exit_code
            == 0
        )
    else:
        refused(graphml, match)


@pytest.mark.parametrize("offset", ["04096", " 0", "+64"])
def test_numbers_as_others_write_them(offset: str, tmp_path: Path) -> None:
    graphml = external(tmp_path, offset=offset)
    modelexport.import_onnx(graphml, tmp_path / "back.onnx")
    assert (tmp_path / "w.bin").read_bytes()[int(offset) :] == np.ones((2, 3), np.float32).tobytes()


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
    assert "is no ordinary file" in result.output


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


def test_the_original_is_changed_or_gone(tmp_path: Path) -> None:
    graphml = written(tmp_path, "reference")
    original = tmp_path / "model.onnx"
    content = original.read_bytes()
    original.write_bytes(content.replace(np.float32(77).tobytes(), np.float32(78).tobytes()))
    refused(graphml, "the values of 'w' .* in model.onnx are not the ones that were written")
    original.unlink()
    refused(graphml, "model.onnx is missing")


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
    _flip(graphml)
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


_PEAK = """
import sys, modelexport
from pathlib import Path
source, graphml, mode, work = sys.argv[1:]
modelexport.export_graphml, modelexport.import_onnx
def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
if work == "write":
    modelexport.export_graphml(source, graphml, parameters=mode)
else:
    modelexport.import_onnx(graphml, Path(graphml).with_name("back.onnx"))
print(peak() - before)
"""


@pytest.mark.performance
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read as Linux has it"
)
@pytest.mark.parametrize("mode", PARAMETER_MODES)
@pytest.mark.parametrize("external", [False, True])
def test_memory_does_not_grow_with_the_weights(external: bool, mode: str, tmp_path: Path) -> None:
    """Sixty megabytes in one tensor take no more than a few, written and read."""
    path = tmp_path / "model.onnx"
    weight = numpy_helper.from_array(np.zeros((5000, 3000), np.float32), "w")
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", shape=[2, 5000])],
        [value("y")],
        [weight],
    )
    if external:
        onnx.save_model(made, path, save_as_external_data=True, location="w.bin")
    else:
        path.write_bytes(made.SerializeToString())
    for work in ("write", "read"):
        command = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / "g.graphml"), mode, work]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert peak < 24_000, f"{work}: {peak} KiB"
