"""Each kind of damage has its own code, and other records can repair it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelexport
from damage import Damage, copied, edit, edit_sidecar, everything, net
from modelexport.analysis.findings import Code
from modelexport.analysis.validate import Repair, Validation, validate
from modelexport.errors import FileError, FormatError
from modelexport.graph.flat import flatten
from modelexport.tagged.records import METADATA_KEY, sidecar_path
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity


def edit_tag(index: int, **values: object) -> Damage:
    def damage(model: onnx.ModelProto) -> None:
        node = model.graph.node[index]
        node.doc_string = json.dumps({**json.loads(node.doc_string), **values})

    return damage


def codes(path: Path) -> set[str]:
    return {found.code for found in validate(path, check_consistency=True).findings}


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


def cut_short(model: onnx.ModelProto) -> None:
    node = model.graph.node[3]
    node.doc_string = node.doc_string[: len(node.doc_string) // 2]


def lose(model: onnx.ModelProto) -> None:
    model.graph.node[3].ClearField("doc_string")


def wear_anothers_tag(model: onnx.ModelProto) -> None:
    """Copy the tag of a node of another module."""
    mine = json.loads(model.graph.node[3].doc_string)
    for node in model.graph.node:
        if json.loads(node.doc_string)["hierarchy_module"] != mine["hierarchy_module"]:
            model.graph.node[3].doc_string = node.doc_string
            return
    raise AssertionError("all nodes are of one module")


def add_a_node(model: onnx.ModelProto) -> None:
    source = model.graph.node[3].output[0]
    model.graph.node.insert(4, onnx.helper.make_node("Identity", [source], ["added_by_hand"]))


def remove_a_node(model: onnx.ModelProto) -> None:
    node = model.graph.node[-1]
    node.output[0], model.graph.output[0].name = "renamed_by_hand", "renamed_by_hand"


def move_an_edge(model: onnx.ModelProto) -> None:
    """Let a node with two computed inputs consume one of them twice."""
    made = {name for node in model.graph.node for name in node.output}
    node = next(
        n
        for n in model.graph.node
        if len([name for name in n.input if name in made]) == 2 and n.op_type == "Add"
    )
    node.input[1] = node.input[0]


def change_an_attribute(model: onnx.ModelProto) -> None:
    next(a for node in model.graph.node for a in node.attribute if a.name == "epsilon").f *= 2


def change_an_operator(model: onnx.ModelProto) -> None:
    next(n for n in model.graph.node if n.op_type == "Add").op_type = "Sub"


DAMAGES: dict[Code, Damage] = {
    Code.DOC_MALFORMED: cut_short,
    Code.DOC_MISSING: lose,
    Code.TAG_WRONG: wear_anothers_tag,
    Code.TAG_UNKNOWN: edit_tag(
        3, hierarchy_path="/No/Such", hierarchy_tags=["/No/Such"], hierarchy_count=1
    ),
    Code.TAG_FORMAT: edit_tag(
        3, hierarchy_path="no slash", hierarchy_tags=["no slash"], hierarchy_count=1
    ),
    Code.COUNT_WRONG: edit_tag(3, hierarchy_count=7),
    Code.NODE_ADDED: add_a_node,
    Code.NODE_REMOVED: remove_a_node,
    Code.EDGE_MOVED: move_an_edge,
    Code.ATTRIBUTE_CHANGED: change_an_attribute,
    Code.OPERATOR_CHANGED: change_an_operator,
    Code.METADATA_MISSING: lambda model: model.ClearField("metadata_props"),
    Code.METADATA_UNREADABLE: lambda model: setattr(model.metadata_props[0], "value", "{"),
}


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


def another_model(content: dict) -> None:
    content["model"]["class"] = "some.other.Model"


def with_module(change: Callable[[dict], object]) -> Callable[[dict], None]:
    return lambda content: change(content["modules"])


SIDECAR_DAMAGES: dict[Code, Callable[[dict], object]] = {
    Code.SIDECAR_FOREIGN: another_model,
    Code.SIDECAR_WRONG: lambda content: content["statistics"].update(nodes=1),
    Code.TENSOR_WRONG: lambda content: next(iter(content["tensors"].values())).update(
        consumers=["/No/Such"]
    ),
    Code.HIERARCHY_UNMET: lambda content: content["expected_hierarchy"].reverse(),
    Code.METADATA_DISAGREES: with_module(lambda modules: modules[""].update(calls=5)),
    Code.NODE_ADDED: lambda content: content["nodes"].pop(next(iter(content["nodes"]))),
}


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


# Repair


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
