"""`compare` is exact, ignores names and order, and locates each difference."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import modelexport
from damage import copied, edit
from modelexport.analysis.compare import Comparison, compare
from modelexport.errors import FileError, FormatError
from zoo import ZOO, distinct

pytestmark = pytest.mark.sanity
QUICK = settings(max_examples=60)


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


# Graphs that are hard to distinguish: few operators, equal constants, dead nodes, subgraphs.


def tensor(value: float) -> TensorProto:
    return numpy_helper.from_array(np.full(2, value, np.float32))


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> onnx.ModelProto:
    weights = [tensor(draw(st.sampled_from([1.0, 2.0]))) for _ in range(draw(st.integers(0, 2)))]
    for number, weight in enumerate(weights):
        weight.name = f"w{number}"
    known = ["x", "y", *(weight.name for weight in weights)]
    nodes = []
    for number in range(draw(st.integers(1, most))):
        op_type = draw(st.sampled_from(["Constant", "Relu", "Add", "Add", "LeakyRelu", "If"]))
        reads = [
            draw(st.sampled_from(known)) for _ in range({"Constant": 0, "Add": 2}.get(op_type, 1))
        ]
        attributes: dict[str, object] = {}
        if op_type == "Constant":
            attributes["value"] = tensor(draw(st.sampled_from([1.0, 2.0])))
        elif op_type == "LeakyRelu":
            attributes["alpha"] = draw(st.sampled_from([0.1, 0.2]))
        elif op_type == "If":
            for name in ("then_branch", "else_branch"):
                inner = helper.make_node("Relu", [draw(st.sampled_from(known))], ["inner"])
                attributes[name] = helper.make_graph([inner], name, [], [value_info("inner")])
            reads = ["c"]
        nodes.append(helper.make_node(op_type, reads, [f"t{number}"], **attributes))
        known.append(f"t{number}")
    made = [f"t{number}" for number in range(len(nodes))]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))
    inputs = [
        value_info("x"),
        value_info("y"),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [value_info(name) for name in outputs], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def value_info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def renamed(model: onnx.ModelProto, prefix: str = "other_") -> onnx.ModelProto:
    """Rename every value and node of the graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)

    def walk(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.name = ""
            for names in (node.input, node.output):
                for place, name in enumerate(names):
                    names[place] = prefix + name if name else ""
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g)
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name = prefix + value.name

    walk(copy.graph)
    return copy


@st.composite
def reordered(draw: st.DrawFn, model: onnx.ModelProto) -> onnx.ModelProto:
    """Reorder the nodes topologically, and the initializers in any way."""
    nodes = list(model.graph.node)
    waiting = {index: _sources(node, nodes) for index, node in enumerate(nodes)}
    order: list[int] = []
    while waiting:
        ready = [index for index, sources in waiting.items() if sources <= set(order)]
        index = draw(st.sampled_from(ready))
        order.append(index)
        del waiting[index]
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes[index] for index in order)
    weights = draw(st.permutations(list(model.graph.initializer)))
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(weights)
    return copy


def _sources(node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> set[int]:
    reads = {
        *node.input,
        *(name for a in node.attribute if a.HasField("g") for n in a.g.node for name in n.input),
    }
    return {index for index, other in enumerate(nodes) if reads & set(other.output)}


def isomorphic(a: onnx.ModelProto, b: onnx.ModelProto) -> bool:
    """Try every mapping of nodes and initializers; for small graphs."""
    left, right = list(a.graph.node), list(b.graph.node)
    if len(left) != len(right) or len(a.graph.initializer) != len(b.graph.initializer):
        return False
    ends = [{v.name: ("input", i) for i, v in enumerate(m.graph.input)} for m in (a, b)]
    weight_ways = list(itertools.permutations(range(len(b.graph.initializer))))
    for order in itertools.permutations(range(len(right))):
        if any(left[i].op_type != right[j].op_type for i, j in enumerate(order)):
            continue
        for ways in weight_ways:
            names = dict(ends[0])
            others = dict(ends[1])
            for i, j in enumerate(order):
                names[left[i].output[0]] = others[right[j].output[0]] = ("node", i)
            for i, j in enumerate(ways):
                names[a.graph.initializer[i].name] = others[b.graph.initializer[j].name] = (
                    "weight",
                    i,
                )
            if _same(a, b, left, [right[j] for j in order], names, others, ways):
                return True
    return False


def _same(a, b, left, right, names, others, ways) -> bool:  # type: ignore[no-untyped-def]
    weights = all(
        a.graph.initializer[i].raw_data == b.graph.initializer[j].raw_data
        for i, j in enumerate(ways)
    )
    ends = [names[v.name] for v in a.graph.output] == [others[v.name] for v in b.graph.output]
    return (
        weights
        and ends
        and all(
            _description(x, names) == _description(y, others)
            for x, y in zip(left, right, strict=True)
        )
    )


def _description(node: onnx.NodeProto, names: dict[str, object]) -> object:
    attributes = []
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        if attribute.HasField("g"):
            attributes.append(
                (
                    attribute.name,
                    [names.get(name, name) for n in attribute.g.node for name in n.input],
                )
            )
        else:
            attributes.append((attribute.name, attribute.f, attribute.t.raw_data))
    return node.op_type, [names[name] for name in node.input], attributes


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
    consumed = {index for node in nodes for index in _sources(node, nodes)}
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


# Real exports


@pytest.mark.smoke
def test_the_baseline_against_the_tagged_file(exported: Path) -> None:
    baseline = modelexport.strip(exported, exported.with_name("base.onnx"))
    result = compare(baseline, exported)
    assert result.same_topology
    assert result.verdict == "identical topology, tags added"
    assert (result.tags.added, result.tags.removed, result.tags.changed) == (result.b.nodes, 0, 0)
    assert result.weights.changed == result.weights.added == result.weights.removed == ()
    assert compare(exported, baseline).verdict == "identical topology, tags removed"


@pytest.mark.parametrize("name", ["conditional_bodies", "lstm", "block_three_times"])
def test_subgraphs_and_shared_parts(name: str, tmp_path: Path) -> None:
    model, inputs = ZOO[name]()
    modelexport.export_model(distinct(model), inputs, tmp_path / "m.onnx", strategy="fx")
    edit(copied(tmp_path / "m.onnx", tmp_path / "copy"), lambda m: m.CopyFrom(renamed(m)))
    assert compare(tmp_path / "m.onnx", tmp_path / "copy" / "m.onnx").same_topology


def changes(a: Path, b: Path) -> dict[str | None, tuple[int, int, list[tuple[str, ...]]]]:
    result = compare(a, b)
    assert not result.same_topology
    return {
        c.module: (len(c.added), len(c.removed), [one.what for one in c.changed])
        for c in result.modules
    }


def module_of(node: onnx.NodeProto) -> str:
    return str(json.loads(node.doc_string)["hierarchy_module"])


@pytest.mark.parametrize("hidden_names", [False, True])
def test_a_change_is_reported_by_module(exported: Path, tmp_path: Path, hidden_names: bool) -> None:
    """An attribute, an operator or an edge: one module, one node and the right word."""
    proto = onnx.load(exported, load_external_data=False)
    axis = next(n for n in proto.graph.node if any(a.name == "epsilon" for a in n.attribute))
    add = [n for n in proto.graph.node if n.op_type == "Add"][-1]
    for index, (node, word) in enumerate(
        ((axis, "attributes"), (add, "operator"), (add, "inputs"))
    ):
        other = copied(exported, tmp_path / str(index))

        def damage(model: onnx.ModelProto, node: onnx.NodeProto = node, word: str = word) -> None:
            same = next(n for n in model.graph.node if n.output[0] == node.output[0])
            if word == "attributes":
                next(a for a in same.attribute if a.name == "epsilon").f *= 3
            elif word == "operator":
                same.op_type = "Mul"
            else:
                same.input[1] = same.input[0]
            if hidden_names:
                model.CopyFrom(renamed(model))

        edit(other, damage)
        assert changes(exported, other) == {module_of(node): (0, 0, [(word,)])}


def test_an_added_node_is_reported(exported: Path, tmp_path: Path) -> None:
    other = copied(exported, tmp_path / "other")

    def damage(model: onnx.ModelProto) -> None:
        node = model.graph.node[-1]
        extra = onnx.NodeProto()
        extra.CopyFrom(node)
        extra.op_type, extra.name = "Relu", "extra"
        extra.ClearField("attribute")
        del extra.input[:], extra.output[:]
        extra.input.append("before_relu")
        extra.output.append(node.output[0])
        node.output[0] = "before_relu"
        model.graph.node.append(extra)

    edit(other, damage)
    result = compare(exported, other)
    assert [(len(c.added), len(c.removed), len(c.changed)) for c in result.modules] == [(1, 0, 0)]
    assert sum(b - a for a, b in result.tags.distribution.values()) == 1


def test_a_changed_initializer_is_a_difference(traced: Path, tmp_path: Path) -> None:
    other = copied(traced, tmp_path / "other")
    name = ""

    def damage(model: onnx.ModelProto) -> None:
        nonlocal name
        tensor = max(model.graph.initializer, key=lambda t: len(t.raw_data))
        name = tensor.name
        tensor.raw_data = tensor.raw_data[:-1] + bytes([tensor.raw_data[-1] ^ 1])

    edit(other, damage)
    result = compare(traced, other)
    assert not result.same_topology
    assert result.weights.changed == (name,)
    assert {one.what for c in result.modules for one in c.changed} == {("weights",)}
    assert result.tags.changed == 0


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


def test_opset_inputs_and_outputs_are_reported(exported: Path, tmp_path: Path) -> None:
    other = copied(exported, tmp_path / "other")

    def damage(model: onnx.ModelProto) -> None:
        model.opset_import[0].version += 1
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"

    edit(other, damage)
    result = compare(exported, other)
    assert result.same_topology
    assert (result.same_opset, result.same_inputs, result.same_outputs) == (False, True, False)


def test_the_record_reads_as_json(exported: Path) -> None:
    import msgspec

    result = compare(exported, exported)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Comparison) == result


def test_a_graph_with_a_cycle_is_compared(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    live = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([*nodes, live], "g", [value_info("x")], [value_info("y")])
    path = save(helper.make_model(graph), tmp_path / "cycle.onnx")
    twin = save(renamed(helper.make_model(graph)), tmp_path / "twin.onnx")
    assert compare(path, twin).same_topology
