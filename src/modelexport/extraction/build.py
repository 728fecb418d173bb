"""Build an extracted model with its own map, and write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx
from google.protobuf.message import DecodeError
from onnx.numpy_helper import from_array

from modelexport.errors import FormatError
from modelexport.extraction.boundary import (
    Boundary,
    NewNames,
    OpenModel,
    SubgraphPart,
    names_in_scope,
    new_name,
)
from modelexport.graph.flat import Graph, flatten, function_key, nested_graphs
from modelexport.graph.nested import Subgraph, SubgraphValue
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.modules.tree import Ancestry, is_within, join_path, subtree_totals
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import transaction
from modelexport.onnx_file.model_file import DataFiles, external_location, external_tensors
from modelexport.tagged.records import (
    METADATA_KEY,
    EmbeddedMap,
    ExtractionRecord,
    Sidecar,
    decode_tag,
    encode_embedded,
    encode_sidecar,
    encode_tag,
    sidecar_path,
    tags_digest,
)
from modelexport.tagged.tables import (
    complete_sidecar,
    consumer_tags,
    embedded_map,
    tags_of_node,
    tensor_infos,
)

_PAGE, _LARGE, _ALIGNMENT = 4096, 1 << 20, 64
"""Runtimes map large tensors straight from the file if they begin on a page."""


class ExtractedModel(NamedTuple):
    """An extracted model, without the data of its large initializers.

    `source_indices` has for each initializer its index in the main graph of the source; None for
    one that comes from elsewhere and has its data.
    """

    source: OpenModel
    proto: onnx.ModelProto
    record: ExtractionRecord
    sidecar: Sidecar | None
    source_indices: tuple[int | None, ...]

    def load(self) -> onnx.ModelProto:
        """Return the model with the data of all initializers.

        Raises:
            FormatError: If the model is larger than a protobuf can be.
        """
        try:
            proto = onnx.ModelProto()
            proto.ParseFromString(b"".join(self._encode(self.proto)))
        except DecodeError as error:
            raise FormatError(
                "the extracted model is larger than a protobuf can be", hint="write it to a file"
            ) from error
        with DataFiles(self.source.path) as files:
            for tensor in external_tensors(proto):
                tensor.raw_data = bytes(files.values(tensor))
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
        return proto

    def write(self, target: Path) -> None:
        """Write the model, its sidecar and its data file: all or nothing.

        A sidecar or data file that an earlier model of this name had, and this one does not need,
        is removed.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        data, sidecar = f"{target.name}.data", sidecar_path(target).name
        external = list(external_tensors(proto))
        with transaction(target.parent) as stage, DataFiles(self.source.path) as files:
            if external:
                stage.publish(stage.write("data", _lay_out(external, files, data)), data)
            else:
                stage.remove(data)
            if self.sidecar is not None:
                stage.publish(stage.write("sidecar", [encode_sidecar(self.sidecar)]), sidecar)
            else:
                stage.remove(sidecar)
            stage.publish(stage.write("model", self._encode(proto)), target.name)
            stage.commit()

    def _encode(self, proto: onnx.ModelProto) -> list[wire.Buffer]:
        """Encode the model; initializers in the source file are slices of it, never parsed."""
        bare = onnx.ModelProto()
        bare.CopyFrom(proto)
        del bare.graph.initializer[:]
        data, fields = self.source.data, self.source.fields
        encoded: list[wire.Buffer] = []
        for index, tensor in zip(self.source_indices, proto.graph.initializer, strict=True):
            if index is None or fields is None or external_location(tensor) is not None:
                encoded.append(wire.initializer(tensor.SerializeToString()))
            else:
                encoded.append(data[fields[index].start : fields[index].end])
        return wire.with_initializers(bare.SerializeToString(), encoded)


def _lay_out(tensors: list[onnx.TensorProto], files: DataFiles, name: str) -> Iterator[wire.Buffer]:
    """Yield the data of these tensors one after the other, and point each to its new location."""
    known: dict[tuple[str, ...], tuple[int, int]] = {}
    end = 0
    for tensor in tensors:
        old = tuple(f"{entry.key}={entry.value}" for entry in tensor.external_data)
        if old not in known:
            values = files.values(tensor)
            gap = -end % (_PAGE if len(values) >= _LARGE else _ALIGNMENT)
            yield bytes(gap)
            yield values
            known[old] = (end + gap, len(values))
            end += gap + len(values)
        offset, length = known[old]
        del tensor.external_data[:]
        for key, value in (("location", name), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


def build_model(
    source: OpenModel,
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
    names = boundary.rename_clashes() if new_names is None else new_names
    proto = _copy_model_header(source.proto)
    graph = proto.graph
    tags = [tag for nodes in boundary.parts for tag in _copy_nodes(graph, nodes, names)]
    for values, declared in ((boundary.inputs, graph.input), (boundary.outputs, graph.output)):
        for value, info in zip(values, source.types.of(values, end), strict=True):
            info.name = new_name(value, names)
            declared.append(info)
    indices = _copy_initializers(graph, boundary, names)
    graph.initializer.extend(from_array(value, name) for name, value in fixed.items())
    _copy_value_types(graph, boundary, names)
    _copy_annotations(graph, annotations, names)
    _copy_functions(proto, source.proto)
    flat = flatten(proto)
    tags = _write_tags(flat, tags)
    constants = [key for nodes in boundary.parts for key in nodes.constant_keys()]
    record = ExtractionRecord(
        source=source.path.name,
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
    return ExtractedModel(source, proto, record, sidecar, (*indices, *(None for _ in fixed)))


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
    names = names_in_scope(subgraph, new_names)
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


def _copy_initializers(
    graph: onnx.GraphProto, boundary: Boundary, new_names: NewNames
) -> list[int | None]:
    """Copy the initializers as the source declares them; return their indices there."""
    indices: list[int | None] = []
    for value in boundary.initializers:
        subgraph, name = value.subgraph, new_name(value, new_names)
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
            name = new_name(SubgraphValue(part.subgraph, value_name), new_names)
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
        _rename_annotation(copy, names_in_scope(subgraph, new_names))
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
