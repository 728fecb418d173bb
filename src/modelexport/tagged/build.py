"""Builds the map that is written: the tag of each node, the module records, the sidecar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import onnx

from modelexport.attribution.evidence import AUXILIARY, Attribution, Facts
from modelexport.attribution.status import module_status, node_counts
from modelexport.fingerprint import topology_digest, work_digests
from modelexport.graph import Graph, Node
from modelexport.hierarchy.tags import nearest_tags
from modelexport.tagged import codec, wire
from modelexport.tagged.sidecar import (
    FORMAT,
    METADATA_KEY,
    Embedded,
    ExportRecord,
    ModelRecord,
    ModuleRecord,
    NodeRecord,
    Sidecar,
    Statistics,
    TensorInfo,
    TensorRecord,
    content_digest,
    encode_embedded,
    encode_sidecar,
)


class HierarchyMap(msgspec.Struct, frozen=True):
    """Everything that an export writes beside the baseline's own bytes."""

    node_tags: tuple[codec.NodeTag | None, ...]
    sidecar: Sidecar

    @property
    def embedded(self) -> Embedded:
        return embed(self.sidecar, codec.digest(self.sidecar.nodes, self.node_tags))


def embed(s: Sidecar, tags_digest: str) -> Embedded:
    """What of the map goes into the model file itself."""
    bare = Embedded(
        format=s.format,
        strategy=s.export.strategy,
        exporter=s.export.exporter,
        model=s.model,
        export=s.export,
        modules=s.modules,
        topology=s.statistics.topology,
        tags_digest=tags_digest,
        sidecar_digest=content_digest(encode_sidecar(s)),
    )
    return msgspec.structs.replace(bare, digest=bare.computed_digest())


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
    return HierarchyMap(node_tags, complete(facts.graph, node_tags, model, export, modules))


def complete(
    graph: Graph,
    node_tags: Sequence[codec.NodeTag | None],
    model: ModelRecord,
    export: ExportRecord,
    modules: dict[str, ModuleRecord],
) -> Sidecar:
    """The whole sidecar, from what a tagged file says of itself."""
    primary = [None if tag is None else tag.hierarchy_path for tag in node_tags]
    attributes = work_digests(graph)
    nodes = node_records(graph, node_tags, attributes)
    tensors = tensor_records(graph, primary, consumer_tags(graph, primary))
    return Sidecar(
        format=FORMAT,
        model=model,
        export=export,
        modules=modules,
        expected_hierarchy=expected_hierarchy(modules),
        nodes=nodes,
        tensors=tensors,
        statistics=statistics(nodes, modules, len(tensors), topology_digest(graph, attributes)),
    )


def tagged_pieces(data: wire.Buffer, hierarchy: HierarchyMap) -> list[wire.Buffer]:
    """The baseline's bytes with the map put in."""
    tags: Iterator[codec.NodeTag | None] = iter(hierarchy.node_tags)

    def doc_edit(old: bytes | None) -> bytes | None:
        tag = next(tags)
        return old if tag is None else codec.encode(tag)

    return wire.rewrite(data, doc_edit, add_metadata=(METADATA_KEY, encode_embedded(hierarchy.embedded)))


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
    results, called_in = _results(facts), _called_in(facts, calls)
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
            more_aliases=module.more_aliases or msgspec.UNSET,
            nodes=counts[path],
            results=results.get(path, ()),
            called_in=called_in.get(path, ()),
            parameter_count=module.parameter_count,
        )
        for path, module in facts.tree.modules.items()
    }


def _results(facts: Facts) -> dict[str, tuple[tuple[str | None, ...], ...]]:
    """What each call of a module returned, as far as it is in the file."""
    found: dict[str, list[tuple[str | None, ...]]] = {}
    for number, call in enumerate(facts.trace.log.calls):
        found.setdefault(call.path, []).append(facts.trace.results.get(number, ()))
    return {path: tuple(results) for path, results in found.items() if any(results)}


def _called_in(facts: Facts, calls: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For modules below one that ran more than once: which of its calls each of theirs was part of."""
    log, tree = facts.trace.log, facts.tree
    around = {path: next((above for above in tree.lineage(path)[1:] if above in calls), None) for path in calls}
    found: dict[str, list[int]] = {}
    for number, call in enumerate(log.calls):
        above = around[call.path]
        if above is not None and calls[above] > 1:
            outer = log.enclosing(number, above)
            found.setdefault(call.path, []).append(-1 if outer is None else log.calls[outer].index)
    return {path: tuple(outer) for path, outer in found.items()}


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
    consumers = consumer_tags(graph, primary)
    node_tags: list[codec.NodeTag | None] = []
    for node, proto, answer, tag in zip(graph.nodes, graph.protos, attributions, primary, strict=True):
        if answer is None or tag is None:
            node_tags.append(None)
            continue
        tags = all_tags(node, tag, consumers)
        doc = proto.doc_string if proto.HasField("doc_string") else None
        node_tags.append(
            codec.NodeTag(tags, tag, len(tags), answer.method, answer.path, answer.call, answer.covers, doc)
        )
    return node_tags


def consumer_tags(graph: Graph, primary: Sequence[str | None]) -> dict[str, tuple[str, ...]]:
    """For each tensor that is read by tagged nodes their tags, sorted."""
    single: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    several: dict[str, set[str]] = {}
    for node, tag in zip(graph.nodes, primary, strict=True):
        if tag is None:
            continue
        for name in node.inputs:
            first = found.get(name)
            if first is None:
                found[name] = single.setdefault(tag, (tag,))
            elif first[0] != tag:
                several.setdefault(name, {first[0]}).add(tag)
    found.update((name, tuple(sorted(tags))) for name, tags in several.items())
    return found


def all_tags(node: Node, own: str, consumers: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A node's own tag, then those of the other modules that read what it makes, sorted."""
    outputs = node.outputs
    if len(outputs) == 1:
        readers = consumers.get(outputs[0])
        if readers is None or (len(readers) == 1 and readers[0] == own):
            return (own,)
        return (own, *[tag for tag in readers if tag != own])
    others = {tag for name in outputs for tag in consumers.get(name, ()) if tag != own}
    return (own, *sorted(others))


def node_records(
    graph: Graph, node_tags: Sequence[codec.NodeTag | None], attributes: Sequence[str | None]
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


def tensor_records(
    graph: Graph, primary: Sequence[str | None], consumers: Mapping[str, tuple[str, ...]]
) -> dict[str, TensorRecord]:
    """For every tensor the tag of its producer and those of its consumers."""
    records = {name: TensorRecord(None, consumers.get(name, ())) for name in (*graph.inputs, *graph.initializers)}
    for node, tag in zip(graph.nodes, primary, strict=True):
        for name in node.outputs:
            records[name] = TensorRecord(tag, consumers.get(name, ()))
    return records


def statistics(
    nodes: dict[str, NodeRecord], modules: dict[str, ModuleRecord], tensors: int, topology: str
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
        tensors=tensors,
        topology=topology,
    )


def tensor_infos(values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorInfo, ...]:
    return tuple(_tensor_info(value) for value in values)


def _tensor_info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return TensorInfo(value.name, value.type.WhichOneof("value") or "unknown", ())
    return TensorInfo(value.name, dtype_name(tensor.elem_type), tuple(map(dim_size, tensor.shape.dim)))


def dtype_name(data_type: int) -> str:
    """ONNX's name of an element type."""
    try:
        return str(onnx.TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return f"type {data_type}"


def dim_size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """The size of an axis, its name, or None."""
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None
