"""One module's part of the graph, by `extract_module_subgraph`."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import modelexport
from modelexport.errors import ArgumentError, ArgumentTypeError, FormatError
from modelexport.tagged.records import read_sidecar, sidecar_path
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity


def expected(path: Path, module: str) -> dict[str, set[str]]:
    """Compute the parts from their definition."""
    proto = onnx.load(path, load_external_data=False)
    tags = {
        node.output[0]: json.loads(node.doc_string)["hierarchy_module"] for node in proto.graph.node
    }
    inside = [
        n
        for n in proto.graph.node
        if not module or f"{tags[n.output[0]]}.".startswith(f"{module}.")
    ]
    outside = [n for n in proto.graph.node if n not in inside]
    weights = {tensor.name for tensor in proto.graph.initializer}
    made = {name for node in inside for name in node.output if name}
    read = {name for node in inside for name in node.input if name}
    leaving = {name for node in outside for name in node.input} | {
        value.name for value in proto.graph.output
    }
    return {
        "operations": {node.output[0] for node in inside},
        "external_inputs": read - made - weights,
        "internal_tensors": made - leaving,
        "boundary_operations": {node.output[0] for node in inside if set(node.output) & leaving},
    }


@pytest.mark.smoke
def test_every_module_by_path_and_tag(exported: Path) -> None:
    sidecar = json.loads(sidecar_path(exported).read_text())
    for path, record in sidecar["modules"].items():
        if record["nodes"]:
            part = modelexport.extract_module_subgraph(exported, sidecar, path)
            assert {key: set(part[key]) for key in expected(exported, path)} == expected(
                exported, path
            )
            if record["tag"] is not None:
                assert modelexport.extract_module_subgraph(exported, sidecar, record["tag"]) == part


def test_all_kinds_of_arguments(exported: Path) -> None:
    path = sidecar_path(exported)
    proto = onnx.load(exported, load_external_data=False)
    answers = [
        modelexport.extract_module_subgraph(model, metadata, "")
        for model in (proto, exported, str(exported))
        for metadata in (path, str(path), json.loads(path.read_text()), read_sidecar(path), None)
    ]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0].operations) == len(proto.graph.node)
    with pytest.raises(KeyError):
        answers[0]["nothing"]


def test_wrong_arguments(exported: Path) -> None:
    with pytest.raises(ArgumentError, match="no module is called") as error:
        modelexport.extract_module_subgraph(exported, None, "no.such.module")
    assert error.value.hint is not None
    with pytest.raises(ArgumentTypeError):
        modelexport.extract_module_subgraph(exported, None, 3)  # type: ignore[arg-type]
    with pytest.raises(FormatError):
        modelexport.extract_module_subgraph(exported, {"modules": 3}, "")


def test_subgraphs(tmp_path: Path) -> None:
    """Nodes of a subgraph count, and its outputs go to the node that holds it."""
    model, inputs = ZOO["conditional_bodies"]()
    path = tmp_path / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="fx")
    loaded = modelexport.load(path)
    whole = modelexport.extract_module_subgraph(path, None, "")
    assert set(whole.operations) == {node.key for node in loaded.graph.nodes}
    assert set(whole.external_inputs) <= set(loaded.graph.inputs)
    assert {node.key for node in loaded.graph.nodes if node.enclosing >= 0} & set(
        whole.boundary_operations
    ) == set()
