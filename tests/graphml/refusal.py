"""GraphML to change, the data file beside it, and the check that it is refused."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from onnx import helper, numpy_helper

import modelexport
from graphml.building import model, value
from graphml.drawing import Drawing
from modelexport.cli.main import main
from modelexport.graphml.format import checksum


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


def data_file(graphml: Path) -> Path:
    return graphml.with_suffix(".onnxdata")


def flip_a_bit(graphml: Path) -> None:
    content = bytearray(data_file(graphml).read_bytes())
    content[100] ^= 1
    data_file(graphml).write_bytes(content)


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
