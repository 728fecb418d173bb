"""GraphML whose exact forms, values or locations were changed: one line, and nothing written."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

import modelexport
from graphml.building import model, value
from graphml.drawing import Drawing
from graphml.refusal import data_file, flip_a_bit, refused, with_checks, written
from modelexport.cli.main import main

pytestmark = [pytest.mark.sanity]


def changed(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(graphml: Path) -> None:
        text = graphml.read_text()
        new = change(text)
        assert new != text
        graphml.write_text(new)

    return apply


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
        lambda g: data_file(g).unlink(),
        r"g.onnxdata is missing: initializers of g.graphml are in it \(put",
    ),
    "short data": (
        lambda g: data_file(g).write_bytes(data_file(g).read_bytes()[:-1]),
        "g.onnxdata is too short for the values of 'w'",
    ),
    "empty data": (lambda g: data_file(g).write_bytes(b""), "g.onnxdata is too short"),
    "other data": (flip_a_bit, "the values of 'w' .* are not the ones that were written"),
    "a folder as data": (
        lambda g: (data_file(g).unlink(), data_file(g).mkdir()),
        "g.onnxdata is missing",
    ),
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
            data_file(g).rename(g.parent.parent / "away"),
            data_file(g).symlink_to(g.parent.parent / "away"),
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


def test_the_original_is_changed_or_gone(tmp_path: Path) -> None:
    graphml = written(tmp_path, "reference")
    original = tmp_path / "model.onnx"
    content = original.read_bytes()
    original.write_bytes(content.replace(np.float32(77).tobytes(), np.float32(78).tobytes()))
    refused(graphml, "the values of 'w' .* in model.onnx are not the ones that were written")
    original.unlink()
    refused(graphml, "model.onnx is missing")
