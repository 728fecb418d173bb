"""Damage is repaired to the byte from other records, and nothing is guessed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelexport
from analysis.damages import (
    DAMAGES,
    SIDECAR_DAMAGES,
    add_a_node,
    change_an_attribute,
    codes,
    edit_tag,
    lose,
    move_an_edge,
)
from damage import Damage, copied, edit, edit_sidecar, everything
from modelexport.analysis.findings import Code
from modelexport.analysis.validate import Repair, validate
from modelexport.graph.flat import flatten
from modelexport.tagged.records import sidecar_path
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity


@pytest.mark.must
@settings(max_examples=12)
@given(data=st.data())
def test_any_fifth_of_the_tags_comes_back_to_the_byte(
    exports: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    strategy = data.draw(st.sampled_from(sorted(exports)))
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    path = copied(exports[strategy], tmp_path / "copy")
    original = everything(path.parent)
    count = len(modelexport.load(path).tags)
    lost = data.draw(
        st.lists(st.integers(0, count - 1), min_size=count // 5, max_size=count // 5, unique=True)
    )
    how = data.draw(st.sampled_from(["clear", "empty", "cut"]))

    def damage(model: onnx.ModelProto) -> None:
        for index in lost:
            node = model.graph.node[index]
            if how == "clear":
                node.ClearField("doc_string")
            elif node.doc_string:
                node.doc_string = "" if how == "empty" else node.doc_string[:20]

    edit(path, damage)
    damaged = path.read_bytes()
    result = validate(path, repair=True)
    assert result.valid
    after = everything(path.parent)
    backups = {name for name in after if ".bak" in name}
    assert {name: content for name, content in after.items() if name not in backups} == original
    if damaged != original["m.onnx"]:
        assert result.repair is not None
        assert [after[name] for name in result.repair.backups] == [damaged]


@pytest.mark.parametrize(
    "code",
    [
        Code.TAG_WRONG,
        Code.TAG_UNKNOWN,
        Code.COUNT_WRONG,
        Code.METADATA_MISSING,
        Code.METADATA_UNREADABLE,
    ],
    ids=str,
)
def test_other_damage_is_repaired_to_the_byte(exported: Path, code: Code) -> None:
    original = everything(exported.parent)
    edit(exported, DAMAGES[code])
    result = validate(exported, repair=True)
    assert result.valid
    assert result.repair is not None
    assert result.repair.backups == ("m.onnx.bak",), "the sidecar was fine"
    after = everything(exported.parent)
    assert {name: content for name, content in after.items() if ".bak" not in name} == original


@pytest.mark.parametrize("damage", [*SIDECAR_DAMAGES.values(), None])
def test_the_sidecar_is_rebuilt_to_the_byte(
    exported: Path, damage: Callable[[dict], object] | None
) -> None:
    sidecar = sidecar_path(exported)
    original = sidecar.read_bytes()
    if damage is None:
        sidecar.unlink()
    else:
        edit_sidecar(exported, damage)
    result = validate(exported, repair=True)
    assert result.valid, result.findings
    assert sidecar.read_bytes() == original


def test_counts_are_repaired_without_a_sidecar_and_then_the_sidecar(exported: Path) -> None:
    original = everything(exported.parent)
    sidecar_path(exported).unlink()
    edit(exported, edit_tag(3, hierarchy_count=9))
    assert validate(exported, repair=True).valid
    after = everything(exported.parent)
    assert {name: content for name, content in after.items() if ".bak" not in name} == original


@pytest.mark.parametrize("damage", [move_an_edge, change_an_attribute, add_a_node])
def test_a_changed_graph_is_reported_not_repaired(exported: Path, damage: Damage) -> None:
    edit(exported, damage)
    before = everything(exported.parent)
    assert not validate(exported, repair=True).valid
    assert everything(exported.parent) == before, "nothing is guessed, so nothing is written"


def test_a_damaged_sidecar_does_not_spoil_good_tags(exported: Path) -> None:
    """Two records swapped, a method, a call, a name: the digests show that the tags are intact."""

    def swap(content: dict) -> None:
        first, *others = content["nodes"].values()
        last = next(other for other in others if other["module"] != first["module"])
        for key in ("module", "tag", "tags", "method"):
            first[key], last[key] = last[key], first[key]

    original = everything(exported.parent)
    for damage in (
        swap,
        lambda content: next(iter(content["nodes"].values())).update(method="root"),
        lambda content: next(iter(content["nodes"].values())).update(call=5),
        lambda content: next(iter(content["nodes"].values())).update(name="other"),
        lambda content: content["modules"].clear(),
    ):
        edit_sidecar(exported, damage)
        assert codes(exported) <= {
            Code.SIDECAR_WRONG,
            Code.TENSOR_WRONG,
            Code.METADATA_DISAGREES,
            Code.HIERARCHY_UNMET,
        }
        assert codes(exported)
        assert validate(exported, repair=True).valid
        after = everything(exported.parent)
        assert {name: content for name, content in after.items() if ".bak" not in name} == original


def test_an_unproven_sidecar_does_not_spoil_good_tags(exported: Path) -> None:
    """Without metadata no digest proves a record, and this sidecar does not add up."""

    def move(content: dict) -> None:
        record, *others = content["nodes"].values()
        other = next(one for one in others if one["module"] != record["module"])
        record.update(module=other["module"], tag=other["tag"], tags=[other["tag"]])

    edit(exported, DAMAGES[Code.METADATA_MISSING])
    edit_sidecar(exported, move)
    before = everything(exported.parent)
    result = validate(exported, repair=True)
    assert {Code.METADATA_MISSING, Code.TAG_WRONG} <= {found.code for found in result.findings}
    assert everything(exported.parent) == before


def test_changed_tags_are_not_copied_to_a_sidecar(exported: Path) -> None:
    """Without a sidecar a plausible wrong tag is detected, and no sidecar is built from it."""
    sidecar_path(exported).unlink()
    edit(exported, edit_tag(3, hierarchy_method="root"))
    assert not validate(exported, repair=True).valid
    assert not sidecar_path(exported).exists()


def test_without_any_record_nothing_is_guessed(exported: Path) -> None:
    edit(exported, lose)
    sidecar_path(exported).unlink()
    before = everything(exported.parent)
    assert not validate(exported, repair=True).valid
    assert everything(exported.parent) == before


def test_an_intact_file_is_not_rewritten(exported: Path) -> None:
    before = everything(exported.parent)
    result = validate(exported, repair=True)
    assert result.repair is not None
    assert result.repair == Repair((), False, False, ())
    assert everything(exported.parent) == before


def test_backups_are_never_overwritten(exported: Path) -> None:
    names = []
    for _ in range(2):
        edit(exported, lose)
        result = validate(exported, repair=True)
        assert result.repair is not None
        names += result.repair.backups
    assert len(set(names)) == 2


@pytest.mark.integration
@pytest.mark.parametrize("name", ["conditional_bodies", "lstm", "block_three_times"])
def test_tags_in_subgraphs_and_of_calls_are_repaired(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    path = tmp_path / "m.onnx"
    modelexport.export_model(distinct(model), inputs, path, strategy="fx")
    assert codes(path) == set()
    original = everything(tmp_path)
    edit(path, lambda proto: [node.ClearField("doc_string") for node in flatten(proto).protos[::3]])
    sidecar = sidecar_path(path).read_bytes()
    result = validate(path, repair=True)
    assert result.valid
    assert path.read_bytes() == original["m.onnx"]
    assert sidecar_path(path).read_bytes() == sidecar
