"""docs/bert-tiny.md is true: its counts are repeated with onnx, its values with PyTorch."""

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
from exports import shared_folder
from modelexport.source.example_inputs import InputRequest, make_example_inputs
from modelexport.source.load import load_source
from proof import check_map, check_results, onnx_values, pytorch_values, value_test
from test_architectures import BERT_TAGS

pytestmark = [pytest.mark.must, pytest.mark.regression, pytest.mark.integration]


@pytest.fixture(scope="module")
def demo() -> dict[str, Path]:
    """Return the files of the demo by strategy."""
    folder = shared_folder("bert-tiny", export_demo)
    return {strategy: folder / strategy / "bert-tiny.onnx" for strategy in STRATEGIES}


@pytest.fixture(params=STRATEGIES)
def file(request: pytest.FixtureRequest, demo: dict[str, Path]) -> Path:
    return demo[request.param]


def example(file: Path) -> tuple[Any, Any]:
    """Return the model of the demo as it was saved, and the inputs of its export."""
    source = load_source(str(file.parent / "bert-tiny"))
    return source.model, make_example_inputs(source, InputRequest(), 0).inputs


def described(file: Path) -> Iterator[tuple[onnx.NodeProto, dict[str, Any]]]:
    """Yield each node with the content of its own doc_string."""
    for node in onnx.load(file, load_external_data=False).graph.node:
        yield node, json.loads(node.doc_string)


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table below a title of the page, without its head."""
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
    assert {tag["hierarchy_path"] for _, tag in described(file)} <= BERT_TAGS
    sidecar = json.loads(file.with_name("bert-tiny_hierarchy.json").read_text())
    assert sidecar["expected_hierarchy"] == tags


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
    tags = [tag for _, tag in described(demo[strategy])]
    column = list(STRATEGIES).index(strategy)
    by_tag = Counter(tag["hierarchy_path"] for tag in tags)
    by_module = Counter(tag["hierarchy_module"] for tag in tags)
    for row in shown():
        tag, own, whole = row[1], int(row[6 + column]), int(row[8 + column])
        assert own == by_tag[tag]
        assert whole == sum(
            count for below, count in by_tag.items() if f"{below}/".startswith(f"{tag}/")
        )
    for row in rows("## The hidden modules"):
        assert int(row[6 + column]) == by_module[row[1]]
        own = [tag for tag in tags if tag["hierarchy_module"] == row[1]]
        assert {tag["hierarchy_path"] for tag in own} <= {row[5]}
    assert sum(int(row[6 + column]) for row in shown()) == len(tags)
    assert int(rows("## The 26 modules")[-1][6 + column]) == len(tags)
    operators = Counter(node.op_type for node, _ in described(demo[strategy]))
    table = {row[0]: int(row[1 + column]) for row in rows("## Operators")}
    assert table.pop("all") == len(tags)
    assert {name: count for name, count in table.items() if count} == operators


def recount(file: Path, module: str) -> Component:
    """Count the part of one module as the page defines it, from the doc_strings alone."""
    model = onnx.load(file, load_external_data=False)
    members = [
        f"{json.loads(node.doc_string)['hierarchy_module']}.".startswith(f"{module}.")
        for node in model.graph.node
    ]
    producer = {name: index for index, node in enumerate(model.graph.node) for name in node.output}
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    uses = [
        (name, index) for index, node in enumerate(model.graph.node) for name in node.input if name
    ]
    edges = Counter(
        (name in producer and members[producer[name]], members[index])
        for name, index in uses
        if name not in sizes
    )
    ends = sum(members[producer[value.name]] for value in model.graph.output)
    read = {name for name, index in uses if name in sizes and members[index]}
    shared = {name for name, index in uses if name in sizes and not members[index]}
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
        initializers=len(read),
        stored_values=sum(sizes[name] for name in read),
        only_here=sum(sizes[name] for name in read - shared),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_components_are_counted_right(strategy: str, demo: dict[str, Path]) -> None:
    table = {row[0]: row[1:] for row in rows(f"### {strategy},")}
    assert list(table) == list(COMPONENTS)
    for module, cells in table.items():
        expected = recount(demo[strategy], module)
        assert component(demo[strategy], module) == expected
        *numbers, operators = cells
        assert [int(number.replace(",", "")) for number in numbers] == [expected[0], *expected[2:]]
        pairs = (pair.split() for pair in operators.split(", "))
        assert {name: int(count) for name, count in pairs} == expected.operators


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
