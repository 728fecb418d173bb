"""Build the extracted model with its own map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import onnx
from onnx.numpy_helper import from_array

from modelexport.extraction.boundary import Boundary, SubgraphPart
from modelexport.graph.flat import Graph, flatten, function_key, nested_graphs
from modelexport.graph.inference import TypeInference
from modelexport.graph.nested import Subgraph, SubgraphValue
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry, is_within, join_path, subtree_totals
from modelexport.tagged.records import (
    METADATA_KEY,
    EmbeddedMap,
    ExtractionRecord,
    Sidecar,
    decode_tag,
    encode_embedded,
    encode_tag,
    tags_digest,
)
from modelexport.tagged.tables import (
    complete_sidecar,
    consumer_tags,
    embedded_map,
    tags_of_node,
    tensor_infos,
)


class SourceModel(NamedTuple):
    """A tagged model to extract from: everything but the data of its large initializers."""

    name: str
    proto: onnx.ModelProto
    main: Subgraph
    types: TypeInference
    records: EmbeddedMap | Sidecar | None


class ExtractedModel(NamedTuple):
    """An extracted model, without the data of its large initializers.

    `source_indices` has for each initializer its index in the main graph of the source; None for
    one that comes from elsewhere and has its data.
    """

    proto: onnx.ModelProto
    record: ExtractionRecord
    sidecar: Sidecar | None
    source_indices: tuple[int | None, ...]


NewNames = Mapping[Subgraph, Mapping[str, str]]
"""New names for values, by the subgraph that they are from."""


def build_model(
    source: SourceModel,
    boundary: Boundary,
    target: ModuleRef,
    name: str,
    part: int | None = None,
    new_names: NewNames | None = None,
) -> ExtractedModel:
    """Build a model from some nodes of another.

    Args:
        source: The model to extract from.
        boundary: The nodes, and the values that enter and leave them.
        target: The module that is extracted.
        name: The file name of the extracted model, empty if it is not written.
        part: The number of this part, for a call of a module that is split.
        new_names: New names for values that clash, if they are the same for several models.

    Returns:
        The model with its records; the data of large initializers is yet to be copied.
    """
    boundary = boundary.with_annotated_initializers()
    end = boundary.end()
    # One inference for all values; those that follow from fixed shapes need its result.
    source.types.of((*boundary.inputs, *boundary.outputs), end)
    fixed = source.types.fixed_values(boundary.inputs, end)
    annotations = list(boundary.annotations())
    boundary = boundary._replace(
        inputs=tuple(value for value in boundary.inputs if value.name not in fixed)
    )
    names = rename_clashes(boundary) if new_names is None else new_names
    proto = _copy_model_header(source.proto)
    graph = proto.graph
    tags = [tag for nodes in boundary.parts for tag in _copy_nodes(graph, nodes, names)]
    _declare_values(graph, boundary, names, source.types)
    indices = _copy_initializers(graph, boundary, names)
    graph.initializer.extend(from_array(value, name) for name, value in fixed.items())
    _copy_value_types(graph, boundary, names)
    _copy_annotations(graph, annotations, names)
    _copy_functions(proto, source.proto)
    flat = flatten(proto)
    tags = _write_tags(flat, tags)
    constants = [key for nodes in boundary.parts for key in nodes.constant_keys()]
    record = ExtractionRecord(
        source=source.name,
        module=target.path,
        tag=target.tag,
        call=target.call,
        part=part,
        nodes=sum(not node.function for node in flat.nodes) - len(constants),
        pulled_in=(*fixed, *constants),
        inputs=tensor_infos(graph.input),
        outputs=tensor_infos(graph.output),
    )
    sidecar = None
    if source.records is not None:
        sidecar = _write_map(proto, flat, tags, source.records, record, name)
    return ExtractedModel(proto, record, sidecar, (*indices, *(None for _ in fixed)))


def rename_clashes(boundary: Boundary) -> NewNames:
    """Find new names for values that have the name of a value in another subgraph.

    Args:
        boundary: Everything that goes into one graph.

    Returns:
        The new names; values of outer subgraphs keep theirs.
    """
    used: set[str] = set()
    new_names: dict[Subgraph, dict[str, str]] = {}
    for subgraph, names in boundary.values_by_subgraph().items():
        new_names[subgraph] = {name: subgraph.prefix + name for name in names if name in used}
        used.update(new_names[subgraph].get(name, name) for name in names)
    return new_names


def _names_in_scope(subgraph: Subgraph | None, new_names: NewNames) -> dict[str, str]:
    """Return the new names that hold in a subgraph: its own, and those around it."""
    names: dict[str, str] = {}
    while subgraph is not None:
        names = {**new_names.get(subgraph, {}), **names}
        subgraph = subgraph.outer
    return names


def _new_name(value: SubgraphValue, new_names: NewNames) -> str:
    return new_names.get(value.level, {}).get(value.name, value.name)


def _copy_model_header(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model without its graph, functions and map."""
    copy = onnx.ModelProto(
        ir_version=proto.ir_version,
        producer_name=proto.producer_name,
        producer_version=proto.producer_version,
        domain=proto.domain,
        model_version=proto.model_version,
        doc_string=proto.doc_string,
    )
    copy.opset_import.extend(proto.opset_import)
    copy.metadata_props.extend(entry for entry in proto.metadata_props if entry.key != METADATA_KEY)
    copy.graph.name = proto.graph.name
    return copy


def _copy_nodes(
    graph: onnx.GraphProto, part: SubgraphPart, new_names: NewNames
) -> list[NodeTag | None]:
    """Copy the nodes of one subgraph; return their tags and those of all nested in them."""
    tags: list[NodeTag | None] = []
    subgraph = part.subgraph
    names = _names_in_scope(subgraph, new_names)
    for index in part.copied:
        node = graph.node.add()
        node.CopyFrom(subgraph.nodes[index])
        if names:
            _rename_values(node, names)
        if subgraph.outer is not None and node.name:
            node.name = subgraph.prefix + node.name  # runtimes refuse two nodes of one name
        tags.append(subgraph.tags[index])
        for nested in subgraph.subgraphs.get(index, ()):
            tags += nested.all_tags()
    return tags


def _rename_values(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for values in (node.input, node.output):
        values[:] = [names.get(name, name) for name in values]
    for _, graph in nested_graphs(node.attribute):
        for inner in graph.node:
            _rename_values(inner, names)
        for value in graph.output:
            value.name = names.get(value.name, value.name)
        for annotation in graph.quantization_annotation:
            _rename_annotation(annotation, names)


def _declare_values(
    graph: onnx.GraphProto, boundary: Boundary, new_names: NewNames, types: TypeInference
) -> None:
    """Add the inputs and outputs with their types."""
    for values, declared in ((boundary.inputs, graph.input), (boundary.outputs, graph.output)):
        for value, info in zip(values, types.of(values, boundary.end()), strict=True):
            info.name = _new_name(value, new_names)
            declared.append(info)


def _copy_initializers(
    graph: onnx.GraphProto, boundary: Boundary, new_names: NewNames
) -> list[int | None]:
    """Copy the initializers as the source declares them; return their indices there."""
    indices: list[int | None] = []
    for value in boundary.initializers:
        subgraph, name = value.level, _new_name(value, new_names)
        initializer = subgraph.initializers[value.name]
        if isinstance(initializer, onnx.TensorProto):
            graph.initializer.add().CopyFrom(initializer)
            graph.initializer[-1].name = name
            is_main = subgraph.outer is None
            indices.append(subgraph.initializer_indices[value.name] if is_main else None)
        else:
            graph.sparse_initializer.add().CopyFrom(initializer)
            graph.sparse_initializer[-1].values.name = name
    return indices


def _copy_value_types(graph: onnx.GraphProto, boundary: Boundary, new_names: NewNames) -> None:
    """Copy what the source declares of the types of inner values."""
    declared = {value.name for values in (graph.input, graph.output) for value in values}
    for part in boundary.parts:
        for value_name in part.values():
            info = part.subgraph.declared.get(value_name)
            name = _new_name(SubgraphValue(part.subgraph, value_name), new_names)
            if info is not None and name not in declared:
                graph.value_info.add().CopyFrom(info)
                graph.value_info[-1].name = name


def _copy_annotations(
    graph: onnx.GraphProto,
    annotations: Sequence[tuple[Subgraph, onnx.TensorAnnotation]],
    new_names: NewNames,
) -> None:
    """Copy quantization annotations with new names; drop those that name an absent value."""
    present = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    present.update(name for node in graph.node for name in node.output)
    for subgraph, annotation in annotations:
        copy = onnx.TensorAnnotation()
        copy.CopyFrom(annotation)
        _rename_annotation(copy, _names_in_scope(subgraph, new_names))
        if all(entry.value in present for entry in copy.quant_parameter_tensor_names):
            graph.quantization_annotation.append(copy)


def _rename_annotation(annotation: onnx.TensorAnnotation, names: Mapping[str, str]) -> None:
    annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
    for entry in annotation.quant_parameter_tensor_names:
        entry.value = names.get(entry.value, entry.value)


def _copy_functions(proto: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """Copy the local functions that nodes call, and those that these call, in source order."""
    if not source.functions:
        return
    functions = {function_key(f.domain, f.name, f.overload): f for f in source.functions}
    needed: set[str] = set()
    pending = list(proto.graph.node)
    while pending:
        node = pending.pop()
        pending += [inner for _, graph in nested_graphs(node.attribute) for inner in graph.node]
        key = function_key(node.domain, node.op_type, node.overload)
        if key in functions and key not in needed:
            needed.add(key)
            pending += functions[key].node
    proto.functions.extend(function for key, function in functions.items() if key in needed)


def _write_tags(flat: Graph, source_tags: Sequence[NodeTag | None]) -> list[NodeTag | None]:
    """Write each node's tag with its consumers in the extracted model; return the tags."""
    in_functions = flat.protos[len(source_tags) :]
    old = [*source_tags, *(decode_tag(node.doc_string) for node in in_functions)]
    consumers = consumer_tags(flat, [None if tag is None else tag.hierarchy_path for tag in old])
    tags: list[NodeTag | None] = []
    for node, proto, tag in zip(flat.nodes, flat.protos, old, strict=True):
        if tag is not None:
            every = tags_of_node(node, tag.hierarchy_path, consumers)
            # Tags from a sidecar: the doc_string is the exporter's own, and is kept.
            doc = tag.doc if decode_tag(proto.doc_string) is not None else proto.doc_string or None
            tag = msgspec.structs.replace(
                tag, hierarchy_tags=every, hierarchy_count=len(every), doc=doc
            )
            proto.doc_string = encode_tag(tag).decode()
        tags.append(tag)
    return tags


def _write_map(
    proto: onnx.ModelProto,
    flat: Graph,
    tags: Sequence[NodeTag | None],
    records: EmbeddedMap | Sidecar,
    record: ExtractionRecord,
    name: str,
) -> Sidecar:
    """Write the map into the model's metadata; return the sidecar."""
    module = records.modules.get(record.module)
    class_name = records.model.class_ if module is None else module.class_
    export = msgspec.structs.replace(
        records.export,
        inputs=record.inputs,
        outputs=record.outputs,
        dropped_outputs=(),
        piece=record,
    )
    sidecar = complete_sidecar(
        flat,
        tags,
        msgspec.structs.replace(records.model, onnx=name, class_=class_name),
        export,
        _module_records(flat, tags, records.modules, record.module),
    )
    embedded = embedded_map(sidecar, tags_digest([node.key for node in flat.nodes], tags))
    proto.metadata_props.add(key=METADATA_KEY, value=encode_embedded(embedded))
    return sidecar


def _module_records(
    flat: Graph, tags: Sequence[NodeTag | None], modules: Mapping[str, ModuleRecord], target: str
) -> dict[str, ModuleRecord]:
    """Return the modules with nodes here, those around them, and empty ones of the target."""
    ancestry = Ancestry(modules)
    own = Counter(tag.hierarchy_module for tag in tags if tag is not None)
    counts = subtree_totals(own, ancestry)
    empty = (path for path, record in modules.items() if not record.nodes)
    kept = {*counts, *(above for p in empty if is_within(p, target) for above in ancestry.of(p))}
    present = set(flat.tensors())
    parameters = modules[target].parameter_count if target in modules else msgspec.UNSET
    return {
        path: msgspec.structs.replace(
            record,
            nodes=counts[path],
            children=tuple(name for name in record.children if join_path(path, name) in kept),
            # The modules around the target hold nothing but the target here.
            parameter_count=parameters if is_within(target, path) else record.parameter_count,
            results=tuple(
                tuple(name if name in present else None for name in call) for call in record.results
            ),
        )
        for path, record in modules.items()
        if path in kept
    }
