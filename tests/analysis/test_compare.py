"""`compare` is exact, and ignores names, order and how values are stored."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import modelexport
from analysis.graphs import (
    graphs,
    isomorphic,
    renamed,
    reordered,
    save,
    sources_of,
    tensor,
    value_info,
)
from modelexport.analysis.compare import compare
from modelexport.errors import FileError, FormatError

pytestmark = pytest.mark.sanity
QUICK = settings(max_examples=60)


@pytest.mark.must
@QUICK
@given(model=graphs())
def test_reflexive(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = save(model, tmp_path / "a.onnx")
    result = compare(path, path)
    assert result.same_topology
    assert result.verdict == "identical topology, same tags"
    assert result.modules == ()


@pytest.mark.must
@QUICK
@given(data=st.data())
def test_names_and_order_do_not_matter(data: st.DataObject, tmp_path: Path) -> None:
    model = data.draw(graphs(12))
    other = renamed(data.draw(reordered(model)))
    assert compare(save(model, tmp_path / "a.onnx"), save(other, tmp_path / "b.onnx")).same_topology


@pytest.mark.must
@settings(QUICK, max_examples=150)
@given(data=st.data())
def test_exact_and_symmetric(data: st.DataObject, tmp_path: Path) -> None:
    """Compared with a search of all mappings, on similar graphs without dead nodes."""
    model = data.draw(graphs(5))
    other = data.draw(graphs(5)) if data.draw(st.booleans()) else _nudged(data, model)
    for one in (model, other):
        _output_all_ends(one)
    a, b = save(model, tmp_path / "a.onnx"), save(renamed(other), tmp_path / "b.onnx")
    answer = compare(a, b)
    assert answer.same_topology == compare(b, a).same_topology == isomorphic(model, other)
    assert answer.same_topology != bool(answer.modules or answer.elsewhere), (
        "a difference is reported, and only then"
    )


def _output_all_ends(model: onnx.ModelProto) -> None:
    """Make every value that no node consumes an output, so that no node is dead."""
    nodes = list(model.graph.node)
    consumed = {index for node in nodes for index in sources_of(node, nodes)}
    del model.graph.output[:]
    model.graph.output.extend(
        value_info(node.output[0]) for i, node in enumerate(nodes) if i not in consumed
    )


def _nudged(data: st.DataObject, model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace one input of one node."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    readers = [i for i, node in enumerate(copy.graph.node) if node.input and node.op_type != "If"]
    assume(readers)
    index = data.draw(st.sampled_from(readers))
    node = copy.graph.node[index]
    known = [
        "x",
        "y",
        *(w.name for w in copy.graph.initializer),
        *(n.output[0] for n in copy.graph.node[:index]),
    ]
    node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(st.sampled_from(known))
    return copy


def test_sharing_a_constant_is_not_having_two(tmp_path: Path) -> None:
    """Neither counts nor digests of what each node is computed from show this difference."""
    ones = [helper.make_node("Constant", [], [name], value=tensor(1.0)) for name in ("c0", "c1")]
    models = []
    for reads in (["c0", "c0", "c1"], ["c0", "c1", "c1"]):
        users = [
            helper.make_node(op, ["x", name], [op])
            for op, name in zip(["Add", "Mul", "Sub"], reads, strict=True)
        ]
        outputs = [value_info(op) for op in ("Add", "Mul", "Sub")]
        graph = helper.make_graph([*ones, *users], "g", [value_info("x")], outputs)
        models.append(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert not compare(
        *(save(model, tmp_path / f"{i}.onnx") for i, model in enumerate(models))
    ).same_topology


def model_of(nodes: list[onnx.NodeProto], outputs: list[str], **parts: object) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [value_info("x")], [value_info(name) for name in outputs])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("f", 1)], **parts
    )


@pytest.mark.regression
def test_swapped_inputs_are_a_difference(tmp_path: Path) -> None:
    """One is a graph input, the other the output of a node without inputs."""
    one = helper.make_node("Constant", [], ["c"], value=tensor(1.0))
    paths = [
        save(
            model_of([one, helper.make_node("Sub", reads, ["y"])], ["y"]),
            tmp_path / f"{reads[0]}.onnx",
        )
        for reads in (["x", "c"], ["c", "x"])
    ]
    assert not compare(*paths).same_topology


@pytest.mark.regression
def test_a_name_with_two_producers_is_compared(tmp_path: Path) -> None:
    """Such a model is invalid, but other programs write it; each node counts."""
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])]
    a = save(model_of(twice, ["y"]), tmp_path / "a.onnx")
    b = save(renamed(model_of(twice, ["y"])), tmp_path / "b.onnx")
    c = save(renamed(model_of(twice[1:], ["y"])), tmp_path / "c.onnx")
    assert compare(a, b).same_topology
    assert not compare(a, c).same_topology


@pytest.mark.regression
def test_dead_nodes_with_the_same_output_name_are_compared(tmp_path: Path) -> None:
    """The last producer of a name counts, so a consumer may come before its producer."""
    dead = [("Relu", "b", "a"), ("Abs", "a", "b"), ("Neg", "x", "a"), ("Relu", "x", "y")]
    model = model_of(
        [helper.make_node(op_type, [read], [made]) for op_type, read, made in dead], ["y"]
    )
    twin = save(renamed(model), tmp_path / "twin.onnx")
    assert compare(save(model, tmp_path / "m.onnx"), twin).same_topology


@pytest.mark.regression
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_function_sees_nothing_of_the_graph(name: str, tmp_path: Path) -> None:
    """A name that the function does not define is not that of the graph."""
    inner = [helper.make_node("Add", ["a", name], ["b"])]
    function = helper.make_function(
        "own", "Odd", ["a"], ["b"], inner, [helper.make_opsetid("", 18)]
    )
    calls = [
        helper.make_node("Relu", ["x"], [name]),
        helper.make_node("Odd", [name], ["z"], domain="own"),
    ]
    model = model_of(calls, ["z"])
    model.functions.append(function)
    path = save(model, tmp_path / "m.onnx")
    assert compare(path, save(renamed(model), tmp_path / "twin.onnx")).same_topology
    added = next(node for node in modelexport.load(path).graph.nodes if node.function)
    assert added.inputs == ("own::Odd/a", f"own::Odd/{name}")


@pytest.mark.regression
def test_a_value_may_have_the_key_of_one_in_a_function(tmp_path: Path) -> None:
    inner = [helper.make_node("Relu", ["a"], ["b"])]
    model = model_of([helper.make_node("Odd", ["x"], ["own::Odd/a"], domain="own")], ["own::Odd/a"])
    model.functions.append(
        helper.make_function("own", "Odd", ["a"], ["b"], inner, [helper.make_opsetid("", 18)])
    )
    path = save(model, tmp_path / "m.onnx")
    assert not compare(path, save(renamed(model), tmp_path / "twin.onnx")).weights.added


@pytest.mark.regression
@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.FLOAT, -(1 << 31), 99])
def test_invalid_sizes_and_types_are_compared_as_stored(kind: int, tmp_path: Path) -> None:
    sizes = [1 << 20, (1 << 63) - 1, -(1 << 63)]
    weight = TensorProto(name="w", dims=sizes, data_type=kind)
    node = helper.make_node(
        "Own", ["x", "w"], ["y"], domain="own", value=TensorProto(dims=sizes, data_type=kind)
    )
    model = model_of([node], ["y"])
    model.graph.initializer.append(weight)
    path = save(model, tmp_path / "m.onnx")
    model.graph.node[0].name = "other"
    assert compare(path, save(model, tmp_path / "twin.onnx")).same_topology


@pytest.mark.regression
def test_functions_are_compared_with_what_they_declare(tmp_path: Path) -> None:
    def with_default(value: float) -> onnx.ModelProto:
        inner = helper.make_node("LeakyRelu", ["a"], ["b"])
        inner.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope")
        function = helper.make_function(
            "f", "Leaky", ["a"], ["b"], [inner], [helper.make_opsetid("", 18)],
            attribute_protos=[helper.make_attribute("slope", value)],
        )  # fmt: skip
        return model_of(
            [helper.make_node("Leaky", ["x"], ["y"], domain="f")], ["y"], functions=[function]
        )

    a, b, c = (save(with_default(v), tmp_path / f"{i}.onnx") for i, v in enumerate((0.1, 0.1, 0.2)))
    assert compare(a, b).same_topology
    assert not compare(a, c).same_topology


def with_dead_nodes(*dead: onnx.NodeProto) -> onnx.ModelProto:
    return model_of([helper.make_node("Relu", ["x"], ["y"]), *dead], ["y"])


def test_dead_nodes_count(tmp_path: Path) -> None:
    """Nodes that no output needs: their number, operator, attributes and inputs matter."""
    one = helper.make_node("Constant", [], ["c"], value=tensor(1.0))
    two = helper.make_node("Constant", [], ["c"], value=tensor(2.0))
    dead = [
        (),
        (one,),
        (two,),
        (one, helper.make_node("Abs", ["c"], ["d"])),
        (two, helper.make_node("Abs", ["c"], ["d"])),
        (one, helper.make_node("Abs", ["y"], ["d"])),
        (one, helper.make_node("Abs", ["x"], ["d"])),
        (one, helper.make_node("Neg", ["c"], ["d"])),
        (one, helper.make_node("Abs", ["c"], ["d"]), helper.make_node("Abs", ["c"], ["e"])),
        (one, helper.make_node("Abs", ["c"], ["d"]), helper.make_node("Abs", ["d"], ["e"])),
    ]
    models = [with_dead_nodes(*nodes) for nodes in dead]
    for number, model in enumerate(models):
        save(model, tmp_path / f"{number}.onnx")
        save(renamed(model), tmp_path / f"renamed_{number}.onnx")
    for first, second in itertools.product(range(len(dead)), repeat=2):
        answer = compare(tmp_path / f"{first}.onnx", tmp_path / f"renamed_{second}.onnx")
        assert answer.same_topology == (first == second), (first, second)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_packed_values_are_compared_by_value(kind: int, tmp_path: Path) -> None:
    typed = helper.make_tensor("w", kind, [3], [1, 2, 3])
    raw = helper.make_tensor("w", kind, [3], bytes([0x21, 0x03]), raw=True)
    paths = []
    for number, weight in enumerate((typed, raw)):
        model = model_of([helper.make_node("Identity", ["w"], ["y"])], ["y"])
        model.graph.initializer.append(weight)
        paths.append(save(model, tmp_path / f"{number}.onnx"))
    assert compare(*paths).same_topology


def test_how_values_are_stored_does_not_matter(tmp_path: Path) -> None:
    """Raw bytes, typed numbers and a data file can hold the same tensor."""
    values = np.arange(6, dtype=np.float32)
    paths = []
    for kind in ("raw", "typed", "outside"):
        weight = helper.make_tensor(
            "w",
            TensorProto.FLOAT,
            [6],
            values.tobytes() if kind == "raw" else values,
            kind == "raw",
        )
        constant = helper.make_node(
            "Constant", [], ["c"], value=helper.make_tensor("", TensorProto.FLOAT, [6], values)
        )
        if kind == "raw":
            constant.attribute[0].t.CopyFrom(numpy_helper.from_array(values))
        if kind == "outside":
            weight.ClearField("float_data")
            weight.data_location = TensorProto.EXTERNAL
            weight.external_data.add(key="location", value="data.bin")
            weight.external_data.add(key="offset", value="4")
            weight.external_data.add(key="length", value="24")
            (tmp_path / "data.bin").write_bytes(b"skip" + values.tobytes())
        nodes = [constant, helper.make_node("Add", ["w", "c"], ["y"])]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [6])
        graph = helper.make_graph(nodes, "g", [], [output], [weight])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
        paths.append(save(model, tmp_path / f"{kind}.onnx"))
    for a, b in itertools.combinations(paths, 2):
        assert compare(a, b).same_topology
    (tmp_path / "data.bin").write_bytes(b"skip")
    with pytest.raises(FormatError, match="beyond the end"):
        compare(paths[0], paths[2])
    (tmp_path / "data.bin").unlink()
    with pytest.raises(FileError, match="missing"):
        compare(paths[0], paths[2])


def test_a_graph_with_a_cycle_is_compared(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    live = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([*nodes, live], "g", [value_info("x")], [value_info("y")])
    path = save(helper.make_model(graph), tmp_path / "cycle.onnx")
    twin = save(renamed(helper.make_model(graph)), tmp_path / "twin.onnx")
    assert compare(path, twin).same_topology
