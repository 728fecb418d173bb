"""Graphs that are hard to distinguish, and a search of all mappings to compare them with."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


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
    waiting = {index: sources_of(node, nodes) for index, node in enumerate(nodes)}
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


def sources_of(node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> set[int]:
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
