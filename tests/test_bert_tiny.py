"""docs/bert-tiny.md is true: everything on it is counted again with plain onnx, and its values with PyTorch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from docs.make_bert_tiny import (
    COMPONENTS,
    PAGE,
    STRATEGIES,
    Component,
    component,
    export_demo,
    page,
)

import modelexport
from modelexport.source.example_inputs import InputRequest, make_example_inputs
from modelexport.source.load import load_source
from proof import check_map, check_results, onnx_values, pytorch_values, value_test
from test_architectures import BERT_TAGS

pytestmark = [pytest.mark.must, pytest.mark.regression, pytest.mark.integration]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return export_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(params=STRATEGIES)
def file(request: pytest.FixtureRequest, demo: dict[str, Path]) -> Path:
    return demo[request.param]


def example(file: Path) -> tuple[Any, Any]:
    """The demo's model as it was saved, and the inputs that it was exported with."""
    source = load_source(str(file.parent / "bert-tiny"))
    return source.model, make_example_inputs(source, InputRequest(), 0).inputs


def described(file: Path) -> Iterator[tuple[onnx.NodeProto, dict[str, Any]]]:
    """Each node with what its own doc_string says, and nothing else."""
    for node in onnx.load(file, load_external_data=False).graph.node:
        yield node, json.loads(node.doc_string)


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a title of the page, without its head."""
    lines = PAGE.read_text(encoding="utf-8").split(f"\n{title}", 1)[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return table


def shown() -> list[list[str]]:
    *table, sums = rows("## The 26 modules")
    assert sums[1] == "sum"
    return table


def test_the_page_is_what_the_script_writes(demo: dict[str, Path]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(demo)


def test_26_tags_each_once(file: Path) -> None:
    tags = [row[1] for row in shown()]
    assert len(tags) == len(set(tags)) == 26
    assert set(tags) == BERT_TAGS
    assert {told["hierarchy_path"] for _, told in described(file)} <= BERT_TAGS
    assert (
        json.loads(file.with_name("bert-tiny_hierarchy.json").read_text())["expected_hierarchy"]
        == tags
    )


def test_the_order_is_that_of_the_calls(file: Path) -> None:
    model, inputs = example(file)
    called: dict[str, None] = {}
    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: called.setdefault(path))
        for path, module in model.named_modules()
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    table = [(row[0], row[2].replace("(the model)", "")) for row in shown()]
    table += [(row[0], row[1]) for row in rows("## The hidden modules")]
    assert {path for _, path in table} == {path for path, _ in model.named_modules()}
    ran = [path for order, path in sorted(table, key=lambda row: int(row[0] or -1)) if order]
    lists = [path for path in ran if path not in called]
    assert lists == ["encoder.layer"]
    assert [path for path in ran if path not in lists] == list(called)
    assert ran[ran.index("encoder.layer") + 1] == "encoder.layer.0"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nodes_are_counted_right_and_add_up(strategy: str, demo: dict[str, Path]) -> None:
    told = [told for _, told in described(demo[strategy])]
    column = list(STRATEGIES).index(strategy)
    by_tag = Counter(one["hierarchy_path"] for one in told)
    by_module = Counter(one["hierarchy_module"] for one in told)
    for row in shown():
        tag, own, whole = row[1], int(row[6 + column]), int(row[8 + column])
        assert own == by_tag[tag]
        assert whole == sum(
            count for found, count in by_tag.items() if f"{found}/".startswith(f"{tag}/")
        )
    for row in rows("## The hidden modules"):
        assert int(row[6 + column]) == by_module[row[1]]
        assert {one["hierarchy_path"] for one in told if one["hierarchy_module"] == row[1]} <= {
            row[5]
        }
    assert sum(int(row[6 + column]) for row in shown()) == len(told)
    assert int(rows("## The 26 modules")[-1][6 + column]) == len(told)
    operators = Counter(node.op_type for node, _ in described(demo[strategy]))
    table = {row[0]: int(row[1 + column]) for row in rows("## Operators")}
    assert table.pop("all") == len(told)
    assert {name: count for name, count in table.items() if count} == operators


def recounted(file: Path, module: str) -> Component:
    """One module's part by the definitions on the page, from the doc_strings alone."""
    model = onnx.load(file, load_external_data=False)
    members = [
        f"{json.loads(node.doc_string)['hierarchy_module']}.".startswith(f"{module}.")
        for node in model.graph.node
    ]
    maker = {name: place for place, node in enumerate(model.graph.node) for name in node.output}
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    uses = [
        (name, place) for place, node in enumerate(model.graph.node) for name in node.input if name
    ]
    used = [(name, place) for name, place in uses if name not in sizes]
    edges = Counter(
        (name in maker and members[maker[name]], members[place]) for name, place in used
    )
    ends = sum(members[maker[value.name]] for value in model.graph.output)
    read = {name for name, place in uses if name in sizes and members[place]}
    shared = {name for name, place in uses if name in sizes and not members[place]}
    return Component(
        operations=sum(members),
        operators=dict(
            Counter(
                node.op_type for node, own in zip(model.graph.node, members, strict=True) if own
            )
        ),
        inside=edges[True, True],
        entering=edges[False, True],
        leaving=edges[True, False] + ends,
        weights=len(read),
        parameters=sum(sizes[name] for name in read),
        only_here=sum(sizes[name] for name in read - shared),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_components_are_counted_right(strategy: str, demo: dict[str, Path]) -> None:
    table = {row[0]: row[1:] for row in rows(f"### {strategy},")}
    assert list(table) == list(COMPONENTS)
    for module, cells in table.items():
        found = recounted(demo[strategy], module)
        assert component(demo[strategy], module) == found
        *numbers, operators = cells
        assert [int(number.replace(",", "")) for number in numbers] == [found[0], *found[2:]]
        assert {
            word.split()[0]: int(word.split()[1]) for word in operators.split(", ")
        } == found.operators


def test_every_value_of_every_module_is_at_its_nodes(file: Path) -> None:
    model, inputs = example(file)
    exported, returned = modelexport.load(file), pytorch_values(model, inputs)
    check_map(exported, returned)
    values = onnx_values(file, inputs)
    verdict = value_test(exported, returned, values)
    assert verdict.failures == []
    assert len(returned) == 45
    assert verdict.checked > len(returned)
    assert check_results(exported, returned, values) > 26


def test_what_the_page_says_of_absorbed_and_unused(file: Path) -> None:
    hidden = {row[1]: row for row in rows("## The hidden modules")}
    statuses = {path: row[3:5] for path, row in hidden.items() if row[2] == "Dropout"}
    assert Counter(map(tuple, statuses.values())) == {
        ("absorbed", "absorbed"): 5,
        ("unused", "unused"): 2,
    }
    analysis = modelexport.analyze(file)
    assert {*analysis.absorbed, *analysis.unused} == set(statuses)
