"""Builds the map that is written: the tag of each node, the module records, the sidecar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import onnx

from modelexport.attribution.evidence import AUXILIARY, Attribution, Facts
from modelexport.attribution.status import module_status, node_counts
from modelexport.graph import Graph
from modelexport.hierarchy.tags import nearest_tags
from modelexport.tagged import codec
from modelexport.tagged.sidecar import (
    FORMAT,
    Embedded,
    ExportRecord,
    ModelRecord,
    ModuleRecord,
    NodeRecord,
    Sidecar,
    Statistics,
    TensorInfo,
    TensorRecord,
)


class HierarchyMap(msgspec.Struct, frozen=True):
    """Everything that an export writes beside the baseline's own bytes."""

    node_tags: tuple[codec.NodeTag | None, ...]
    sidecar: Sidecar

    @property
    def embedded(self) -> Embedded:
        s = self.sidecar
        return Embedded(s.format, s.export.strategy, s.export.exporter, s.model, s.export, s.modules)


def build_map(
    facts: Facts,
    tags: dict[str, str | None],
    attributions: Sequence[Attribution | None],
    model: ModelRecord,
    export: ExportRecord,
) -> HierarchyMap:
    carried = nearest_tags(facts.tree, tags)
    primary = [None if answer is None else carried[answer.path] for answer in attributions]
    modules = _module_records(facts, tags, attributions)
    node_tags = tuple(_node_tags(facts.graph, attributions, primary))
    nodes = _node_records(facts.graph, node_tags)
    tensors = _tensor_records(facts.graph, primary)
    sidecar = Sidecar(
        format=FORMAT,
        model=model,
        export=export,
        modules=modules,
        expected_hierarchy=expected_hierarchy(modules),
        nodes=nodes,
        tensors=tensors,
        statistics=_statistics(nodes, modules, tensors),
    )
    return HierarchyMap(node_tags, sidecar)


def expected_hierarchy(modules: dict[str, ModuleRecord]) -> tuple[str, ...]:
    """The tags of the modules that ran, in order of first execution."""
    ran = [(r.execution_order, r.tag) for r in modules.values() if r.execution_order is not None and r.tag is not None]
    return tuple(tag for _, tag in sorted(ran))


def _module_records(
    facts: Facts, tags: dict[str, str | None], attributions: Sequence[Attribution | None]
) -> dict[str, ModuleRecord]:
    status = module_status(facts, attributions)
    counts = node_counts(facts, attributions)
    calls = facts.trace.log.count()
    order = _execution_order(facts)
    parameters = facts.tree.subtree_parameters()
    return {
        path: ModuleRecord(
            tag=tags[path],
            class_=module.qualified_class,
            shown=tags[path] is not None,
            status=str(status[path]),
            calls=calls.get(path, 0),
            execution_order=order.get(path),
            forward_args=module.forward_args,
            parameters=parameters[path],
            direct_parameters=module.direct_parameters,
            children=module.children,
            aliases=module.aliases,
            nodes=counts[path],
        )
        for path, module in facts.tree.modules.items()
    }


def _execution_order(facts: Facts) -> dict[str, int]:
    """The rank of each module that ran; a container comes just before the first of its modules to run."""
    order: dict[str, int] = {}
    for call in facts.trace.log.calls:
        new = []
        for path in facts.tree.lineage(call.path):
            if path in order:
                break
            new.append(path)
        for path in reversed(new):
            order[path] = len(order)
    return order


def _node_tags(
    graph: Graph, attributions: Sequence[Attribution | None], primary: Sequence[str | None]
) -> list[codec.NodeTag | None]:
    node_tags: list[codec.NodeTag | None] = []
    for index, answer in enumerate(attributions):
        tag = primary[index]
        if answer is None or tag is None:
            node_tags.append(None)
            continue
        others = {other for reader in graph.readers(index) if (other := primary[reader]) is not None}
        tags = (tag, *sorted(others - {tag}))
        node_tags.append(codec.NodeTag(tags, tag, len(tags), answer.method, answer.path, answer.call))
    return node_tags


def _node_records(graph: Graph, node_tags: Sequence[codec.NodeTag | None]) -> dict[str, NodeRecord]:
    records: dict[str, NodeRecord] = {}
    for node, tag in zip(graph.nodes, node_tags, strict=True):
        if tag is None:
            record = NodeRecord(node.name, node.op_type, None, None, (), None, None)
        else:
            record = NodeRecord(
                node.name,
                node.op_type,
                tag.hierarchy_module,
                tag.hierarchy_path,
                tag.hierarchy_tags,
                tag.hierarchy_method,
                tag.hierarchy_call,
            )
        records[node.key] = record
    return records


def _tensor_records(graph: Graph, primary: Sequence[str | None]) -> dict[str, TensorRecord]:
    records: dict[str, TensorRecord] = {}
    for name in graph.tensors():
        producer = graph.producer.get(name)
        readers = {tag for reader in graph.consumers.get(name, ()) if (tag := primary[reader]) is not None}
        records[name] = TensorRecord(None if producer is None else primary[producer], tuple(sorted(readers)))
    return records


def _statistics(
    nodes: dict[str, NodeRecord], modules: dict[str, ModuleRecord], tensors: dict[str, TensorRecord]
) -> Statistics:
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
        tensors=len(tensors),
    )


def tensor_infos(values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorInfo, ...]:
    return tuple(_tensor_info(value) for value in values)


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return TensorInfo(value.name, value.type.WhichOneof("value") or "unknown", ())
    return TensorInfo(
        value.name, onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), tuple(map(_dim, tensor.shape.dim))
    )


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None
