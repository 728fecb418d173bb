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
from modelexport.graph.nested import Subgraph, SubgraphValue, node_key
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


class ExtractedModel(NamedTuple):
    """A model for some nodes of another.

    `weights` has for each of its initializers the place of that one in the source's main graph;
    None for one that comes from elsewhere and is whole.
    """

    proto: onnx.ModelProto
    record: ExtractionRecord
    sidecar: Sidecar | None
    weights: tuple[int | None, ...]


class SourceModel(NamedTuple):
    """A tagged file that pieces are cut from: all but the values of its large weights."""

    name: str
    proto: onnx.ModelProto
    main: Subgraph
    types: TypeInference
    records: EmbeddedMap | Sidecar | None


Renamed = Mapping[int, Mapping[str, str]]
"""New names for tensors, by level."""


def build_model(
    source: SourceModel,
    cut: Boundary,
    target: ModuleRef,
    name: str,
    part: int | None = None,
    renamed: Renamed | None = None,
) -> ExtractedModel:
    """The piece as a model, called `name`; its large weights are yet to be filled in.

    `renamed` are the names of the whole that it is a part of, where those are known.
    """
    end = cut.end(source.main)
    source.types.of((*cut.inputs, *cut.outputs), end)  # in one go
    fixed = source.types.fixed_values(cut.inputs, end)
    annotations = list(cut.annotations())
    cut = cut._replace(inputs=tuple(border for border in cut.inputs if border.name not in fixed))
    renamed = clashes(cut) if renamed is None else renamed
    proto = _frame(source.proto)
    graph = proto.graph
    graph.name = source.proto.graph.name
    pulled = list(fixed)
    tags: list[NodeTag | None] = []
    for place in cut.parts:
        tags += _copy_nodes(graph, place, _renamed_in(place.level, renamed))
        pulled += [
            node_key(place.level.prefix, number, place.level.nodes[number])
            for number in place.pulled
        ]
    _add_borders(graph, cut, renamed, source)
    weights = _add_weights(graph, cut, renamed)
    graph.initializer.extend(from_array(value, name) for name, value in fixed.items())
    _add_declared_types(graph, cut, renamed)
    _add_annotations(graph, annotations, renamed)
    _add_functions(proto, source.proto)
    flat = flatten(proto)
    tags = _tag(flat, tags)
    record = ExtractionRecord(
        source=source.name,
        module=target.path,
        tag=target.tag,
        call=target.call,
        part=part,
        nodes=sum(not node.function for node in flat.nodes) - len(pulled) + len(fixed),
        pulled_in=tuple(pulled),
        inputs=tensor_infos(graph.input),
        outputs=tensor_infos(graph.output),
    )
    sidecar = (
        None if source.records is None else _record(proto, flat, tags, source.records, record, name)
    )
    return ExtractedModel(proto, record, sidecar, (*weights, *(None for _ in fixed)))


def _frame(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without its graph, functions and map."""
    frame = onnx.ModelProto(
        ir_version=proto.ir_version,
        producer_name=proto.producer_name,
        producer_version=proto.producer_version,
        domain=proto.domain,
        model_version=proto.model_version,
        doc_string=proto.doc_string,
    )
    frame.opset_import.extend(proto.opset_import)
    frame.metadata_props.extend(
        entry for entry in proto.metadata_props if entry.key != METADATA_KEY
    )
    return frame


def clashes(cut: Boundary) -> Renamed:
    """New names for tensors of nested levels that are called like one of another level."""
    used: set[str] = set()
    renamed: dict[int, dict[str, str]] = {}
    by_level: dict[int, tuple[Subgraph, dict[str, None]]] = {}
    for part in cut.parts:
        names = by_level.setdefault(id(part.level), (part.level, {}))[1]
        for place in (*part.members, *part.pulled):
            names.update(dict.fromkeys(filter(None, part.level.nodes[place].output)))
    for border in (*cut.inputs, *cut.weights):
        by_level.setdefault(id(border.level), (border.level, {}))[1][border.name] = None
    for key, (level, names) in by_level.items():
        clashing = {name for name in names if name in used}
        renamed[key] = {name: level.prefix + name for name in clashing}
        used.update(renamed[key].get(name, name) for name in names)
    return renamed


def _copy_nodes(
    graph: onnx.GraphProto, part: SubgraphPart, renamed: Mapping[str, str]
) -> list[NodeTag | None]:
    """Copy the nodes of one level in their order; returns the tags of these and of all inside them, in file order."""
    tags: list[NodeTag | None] = []
    level = part.level
    for place in sorted((*part.members, *part.pulled)):
        node = graph.node.add()
        node.CopyFrom(level.nodes[place])
        if renamed:
            _rename(node, renamed)
        if level.outer is not None and node.name:
            node.name = level.prefix + node.name  # runtimes refuse two of the same name
        tags.append(level.tags[place])
        tags += [tag for body in level.bodies.get(place, ()) for tag in body.tags_inside()]
    return tags


def _rename(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    for names in (node.input, node.output):
        names[:] = [renamed.get(name, name) for name in names]
    for _, body in nested_graphs(node.attribute):
        for inner in body.node:
            _rename(inner, renamed)
        for value in body.output:
            value.name = renamed.get(value.name, value.name)
        for note in body.quantization_annotation:
            _rename_annotation(note, renamed)


def _renamed_in(level: Subgraph | None, renamed: Renamed) -> dict[str, str]:
    """The new names that hold in a level: its own, and those of the levels around it."""
    found: dict[str, str] = {}
    while level is not None:
        found = {**renamed.get(id(level), {}), **found}
        level = level.outer
    return found


def _name(border: SubgraphValue, renamed: Renamed) -> str:
    return renamed.get(id(border.level), {}).get(border.name, border.name)


def _add_borders(
    graph: onnx.GraphProto, cut: Boundary, renamed: Renamed, source: SourceModel
) -> None:
    for borders, values in ((cut.inputs, graph.input), (cut.outputs, graph.output)):
        for border, value in zip(
            borders, source.types.of(borders, cut.end(source.main)), strict=True
        ):
            value.name = _name(border, renamed)
            values.append(value)


def _add_weights(graph: onnx.GraphProto, cut: Boundary, renamed: Renamed) -> tuple[int | None, ...]:
    """Copy the initializers as they are declared; returns their places in the main graph."""
    places: list[int | None] = []
    for border in cut.weights:
        weight = border.level.weights[border.name]
        if isinstance(weight, onnx.TensorProto):
            copy = graph.initializer.add()
            copy.CopyFrom(weight)
            copy.name = _name(border, renamed)
            places.append(
                border.level.weight_places[border.name] if border.level.outer is None else None
            )
        else:
            graph.sparse_initializer.add().CopyFrom(weight)
            graph.sparse_initializer[-1].values.name = _name(border, renamed)
    return tuple(places)


def _add_declared_types(graph: onnx.GraphProto, cut: Boundary, renamed: Renamed) -> None:
    """What the source says of the types of tensors inside the piece."""
    ends = {value.name for values in (graph.input, graph.output) for value in values}
    for part in cut.parts:
        nodes = part.level.nodes
        places = sorted((*part.members, *part.pulled))
        made = dict.fromkeys(name for place in places for name in nodes[place].output if name)
        for told in made:
            value = part.level.declared.get(told)
            name = _name(SubgraphValue(part.level, told), renamed)
            if value is not None and name not in ends:
                graph.value_info.add().CopyFrom(value)
                graph.value_info[-1].name = name


def _add_annotations(
    graph: onnx.GraphProto,
    annotations: Sequence[tuple[Subgraph, onnx.TensorAnnotation]],
    renamed: Renamed,
) -> None:
    """Copy notes on quantization with the names that tensors have in the piece; drop those of absent ones."""
    present = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    present.update(name for node in graph.node for name in node.output)
    for level, note in annotations:
        copy = onnx.TensorAnnotation()
        copy.CopyFrom(note)
        _rename_annotation(copy, _renamed_in(level, renamed))
        if all(entry.value in present for entry in copy.quant_parameter_tensor_names):
            graph.quantization_annotation.append(copy)


def _rename_annotation(note: onnx.TensorAnnotation, renamed: Mapping[str, str]) -> None:
    note.tensor_name = renamed.get(note.tensor_name, note.tensor_name)
    for entry in note.quant_parameter_tensor_names:
        entry.value = renamed.get(entry.value, entry.value)


def _add_functions(proto: onnx.ModelProto, source: onnx.ModelProto) -> None:
    """The local functions that the piece calls, and those that they call, in the order of the source."""
    if not source.functions:
        return
    by_key = {function_key(f.domain, f.name, f.overload): f for f in source.functions}
    needed: set[str] = set()
    pending = list(proto.graph.node)
    while pending:
        node = pending.pop()
        pending += [inner for _, body in nested_graphs(node.attribute) for inner in body.node]
        key = function_key(node.domain, node.op_type, node.overload)
        if key in by_key and key not in needed:
            needed.add(key)
            pending += by_key[key].node
    proto.functions.extend(function for key, function in by_key.items() if key in needed)


def _tag(flat: Graph, told: list[NodeTag | None]) -> list[NodeTag | None]:
    """Write each node's tag as it is in the piece, where other modules read its outputs than in the whole."""
    told += [decode_tag(node.doc_string) for node in flat.protos[len(told) :]]  # those in functions
    consumers = consumer_tags(flat, [None if tag is None else tag.hierarchy_path for tag in told])
    tags: list[NodeTag | None] = []
    for node, proto, tag in zip(flat.nodes, flat.protos, told, strict=True):
        if tag is not None:
            every = tags_of_node(node, tag.hierarchy_path, consumers)
            doc = tag.doc if decode_tag(proto.doc_string) is not None else proto.doc_string or None
            tag = msgspec.structs.replace(
                tag, hierarchy_tags=every, hierarchy_count=len(every), doc=doc
            )
            proto.doc_string = encode_tag(tag).decode()
        tags.append(tag)
    return tags


def _record(
    proto: onnx.ModelProto,
    flat: Graph,
    tags: list[NodeTag | None],
    records: EmbeddedMap | Sidecar,
    record: ExtractionRecord,
    name: str,
) -> Sidecar:
    """Write the map into the piece's metadata; returns the sidecar."""
    module = records.modules.get(record.module)
    sidecar = complete_sidecar(
        flat,
        tags,
        msgspec.structs.replace(
            records.model,
            onnx=name,
            class_=records.model.class_ if module is None else module.class_,
        ),
        msgspec.structs.replace(
            records.export,
            inputs=record.inputs,
            outputs=record.outputs,
            dropped_outputs=(),
            piece=record,
        ),
        _modules(flat, tags, records.modules, record.module),
    )
    embedded = embedded_map(sidecar, tags_digest([node.key for node in flat.nodes], tags))
    proto.metadata_props.add(key=METADATA_KEY, value=encode_embedded(embedded))
    return sidecar


def _modules(
    flat: Graph, tags: list[NodeTag | None], modules: Mapping[str, ModuleRecord], target: str
) -> dict[str, ModuleRecord]:
    """The modules that have nodes in the piece, those around them, and those of the target that never had any."""
    lineage = Ancestry(modules)
    counts = subtree_totals(
        Counter(tag.hierarchy_module for tag in tags if tag is not None), lineage
    )
    without = {
        path for path, record in modules.items() if not record.nodes and is_within(path, target)
    }
    around = {above for path in without for above in lineage.of(path)}
    present = set(flat.tensors())
    counted = modules[target].parameter_count if target in modules else msgspec.UNSET
    return {
        path: msgspec.structs.replace(
            record,
            nodes=counts[path],
            children=tuple(
                c for c in record.children if (p := join_path(path, c)) in counts or p in around
            ),
            # the modules around the target hold nothing but the target here
            parameter_count=counted if is_within(target, path) else record.parameter_count,
            results=tuple(
                tuple(n if n in present else None for n in call) for call in record.results
            ),
        )
        for path, record in modules.items()
        if path in counts or path in around
    }
