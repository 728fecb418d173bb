"""Generate a tagged graph of any size without torch: blocks of 12 modules and 100 nodes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from modelexport.graph.flat import flatten
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.tagged.hierarchy_map import HierarchyMap, tagged_chunks
from modelexport.tagged.records import ExportRecord, ModelRecord, encode_sidecar, sidecar_path
from modelexport.tagged.tables import complete_sidecar, consumer_tags, tags_of_node, tensor_infos

BLOCK = 100
WIDTH = 16
BRANCHES = 5
BLOCKS_A_STAGE = 40


class _Builder:
    """Collects nodes, the module of each, and the modules."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.owners: list[str] = []
        self.initializers: list[TensorProto] = []
        self.children: dict[str, list[str]] = {"": []}
        self.classes: dict[str, str] = {"": "bench.Net"}
        self._random = np.random.default_rng(0)

    def add_module(self, parent: str, name: str, class_name: str) -> str:
        path = f"{parent}.{name}" if parent else name
        self.children[parent].append(name)
        self.children[path] = []
        self.classes[path] = class_name
        return path

    def add_node(self, path: str, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"/{path.replace('.', '/')}/{op_type}_{len(self.nodes)}"
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        self.owners.append(path)
        return output

    def add_initializer(self, name: str, *shape: int) -> str:
        values = self._random.standard_normal(shape, dtype=np.float32)
        self.initializers.append(numpy_helper.from_array(values, name))
        return name

    def add_constant(self, path: str) -> str:
        value = numpy_helper.from_array(self._random.standard_normal(WIDTH, dtype=np.float32))
        return self.add_node(path, "Constant", value=value)


def _add_branch(b: _Builder, block: str, number: int, x: str) -> str:
    """Add eighteen nodes, two of them in a hidden linear layer."""
    path = b.add_module(block, f"branch{number}", "bench.Branch")
    linear = b.add_module(path, "linear", "torch.nn.modules.linear.Linear")
    x = b.add_node(linear, "MatMul", x, b.add_initializer(f"{linear}.weight", WIDTH, WIDTH))
    x = b.add_node(linear, "Add", x, b.add_initializer(f"{linear}.bias", WIDTH))
    for turn in range(4):
        x = b.add_node(path, "Mul", x, b.add_constant(path))
        x = b.add_node(path, "Softmax", x, axis=1) if turn % 2 else b.add_node(path, "Relu", x)
    x = b.add_node(path, "Softmax", x, axis=1)
    x = b.add_node(path, "Relu", x)
    x = b.add_node(path, "Transpose", x, perm=[1, 0])
    return b.add_node(path, "Transpose", x, perm=[1, 0])


def _add_block(b: _Builder, stage: str, number: int, x: str) -> str:
    """Add a block of a gate and five branches."""
    path = b.add_module(stage, str(number), "bench.Block")
    gate = b.add_module(path, "gate", "bench.Gate")
    gated = b.add_node(gate, "Sigmoid", x)
    gated = b.add_node(gate, "Mul", gated, x)
    out = x
    for branch in range(BRANCHES):
        out = b.add_node(path, "Add", out, _add_branch(b, path, branch, x))
    out = b.add_node(path, "Add", out, gated)
    out = b.add_node(path, "LeakyRelu", out, alpha=0.1)
    return b.add_node(path, "Tanh", out)


def write_graph(path: Path, nodes: int, types: bool = False) -> None:
    """Write a tagged model with its sidecar, optionally with the types of all values."""
    b = _Builder()
    encoder = b.add_module("", "encoder", "bench.Encoder")
    x = "x"
    stage = ""
    for number in range(nodes // BLOCK):
        if number % BLOCKS_A_STAGE == 0:
            stage = b.add_module(encoder, str(number // BLOCKS_A_STAGE), "bench.Stage")
        x = _add_block(b, stage, number % BLOCKS_A_STAGE, x)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH])
    result = helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, WIDTH])
    graph = helper.make_graph(b.nodes, "main", [value], [result], b.initializers)
    if types:
        for node in b.nodes[:-1]:
            shape = [WIDTH, 1] if "Transpose" in node.output[0] else [1, WIDTH]
            info = helper.make_tensor_value_info(
                node.output[0], TensorProto.FLOAT, shape if node.input else [WIDTH]
            )
            graph.value_info.append(info)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    hierarchy = _build_map(b, model)
    path.write_bytes(b"".join(tagged_chunks(model.SerializeToString(), hierarchy)))
    sidecar_path(path).write_bytes(encode_sidecar(hierarchy.sidecar))


def _build_map(b: _Builder, model: onnx.ModelProto) -> HierarchyMap:
    flat = flatten(model)
    tags = _assign_tags(b)
    primary = [tags[path] for path in b.owners]
    consumers = consumer_tags(flat, primary)
    node_tags = []
    for node, path, tag in zip(flat.nodes, b.owners, primary, strict=True):
        names = tags_of_node(node, tag, consumers)
        node_tags.append(NodeTag(names, tag, len(names), "scope", path))
    counts = dict.fromkeys(b.children, 0)
    for path in b.owners:
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


def _assign_tags(b: _Builder) -> dict[str, str]:
    """Return the tag of each module; a hidden module has that of its parent."""
    tags = {"": "/Net"}
    for path, class_name in b.classes.items():
        if path:
            parent, _, name = path.rpartition(".")
            tags[path] = tags[parent]
            if not class_name.startswith("torch."):
                short = class_name.rpartition(".")[2]
                has_suffix = name.isdecimal() or name.startswith("branch")
                tags[path] += f"/{short}.{name}" if has_suffix else f"/{short}"
    return tags


def write_renamed(source: Path, target: Path) -> None:
    """Write the same graph without tags, with other names and another order of nodes."""
    model = onnx.load(source)
    names: dict[str, str] = {value.name: value.name for value in model.graph.input}
    for node in model.graph.node:
        node.ClearField("doc_string")
        node.ClearField("name")
        for index, name in enumerate(node.input):
            node.input[index] = names.setdefault(name, f"t{len(names)}")
        for index, name in enumerate(node.output):
            node.output[index] = names.setdefault(name, f"t{len(names)}")
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for value in model.graph.output:
        value.name = names[value.name]
    del model.metadata_props[:]
    nodes = _shuffle(list(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    target.write_bytes(model.SerializeToString())


def _shuffle(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in a random topological order."""
    generator = random.Random(0)
    producer = {name: index for index, node in enumerate(nodes) for name in node.output}
    waits = [len({producer[name] for name in node.input if name in producer}) for node in nodes]
    consumers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for source in {producer[name] for name in node.input if name in producer}:
            consumers.setdefault(source, []).append(index)
    ready = [index for index, count in enumerate(waits) if not count]
    order = []
    while ready:
        at = generator.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        index = ready.pop()
        order.append(nodes[index])
        for consumer in consumers.get(index, ()):
            waits[consumer] -= 1
            if not waits[consumer]:
                ready.append(consumer)
    return order
