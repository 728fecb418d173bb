"""The tables of the sidecar: nodes, values and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import onnx

from modelexport.graph.flat import Graph, Node
from modelexport.modules.record import AUXILIARY, ModuleRecord, NodeTag
from modelexport.onnx_file.digests import node_digests, topology_digest
from modelexport.tagged.records import (
    FORMAT,
    EmbeddedMap,
    ExportRecord,
    ModelRecord,
    NodeRecord,
    Sidecar,
    Statistics,
    TensorInfo,
    TensorRecord,
    encode_sidecar,
    text_digest,
)


def embedded_map(sidecar: Sidecar, tags_digest: str, encoded: bytes | None = None) -> EmbeddedMap:
    """Build the model-level metadata from the sidecar that is written with the file.

    Args:
        sidecar: The sidecar.
        tags_digest: The digest of the nodes' tags.
        encoded: The sidecar as it is written, where the caller has it already.
    """
    bare = EmbeddedMap(
        format=sidecar.format,
        strategy=sidecar.export.strategy,
        exporter=sidecar.export.exporter,
        model=sidecar.model,
        export=sidecar.export,
        modules=sidecar.modules,
        topology=sidecar.statistics.topology,
        tags_digest=tags_digest,
        sidecar_digest=text_digest(encode_sidecar(sidecar) if encoded is None else encoded),
    )
    return msgspec.structs.replace(bare, digest=bare.computed_digest())


def complete_sidecar(
    graph: Graph,
    node_tags: Sequence[NodeTag | None],
    model: ModelRecord,
    export: ExportRecord,
    modules: dict[str, ModuleRecord],
    consumers: Mapping[str, tuple[str, ...]] | None = None,
) -> Sidecar:
    """Build a sidecar with its tables and statistics.

    Args:
        graph: The nodes.
        node_tags: The tag of each node.
        model: The record of the model.
        export: The record of the export.
        modules: The module records by path.
        consumers: The `consumer_tags` of the graph, where the caller has them already.
    """
    primary = [None if tag is None else tag.hierarchy_path for tag in node_tags]
    attributes = node_digests(graph)
    nodes = _node_records(graph, node_tags, attributes)
    if consumers is None:
        consumers = consumer_tags(graph, primary)
    tensors = _tensor_records(graph, primary, consumers)
    return Sidecar(
        format=FORMAT,
        model=model,
        export=export,
        modules=modules,
        expected_hierarchy=expected_hierarchy(modules),
        nodes=nodes,
        tensors=tensors,
        statistics=compute_statistics(
            nodes, modules, len(tensors), topology_digest(graph, attributes)
        ),
    )


def expected_hierarchy(modules: dict[str, ModuleRecord]) -> tuple[str, ...]:
    """List the tags of the modules that ran, in the order of their first calls."""
    ran = [
        (r.execution_order, r.tag)
        for r in modules.values()
        if r.execution_order is not None and r.tag is not None
    ]
    return tuple(tag for _, tag in sorted(ran))


def consumer_tags(graph: Graph, primary: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """Collect the tags of the consumers of each value, sorted, by the key of the value.

    Args:
        graph: The nodes.
        primary: The tag of each node.
    """
    # Most values have one consumer: their tags share one tuple for each tag.
    single: dict[str, tuple[str, ...]] = {}
    consumers: dict[str, tuple[str, ...]] = {}
    several: dict[str, set[str]] = {}
    for node, tag in zip(graph.nodes, primary, strict=True):
        if tag is None:
            continue
        for name in node.inputs:
            first = consumers.get(name)
            if first is None:
                consumers[name] = single.setdefault(tag, (tag,))
            elif first[0] != tag:
                several.setdefault(name, {first[0]}).add(tag)
    consumers.update((name, tuple(sorted(tags))) for name, tags in several.items())
    return consumers


def tags_of_node(node: Node, own: str, consumers: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the `hierarchy_tags` of a node: its own, then, sorted, those of other consumers."""
    outputs = node.outputs
    if len(outputs) == 1:
        # The usual case, without a set: the tags of one value are sorted already.
        tags = consumers.get(outputs[0], ())
        return tags if tags == (own,) else (own, *[tag for tag in tags if tag != own])
    others = {tag for name in outputs for tag in consumers.get(name, ()) if tag != own}
    return (own, *sorted(others))


def _node_records(
    graph: Graph, node_tags: Sequence[NodeTag | None], attributes: Sequence[str | None]
) -> dict[str, NodeRecord]:
    records: dict[str, NodeRecord] = {}
    for node, tag, digest in zip(graph.nodes, node_tags, attributes, strict=True):
        records[node.key] = NodeRecord(
            name=node.name,
            op_type=node.op_type,
            module=None if tag is None else tag.hierarchy_module,
            tag=None if tag is None else tag.hierarchy_path,
            tags=() if tag is None else tag.hierarchy_tags,
            method=None if tag is None else tag.hierarchy_method,
            call=None if tag is None else tag.hierarchy_call,
            inputs=node.inputs,
            attributes=digest,
            covers=msgspec.UNSET if tag is None else tag.hierarchy_covers or msgspec.UNSET,
        )
    return records


def _tensor_records(
    graph: Graph, primary: Sequence[str | None], consumers: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorRecord]:
    records = {
        name: TensorRecord(None, consumers.get(name, ()))
        for name in (*graph.inputs, *graph.initializers)
    }
    for node, tag in zip(graph.nodes, primary, strict=True):
        for name in node.outputs:
            records[name] = TensorRecord(tag, consumers.get(name, ()))
    return records


def compute_statistics(
    nodes: dict[str, NodeRecord], modules: dict[str, ModuleRecord], tensors: int, topology: str
) -> Statistics:
    """Count nodes and modules; `tensors` is the number of values, `topology` the graph's digest."""
    methods = Counter(record.method for record in nodes.values() if record.method is not None)
    tagged = sum(methods.values())
    return Statistics(
        nodes=len(nodes),
        tagged_nodes=tagged,
        coverage=tagged / len(nodes) if nodes else 1.0,
        tags=len({record.tag for record in nodes.values() if record.tag is not None}),
        auxiliary_nodes=sum(count for method, count in methods.items() if method in AUXILIARY),
        methods=dict(sorted(methods.items())),
        modules=len(modules),
        module_status=dict(sorted(Counter(record.status for record in modules.values()).items())),
        tensors=tensors,
        topology=topology,
    )


def tensor_infos(values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorInfo, ...]:
    """Describe values that a graph declares by name, element type and shape."""
    return tuple(_tensor_info(value) for value in values)


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return TensorInfo(value.name, value.type.WhichOneof("value") or "unknown", ())
    return TensorInfo(
        value.name, dtype_name(tensor.elem_type), tuple(map(dim_size, tensor.shape.dim))
    )


def dtype_name(data_type: int) -> str:
    """Return ONNX's name for one of its element types, in lower case, such as `float`."""
    try:
        return str(onnx.TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return f"type {data_type}"


def dim_size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """Return the size of a dimension: the number, or the symbol, or None where it is unknown."""
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
