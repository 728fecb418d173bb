"""The words in the picture: what stands on each box, and the type of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from modelexport.graph.flat import function_key, nested_graphs, subgraph_prefix
from modelexport.graphml.dialect import MODULE, WEIGHTS
from modelexport.graphml.scene import Scene
from modelexport.graphml.views import plain, shape_text, type_and_shape
from modelexport.graphml.wiring import under
from modelexport.onnx_file import wire
from modelexport.onnx_file.model_file import parse_model
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.tables import dtype_name

_LONGEST_LABEL = 48
_SMALL_GRAPH = 2 << 20

Types = dict[str, tuple[str, str]]


class Labels:
    """Tells the label of an element, or of a group by its number's complement."""

    def __init__(self, model: TaggedModel, scene: Scene, types: Types) -> None:
        self._graph = model.graph
        self._modules = model.modules
        self._scene = scene
        self._wiring = scene.wiring
        self._types = types

    def __call__(self, member: int) -> str:
        if member < 0:
            label = self._group_label(~member)
        elif member < len(self._graph.nodes):
            label = shortened(plain(self._graph.nodes[member].op_type))
        else:
            label = self._terminal_label(member)
        return label or "(no name)"

    def _terminal_label(self, member: int) -> str:
        terminal = self._wiring.terminal(member)
        name = plain(terminal.name)
        if terminal.kind in WEIGHTS:
            group = self._scene.groups[self._scene.parents[member]]
            if group.kind == MODULE and group.name:
                name = name.removeprefix(f"{plain(group.name)}.")
        return (
            f"{shortened(name)}\n{shortened(''.join(self._types.get(terminal.key, ())))}".rstrip()
        )

    def _group_label(self, number: int) -> str:
        group = self._scene.groups[number]
        if group.element >= 0:
            return shortened(plain(self._graph.nodes[group.element].op_type))
        if group.kind != MODULE:
            return shortened(plain(group.name))
        record = self._modules.get(group.name)
        kind = "" if record is None else record.class_.rpartition(".")[2]
        name = group.name.rpartition(".")[2]
        label = shortened(plain(": ".join(filter(None, (name, kind))) or "(root)"))
        if record is None or record.status == "nodes":
            return label
        return f"{label}, {plain(record.status)}"


def shortened(text: str) -> str:
    """The end of a long name tells more than its beginning."""
    return text if len(text) <= _LONGEST_LABEL else f"…{text[1 - _LONGEST_LABEL :]}"


def tensor_types(model: TaggedModel, inferred: Iterable[onnx.ValueInfoProto]) -> Types:
    """The type and shape of every tensor that the file declares, by its key, and what else was inferred."""
    types: Types = {value.name: type_and_shape(value.type) for value in inferred}
    known: dict[bytes, tuple[str, str]] = {}  # most tensors are of few types

    def add(graph: onnx.GraphProto, prefix: str) -> None:
        for values in (graph.value_info, graph.input, graph.output):
            for value in values:
                stored = value.type.SerializeToString()
                told = known.get(stored)
                if told is None:
                    told = known[stored] = type_and_shape(value.type)
                types[under(prefix, value.name)] = told
        for tensor in graph.initializer:
            types[under(prefix, tensor.name)] = (
                dtype_name(tensor.data_type),
                shape_text(list(tensor.dims)),
            )
        for sparse in graph.sparse_initializer:
            types[under(prefix, sparse.values.name)] = (
                f"sparse {dtype_name(sparse.values.data_type)}",
                shape_text(list(sparse.dims)),
            )

    add(model.proto.graph, "")
    for function in model.proto.functions:
        key = function_key(function.domain, function.name, function.overload)
        types |= {
            under(f"{key}/", value.name): type_and_shape(value.type)
            for value in function.value_info
        }
    for index in model.graph.bodies:
        for label, nested in nested_graphs(model.graph.protos[index].attribute):
            add(nested, subgraph_prefix(model.graph.nodes[index].key, label))
    return types


def inferred_types(
    model: TaggedModel, data: wire.Buffer, weights: Sequence[wire.Field]
) -> Sequence[onnx.ValueInfoProto]:
    """Types that a file does not declare and ONNX can tell, unless the graph is large: that takes a multiple of it."""
    declared = {value.name for value in (*model.proto.graph.value_info, *model.proto.graph.output)}
    graph = model.graph
    if all(
        name in declared
        for node in graph.nodes
        if node.enclosing < 0 and not node.function
        for name in node.outputs
    ):
        return ()
    if (
        sum(
            field.end - field.body
            for found in wire.graphs(data)
            for field in wire.nodes(data, found)
        )
        > _SMALL_GRAPH
    ):
        return ()
    whole = parse_model(data, model.path, weights)
    try:
        found = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    except Exception:  # inference raises several unrelated kinds; then there is nothing to tell
        return ()
    return list(found.graph.value_info)
