"""Each kind of damage has its own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import modelexport
from analysis.damages import (
    DAMAGES,
    SIDECAR_DAMAGES,
    change_an_attribute,
    codes,
    edit_tag,
    lose,
    move_an_edge,
)
from damage import Damage, copied, edit, edit_sidecar, everything, net
from modelexport.analysis.findings import Code
from modelexport.analysis.validate import Validation, validate
from modelexport.errors import FileError, FormatError
from modelexport.tagged.records import METADATA_KEY, sidecar_path
from zoo import ZOO

pytestmark = pytest.mark.sanity


@pytest.mark.smoke
def test_an_export_is_valid(exported: Path) -> None:
    for deep in (False, True):
        result = validate(exported, check_consistency=deep)
        assert result.valid
        assert result.findings == ()
        assert result.checks["onnx"] == result.checks["tags"] == "passed"
    assert result.checks["consistency"] == "passed"


def test_gaps_that_a_strategy_leaves_are_no_damage(
    exports: dict[str, Path], tmp_path: Path
) -> None:
    path = copied(exports["by_weights"], tmp_path / "copy")
    assert modelexport.load(path).coverage < 1.0
    assert codes(path) == set()
    edit(
        path,
        lambda model: next(node for node in model.graph.node if node.doc_string).ClearField(
            "doc_string"
        ),
    )
    assert codes(path) == {Code.DOC_MISSING}
    sidecar_path(path).unlink()
    assert Code.DOC_MISSING in codes(path), "the file's own records tell how many there were"


@pytest.mark.parametrize("deep", [False, True])
def test_an_untagged_file_is_only_onnx(exported: Path, tmp_path: Path, deep: bool) -> None:
    (tmp_path / "other").mkdir()
    result = validate(
        modelexport.strip(exported, tmp_path / "other" / "plain.onnx"), check_consistency=deep
    )
    assert result.valid
    assert not result.tagged
    assert result.checks["tags"] == "no tags"


def test_a_clean_export_is_checked_by_its_sidecar(tmp_path: Path) -> None:
    model, inputs = ZOO["encoder_layer"]()
    path = tmp_path / "m.onnx"
    modelexport.export_model(model, inputs, path, strategy="htp", clean=True)
    before = everything(tmp_path)
    assert codes(path) == set()
    assert validate(path, repair=True).valid
    assert everything(tmp_path) == before, "a clean file stays clean"
    edit(path, move_an_edge)
    assert Code.EDGE_MOVED in codes(path)


@pytest.mark.regression
def test_a_sidecar_of_another_graph_gives_no_tags(tmp_path: Path) -> None:
    model, inputs = net()
    for name, exported in (("m", model), ("other", model.encoder)):
        path = tmp_path / f"{name}.onnx"
        modelexport.export_model(exported, inputs, path, strategy="htp", clean=True)
    (tmp_path / "other_hierarchy.json").replace(tmp_path / "m_hierarchy.json")
    assert modelexport.validate(tmp_path / "m.onnx").checks["tags"] == "no tags"
    assert not modelexport.validate(tmp_path / "m.onnx", check_consistency=True).valid


@pytest.mark.regression
def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    modelexport.export_model(nn.Linear(64, 64), torch.ones(1, 64), path, external_data=True)
    (tmp_path / "m.onnx.data").unlink()
    (finding,) = modelexport.validate(path).findings
    assert finding.code == "data-missing"
    assert finding.message == "m.onnx.data is missing: initializers of m.onnx are in it"


@pytest.mark.parametrize("code", DAMAGES, ids=str)
def test_damage_in_the_file_has_its_code(exported: Path, code: Code) -> None:
    edit(exported, DAMAGES[code])
    result = validate(exported, check_consistency=True)
    assert not result.valid
    found = [one for one in result.findings if one.code == code]
    assert found
    assert all(one.severity == "error" and one.place and one.message and one.fix for one in found)
    own = {
        Code.DOC_MALFORMED,
        Code.DOC_MISSING,
        Code.TAG_WRONG,
        Code.TAG_UNKNOWN,
        Code.EDGE_MOVED,
        Code.NODE_ADDED,
    }
    if code in own | {Code.ATTRIBUTE_CHANGED}:
        assert len(result.findings) == len(found) == 1, "one damage, one finding"


def test_consumers_are_recomputed(exported: Path) -> None:
    def damage(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            tag = json.loads(node.doc_string)
            if tag["hierarchy_count"] > 1:
                tags = tag["hierarchy_tags"][:1]
                node.doc_string = json.dumps({**tag, "hierarchy_tags": tags, "hierarchy_count": 1})
                return
        raise AssertionError("no node is read by another module")

    edit(exported, damage)
    assert codes(exported) == {Code.CONSUMERS_WRONG}


@pytest.mark.parametrize("code", SIDECAR_DAMAGES, ids=str)
def test_damage_in_the_sidecar_has_its_code(exported: Path, code: Code) -> None:
    edit_sidecar(exported, SIDECAR_DAMAGES[code])
    assert code in codes(exported)


def test_a_missing_sidecar(exported: Path) -> None:
    sidecar_path(exported).unlink()
    assert codes(exported) == {Code.SIDECAR_MISSING}
    assert validate(exported).valid, "without --check-consistency nobody asked for it"


@pytest.mark.parametrize(
    "content", [b"{not json", b"[]", b'{"format": 1}', b"", b'{"form\xff": 1}', b"[" * 100_000]
)
def test_a_malformed_sidecar(exported: Path, content: bytes) -> None:
    sidecar_path(exported).write_bytes(content)
    assert codes(exported) == {Code.SIDECAR_UNREADABLE}


def test_a_sidecar_of_another_model(exported: Path, tmp_path: Path) -> None:
    model, inputs = ZOO["block_three_times"]()
    other = modelexport.export_model(model, inputs, tmp_path / "other.onnx", strategy="htp")
    shutil.copy(other.sidecar_path, sidecar_path(exported))
    assert codes(exported) == {Code.SIDECAR_FOREIGN}


def test_the_topology_is_known_without_a_sidecar(exported: Path) -> None:
    sidecar_path(exported).unlink()
    edit(exported, change_an_attribute)
    assert codes(exported) == {Code.SIDECAR_MISSING, Code.TOPOLOGY_CHANGED}


def test_modules_are_accounted_for(exported: Path) -> None:
    """In the metadata: a missing parent, and a module that ran, without nodes or a reason."""

    def change(what: Callable[[dict], object]) -> Damage:
        def damage(model: onnx.ModelProto) -> None:
            entry = next(e for e in model.metadata_props if e.key == METADATA_KEY)
            content = json.loads(entry.value)
            what(content["modules"])
            entry.value = json.dumps(content)

        return damage

    original = exported.read_bytes()
    edit(exported, change(lambda modules: modules[""].update(children=[])))
    assert codes(exported) == {Code.METADATA_DISAGREES}, "the sidecar knows better"
    assert validate(exported, repair=True).valid
    assert exported.read_bytes() == original
    absent = next(
        path
        for path, r in json.loads(sidecar_path(exported).read_text())["modules"].items()
        if not r["nodes"]
    )
    sidecar_path(exported).unlink()
    for damage, code in (
        (change(lambda modules: modules[""].update(children=[])), Code.PARENT_MISSING),
        (change(lambda modules: modules[""].update(nodes=1)), Code.MODULE_UNACCOUNTED),
        (
            change(lambda modules: modules[absent].update(calls=1, status="unused")),
            Code.MODULE_UNACCOUNTED,
        ),
    ):
        edit(exported, damage)
        assert code in codes(exported)
        exported.write_bytes(original)


def test_invalid_onnx(exported: Path) -> None:
    edit(exported, lambda model: setattr(model.graph.node[0], "op_type", "NoSuchOperator"))
    result = validate(exported)
    assert [found.code for found in result.findings] == [Code.ONNX_INVALID]
    assert "NoSuchOperator" in result.findings[0].message
    assert "\n" not in result.findings[0].message


@pytest.mark.parametrize("content", [b"", b"just text\n", b"\x08\x07\x12"])
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        validate(path)
    with pytest.raises(FileError):
        validate(tmp_path)


def test_an_injected_doc_is_noticed(exported: Path) -> None:
    edit(exported, edit_tag(3, doc="not torch's"))
    assert codes(exported) == {Code.TAG_WRONG}


def test_a_reordered_file_is_still_valid(exported: Path) -> None:
    """The tags belong to their nodes in any topological order."""

    def swap(model: onnx.ModelProto) -> None:
        nodes = list(model.graph.node)
        for index in range(len(nodes) - 1):
            if not set(nodes[index].output) & set(nodes[index + 1].input):
                nodes[index], nodes[index + 1] = nodes[index + 1], nodes[index]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    before = exported.read_bytes()
    edit(exported, swap)
    if exported.read_bytes() != before:
        assert codes(exported) == set()


def test_initializers_do_not_matter_to_the_map(traced: Path) -> None:
    def damage(model: onnx.ModelProto) -> None:
        tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
        tensor.raw_data = np.frombuffer(tensor.raw_data, np.uint8)[::-1].tobytes()

    edit(traced, damage)
    assert codes(traced) == set(), "a fine-tuned copy has the same nodes and edges"


def test_the_record_reads_as_json(exported: Path) -> None:
    import msgspec

    edit(exported, lose)
    result = validate(exported, check_consistency=True)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Validation) == result
