"""A tagged graph of any size, made without torch: blocks of 12 modules and 100 nodes, five branches wide."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from modelexport.attribution.module_records import HierarchyMap, tagged_chunks
from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.tagged.records import ExportRecord, ModelRecord, encode_sidecar, sidecar_path
from modelexport.tagged.tables import complete_sidecar, consumer_tags, tags_of_node, tensor_infos

BLOCK = 100
WIDTH = 16
BRANCHES = 5
BLOCKS_A_STAGE = 40


class _Builder:
    """Nodes with the module that made each, and the modules."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.made_by: list[str] = []
        self.weights: list[TensorProto] = []
        self.children: dict[str, list[str]] = {"": []}
        self.classes: dict[str, str] = {"": "bench.Net"}
        self._random = np.random.default_rng(0)

    def module(self, parent: str, name: str, class_name: str) -> str:
        path = f"{parent}.{name}" if parent else name
        self.children[parent].append(name)
        self.children[path] = []
        self.classes[path] = class_name
        return path

    def node(self, path: str, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"/{path.replace('.', '/')}/{op_type}_{len(self.nodes)}"
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        self.made_by.append(path)
        return output

    def weight(self, name: str, *shape: int) -> str:
        values = self._random.standard_normal(shape, dtype=np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, path: str) -> str:
        value = numpy_helper.from_array(self._random.standard_normal(WIDTH, dtype=np.float32))
        return self.node(path, "Constant", value=value)


def _branch(b: _Builder, block: str, number: int, x: str) -> str:
    """Eighteen nodes, two of them in a hidden linear layer."""
    path = b.module(block, f"branch{number}", "bench.Branch")
    linear = b.module(path, "linear", "torch.nn.modules.linear.Linear")
    x = b.node(linear, "MatMul", x, b.weight(f"{linear}.weight", WIDTH, WIDTH))
    x = b.node(linear, "Add", x, b.weight(f"{linear}.bias", WIDTH))
    for turn in range(4):
        x = b.node(path, "Mul", x, b.constant(path))
        x = b.node(path, "Softmax", x, axis=1) if turn % 2 else b.node(path, "Relu", x)
    x = b.node(path, "Softmax", x, axis=1)
    x = b.node(path, "Relu", x)
    x = b.node(path, "Transpose", x, perm=[1, 0])
    return b.node(path, "Transpose", x, perm=[1, 0])


def _block(b: _Builder, stage: str, number: int, x: str) -> str:
    path = b.module(stage, str(number), "bench.Block")
    gate = b.module(path, "gate", "bench.Gate")
    gated = b.node(gate, "Sigmoid", x)
    gated = b.node(gate, "Mul", gated, x)
    out = x
    for branch in range(BRANCHES):
        out = b.node(path, "Add", out, _branch(b, path, branch, x))
    out = b.node(path, "Add", out, gated)
    out = b.node(path, "LeakyRelu", out, alpha=0.1)
    return b.node(path, "Tanh", out)


def write_graph(path: Path, nodes: int, types: bool = False) -> None:
    """Write a tagged model of this many nodes with its sidecar; with the type of every tensor, if asked for."""
    b = _Builder()
    encoder = b.module("", "encoder", "bench.Encoder")
    x = "x"
    stage = ""
    for number in range(nodes // BLOCK):
        if number % BLOCKS_A_STAGE == 0:
            stage = b.module(encoder, str(number // BLOCKS_A_STAGE), "bench.Stage")
        x = _block(b, stage, number % BLOCKS_A_STAGE, x)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])
    result = helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, WIDTH])
    graph = helper.make_graph(b.nodes, "main", [value], [result], b.weights)
    if types:
        for node in b.nodes[:-1]:
            shape = (
                [WIDTH]
                if not node.input
                else [WIDTH, 1]
                if "Transpose" in node.output[0]
                else [1, WIDTH]
            )
            graph.value_info.append(
                helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, shape)
            )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    hierarchy = _map(b, model)
    path.write_bytes(b"".join(tagged_chunks(model.SerializeToString(), hierarchy)))
    sidecar_path(path).write_bytes(encode_sidecar(hierarchy.sidecar))


def _map(b: _Builder, model: onnx.ModelProto) -> HierarchyMap:
    flat = flatten(model)
    tags = _tags(b)
    primary = [tags[path] for path in b.made_by]
    consumers = consumer_tags(flat, primary)
    node_tags = []
    for node, path, tag in zip(flat.nodes, b.made_by, primary, strict=True):
        told = tags_of_node(node, tag, consumers)
        node_tags.append(NodeTag(told, tag, len(told), "scope", path))
    counts = dict.fromkeys(b.children, 0)
    for path in b.made_by:
        while True:
            counts[path] += 1
            if not path:
                break
            path = path.rpartition(".")[0]
    modules = {
        path: ModuleRecord(
            tag=None if class_name.startswith("torch.") else tags[path],
            class_=class_name,
            shown=not class_name.startswith("torch."),
            status="nodes",
            calls=1,
            execution_order=order,
            forward_args=("x",),
            parameters=(),
            direct_parameters=(),
            children=tuple(b.children[path]),
            aliases=(),
            nodes=counts[path],
        )
        for order, (path, class_name) in enumerate(b.classes.items())
    }
    ends = tensor_infos(model.graph.input), tensor_infos(model.graph.output)
    export = ExportRecord("htp", "torchscript", "htp", None, 0, *ends, (), {})
    record = ModelRecord("bench.Net", "bench", "generated.onnx", 18, 10)
    return HierarchyMap(
        tuple(node_tags), complete_sidecar(flat, node_tags, record, export, modules)
    )


def _tags(b: _Builder) -> dict[str, str]:
    """The tag that each module carries: hidden ones that of the module above."""
    tags = {"": "/Net"}
    for path, class_name in b.classes.items():
        if path:
            parent, _, name = path.rpartition(".")
            tags[path] = tags[parent]
            if not class_name.startswith("torch."):
                short = class_name.rpartition(".")[2]
                tags[path] += (
                    f"/{short}.{name}"
                    if name.isdecimal() or name.startswith("branch")
                    else f"/{short}"
                )
    return tags


def write_disguised(source: Path, target: Path) -> None:
    """The same graph without tags, its tensors renamed and its nodes in another order."""
    model = onnx.load(source)
    names: dict[str, str] = {value.name: value.name for value in model.graph.input}
    for node in model.graph.node:
        node.ClearField("doc_string")
        node.ClearField("name")
        for place, name in enumerate(node.input):
            node.input[place] = names.setdefault(name, f"t{len(names)}")
        for place, name in enumerate(node.output):
            node.output[place] = names.setdefault(name, f"t{len(names)}")
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for value in model.graph.output:
        value.name = names[value.name]
    del model.metadata_props[:]
    nodes = _other_order(list(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    target.write_bytes(model.SerializeToString())


def _other_order(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """A random order that is still topological."""
    shuffle = random.Random(0)
    producer = {name: index for index, node in enumerate(nodes) for name in node.output}
    waits = [len({producer[name] for name in node.input if name in producer}) for node in nodes]
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for source in {producer[name] for name in node.input if name in producer}:
            readers.setdefault(source, []).append(index)
    ready = [index for index, count in enumerate(waits) if not count]
    order = []
    while ready:
        place = shuffle.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        index = ready.pop()
        order.append(nodes[index])
        for reader in readers.get(index, ()):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return order
