"""Extracted and partitioned modules of all models compute what they did in the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelexport
from exports import CASES, export
from extraction.running import Values, identical, run
from modelexport.extraction.extract import list_modules
from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleRecord
from modelexport.modules.tree import is_within
from modelexport.tagged.model import TaggedModel
from proof import Returned, onnx_values, pytorch_values, same

pytestmark = [
    pytest.mark.must,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::modelexport.ExtractionWarning"),
]


def calls(record: ModuleRecord) -> list[int | None]:
    return [None] if record.calls < 2 else [None, *range(record.calls)]


def modules_with_nodes(exported: TaggedModel) -> dict[str, ModuleRecord]:
    return {path: record for path, record in exported.modules.items() if record.nodes}


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_every_module_extracts_and_runs(name: str, strategy: str, tmp_path: Path) -> None:
    path, model, inputs = export(name, strategy, tmp_path)
    exported = modelexport.load(path)
    values, returned = onnx_values(path, inputs), pytorch_values(model, inputs)
    listed = {module.module: module for module in list_modules(path)}
    assert set(listed) == set(modules_with_nodes(exported))
    for module, record in modules_with_nodes(exported).items():
        for call in calls(record):
            if name == "recursive_root" and call == 3:
                continue  # that call gives back what it is given
            extracted = modelexport.extract(path, module, tmp_path / "piece.onnx", call=call)
            place = f"{module!r} call {call}"
            assert (
                modelexport.validate(tmp_path / "piece.onnx", check_consistency=True).findings == ()
            ), place
            check_nodes(exported, extracted.record, module, call)
            if call is None:
                assert listed[module].inputs == extracted.record.inputs, place
                assert listed[module].outputs == extracted.record.outputs, place
            if any(value.name not in values for value in extracted.record.inputs):
                assert "conditional" in name, place  # the branch that was not taken has no values
                continue
            given = run(tmp_path / "piece.onnx", values)
            for tensor, value in given.items():
                assert tensor not in values or close(value, values[tensor]), f"{place}: {tensor}"
            if module and record.status == "nodes":
                check_result(exported, record, returned.get(module, []), call, given)


def close(first: np.ndarray, second: np.ndarray) -> bool:
    return identical(first, second) or same(second, first)


def check_nodes(exported: TaggedModel, record: Any, module: str, call: int | None) -> None:
    """Check that the model has the module's nodes and the constants that its record lists."""
    extracted = modelexport.load(exported.path.with_name("piece.onnx"))
    own = {
        node.key
        for node, tag in exported.items()
        if tag is not None and is_within(tag.hierarchy_module, module)
    }
    keys = {node.key.rpartition("/")[2] for node in extracted.graph.nodes}
    fixed = set(extracted.graph.initializers) & set(record.pulled_in)
    foreign = (
        {node.key for node in extracted.graph.nodes} - {key.rpartition("/")[2] for key in own} - own
    )
    assert foreign <= set(record.pulled_in)
    assert record.nodes == len(extracted.graph.nodes) - len(record.pulled_in) + len(fixed)
    if call is None:
        assert record.nodes == len(own)
        assert {key.rpartition("/")[2] for key in own} <= keys


def check_result(
    exported: TaggedModel,
    record: ModuleRecord,
    returned: list[Returned],
    call: int | None,
    given: Values,
) -> None:
    """Check that what the module returned in PyTorch is among the outputs."""
    for number, (names, results) in enumerate(zip(record.results, returned, strict=False)):
        if call not in (None, number):
            continue
        for tensor, result in zip(names, results.results, strict=True):
            made = exported.graph.producer.get(tensor or "")
            tag = None if made is None else exported.tags[made]
            own = next(path for path, found in exported.modules.items() if found is record)
            if result is not None and tag is not None and is_within(tag.hierarchy_module, own):
                assert tensor in given, f"{own!r} does not give {tensor}"
                assert (
                    same(result, given[tensor])
                    if result.dtype.kind == "f"
                    else identical(result, given[tensor])
                )


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_partition_computes_the_module_bit_for_bit(
    name: str, strategy: str, tmp_path: Path
) -> None:
    path, _, inputs = export(name, strategy, tmp_path)
    exported = modelexport.load(path)
    values = onnx_values(path, inputs)
    for module, record in modules_with_nodes(exported).items():
        if not record.children:
            continue
        whole = modelexport.extract(path, module)
        if any(value.name not in values for value in whole.record.inputs):
            assert "conditional" in name, module  # inside a branch that was not taken
            continue
        found = {value.name: values[value.name] for value in whole.record.inputs}
        expected = run(whole.model, found)
        held: list[str] = []
        pulled: list[str] = []
        for extracted in modelexport.partition(path, module):
            assert {value.name for value in extracted.record.inputs} <= set(found), (
                "the extracted models are in no order that runs"
            )
            found.update(run(extracted.model, found))
            pulled += extracted.record.pulled_in
            held += [
                node.key
                for node in flatten(extracted.model).nodes
                if node.key not in extracted.record.pulled_in
            ]
        for tensor, value in expected.items():
            assert identical(value, found[tensor]), f"{module!r}: {tensor}"
        assert len(held) == len(set(held)), "a node is in two extracted models"
        own = {node.key for node in flatten(whole.model).nodes} - set(whole.record.pulled_in)
        assert own <= {*held, *pulled}, "a node is in no extracted model"
