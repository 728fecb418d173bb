"""Extract one module as a runnable model, or list the modules that can be extracted."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from modelexport.analysis.subgraph import BoundaryValues
from modelexport.errors import ExtractionWarning, FormatError
from modelexport.extraction.boundary import (
    Boundary,
    ConsumerIndex,
    Members,
    find_boundary,
    find_members,
    whole_model,
)
from modelexport.extraction.build import SourceModel, build_model
from modelexport.extraction.initializers import (
    InitializerSource,
    load_initializers,
    write_extracted,
)
from modelexport.garbage import pause_collector
from modelexport.graph.flat import flatten
from modelexport.graph.inference import TypeInference
from modelexport.graph.nested import Subgraph, sort_nodes
from modelexport.modules.index import ModuleIndex
from modelexport.modules.lookup import ModuleRef
from modelexport.modules.tree import Ancestry
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    check_no_overwrite,
    initializer_fields,
    open_mapped,
    parse_model,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import (
    map_in_effect,
    recorded_tag,
    tags_from_doc_strings,
    tags_from_records,
)
from modelexport.tagged.records import ExtractionRecord, TensorInfo, sidecar_path
from modelexport.tagged.tables import tensor_infos

SMALL_FILE = 64 << 20
"""Up to this size a file is parsed with all its data; of a larger one, the initializers' data is
skipped and copied as bytes."""
_MOST_LOST = 3
"""How many lost results a warning names."""


class Extraction(NamedTuple):
    """An extracted model, and the record of what it is."""

    model: onnx.ModelProto
    record: ExtractionRecord


class ExtractableModule(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """A module that can be extracted, with the inputs and outputs of the extracted model."""

    module: str
    tag: str | None
    class_: str
    nodes: int
    calls: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@keyword_aliases(onnx_model="path", output="output_path")
def extract(
    path: onnx.ModelProto | StrPath,
    module: str,
    output_path: StrPath | None = None,
    *,
    call: int | None = None,
) -> Extraction:
    """Extract one module of a tagged model as a runnable model with tags.

    Its inputs are the values that enter the module; the constants and initializers that it needs
    are copied. An ExtractionWarning names results of the module that are not among the outputs,
    for example because the exporter removed them.

    Args:
        path: A tagged model or its path.
        module: A tag, a module path, an alias, or a glob that matches one module.
        output_path: The file to write, with its sidecar and, if the source has one, a data file.
        call: The call to extract, from 0, of a module that ran more than once; None for all.

    Returns:
        The model and its record; with `output_path`, the data of large initializers is only in the
        files.

    Raises:
        ArgumentError: If there is no such module or call, or it has no nodes.
        FileError: If a file cannot be read or written.
        FormatError: If the model is malformed or has no tags.
    """
    target = None if output_path is None else check_output_path(output_path)
    with pause_collector(), open_tagged(path) as file:
        if target is not None:
            data_file = target.with_name(f"{target.name}.data")
            check_no_overwrite(file.path, file.source.proto, target, data_file)
        ref = file.find(module, call)
        boundary = file.boundary(ref)
        extracted = build_model(file.source, boundary, ref, "" if target is None else target.name)
        if target is None:
            model = load_initializers(extracted, file.weights)
        else:
            write_extracted(extracted, file.weights, target)
            model = extracted.proto
        if not file.is_whole_model(ref):
            _warn_of_lost_results(file, ref, boundary)
    return Extraction(model, extracted.record)


def _warn_of_lost_results(file: OpenModel, ref: ModuleRef, boundary: Boundary) -> None:
    """Warn if a value that the module returned is neither an input nor an output.

    Constants do not count: they were computed at export, so they depend on no input.
    """
    present = {value.name for value in (*boundary.inputs, *boundary.outputs)}
    calls = file.modules.returned(ref)
    missing = [
        (f"value {index}" + (f" of call {call}" if len(calls) > 1 else ""), name)
        for call, names in calls.items()
        for index, name in enumerate(names)
        if name not in present
    ]
    constants = _constant_names(file.source.main) if missing else frozenset()
    lost = [
        f"{value} is not in the exported graph"
        if name is None
        else f"{value}, {name}, is not among its outputs"
        for value, name in missing
        if name not in constants
    ]
    if lost:
        more = f"; and {len(lost) - _MOST_LOST} more" if len(lost) > _MOST_LOST else ""
        message = (
            f"the extracted model does not give all that {ref.path or 'the root'} returned: "
            f"{'; '.join(lost[:_MOST_LOST])}{more}"
        )
        warnings.warn(message, ExtractionWarning, stacklevel=4)


def _constant_names(main: Subgraph) -> frozenset[str]:
    """Return the names of all values that do not depend on the inputs of the model."""
    return frozenset(
        name
        for subgraph in main
        for name in (*subgraph.initializers, *subgraph.flow(len(subgraph.nodes)).constant)
    )


class OpenModel(NamedTuple):
    """A tagged model that is open for extraction."""

    path: Path
    source: SourceModel
    modules: ModuleIndex
    weights: InitializerSource

    def find(self, module: str, call: int | None = None) -> ModuleRef:
        """Find a module by what people type.

        Args:
            module: A tag, a module path, an alias, or a glob that matches one module.
            call: One of its calls, or None for all.

        Returns:
            The module.

        Raises:
            ArgumentError: If there is no such module or call.
        """
        ref = self.modules.find(module)
        return ref if call is None else self.modules.select_call(ref, call)

    def boundary(self, ref: ModuleRef) -> Boundary:
        """Find the nodes of a module, and the values that enter and leave it.

        Args:
            ref: The module.

        Returns:
            Its boundary.

        Raises:
            ArgumentError: If the module has no nodes.
        """
        if self.is_whole_model(ref):
            return whole_model(self.source.main)
        return find_boundary(self.members(ref), self.modules.results(ref))

    def is_whole_model(self, ref: ModuleRef) -> bool:
        """Return whether a reference is to the model itself, with all nodes, tagged or not."""
        return not ref.path and ref.call is None

    def members(self, ref: ModuleRef) -> Members:
        """Find the nodes of a module.

        Args:
            ref: The module.

        Returns:
            The nodes by subgraph; none only for a model without nodes.

        Raises:
            ArgumentError: If the module has no nodes.
        """
        main = self.source.main
        if self.is_whole_model(ref):
            return [(main, list(range(len(main.nodes))))] if main.nodes else []
        belongs = self.modules.node_filter(ref)
        members = find_members(main, lambda path, call: (ref,) if belongs(path, call) else ())
        if not members:
            raise self.modules.no_nodes_error(ref)
        return members[ref]


@contextmanager
def open_tagged(onnx_model: onnx.ModelProto | StrPath) -> Iterator[OpenModel]:
    """Open a tagged model for extraction.

    Args:
        onnx_model: The model or its path.

    Yields:
        The model; a file is mapped until the block ends.

    Raises:
        FileError: If the file cannot be read.
        FormatError: If the model is malformed or has no tags.
    """
    if isinstance(onnx_model, onnx.ModelProto):
        yield _parse(Path(), onnx_model.SerializeToString())
        return
    path = as_path(onnx_model)
    with open_mapped(path) as data:
        try:
            yield _parse(path, data)
        except (TypeError, UnicodeDecodeError) as error:
            # protobuf gives bytes for a name that is not UTF-8, which breaks in many places.
            if isinstance(error, UnicodeDecodeError) or _has_bytes_names(parse_model(data, path)):
                raise FormatError(
                    f"{path} has names that are not UTF-8", hint="write it again"
                ) from error
            raise


def _has_bytes_names(proto: onnx.ModelProto) -> bool:
    graph = proto.graph
    names = [
        name for node in graph.node for name in (*node.input, *node.output, node.name, node.op_type)
    ]
    declared = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    return not all(isinstance(name, str) for name in (*names, *(value.name for value in declared)))


def _parse(path: Path, data: bytes | memoryview) -> OpenModel:
    fields = initializer_fields(data, path) if len(data) > SMALL_FILE else None
    proto = parse_model(data, path, fields, whole=fields is None)
    main = Subgraph(proto.graph, tags_from_doc_strings())
    if not main.flow(len(main.nodes)).in_order:
        sort_nodes(main)
        main = Subgraph(proto.graph, tags_from_doc_strings())
    effective = map_in_effect(path, proto, _is_tagged(main), lambda: flatten(proto))
    if effective.sidecar is not None:
        nodes = effective.sidecar.nodes.items()
        tags = tags_from_records({key: recorded_tag(record) for key, record in nodes})
        main = Subgraph(proto.graph, tags)
    if not _is_tagged(main) and main.nodes:
        raise _untagged_error(path, effective.refused)
    records = effective.records
    modules = ModuleIndex({} if records is None else records.modules, main.all_tags())
    source = SourceModel(path.name, proto, main, TypeInference(proto, main), records)
    return OpenModel(path, source, modules, InitializerSource(data, fields, path))


def _untagged_error(path: Path, refused: str | None) -> FormatError:
    if refused is not None:
        reason = f"{sidecar_path(path).name} cannot be used: {refused}"
        return FormatError(f"{path.name} has no tags, and {reason}", hint="export the model again")
    return FormatError(
        f"{path.name or 'the model'} has no tags, so its modules are unknown",
        hint="export it with modelexport",
    )


def _is_tagged(main: Subgraph) -> bool:
    return any(tag is not None for subgraph in main for tag in subgraph.tags)


def boundary_values(file: OpenModel) -> BoundaryValues:
    """Find the values that enter and leave each module, without constants.

    Args:
        file: The model.

    Returns:
        The values by module path.
    """
    main = file.source.main
    graph = flatten(file.source.proto)
    tags = list(main.all_tags())
    tags += [None] * (len(graph.nodes) - len(tags))  # nodes of functions belong to their callers
    constants = main.flow(len(main.nodes)).constant
    return BoundaryValues(graph, tags, Ancestry(file.modules.records), constants)


def list_modules(path: StrPath, module: str | None = None) -> list[ExtractableModule]:
    """List the modules that can be extracted.

    Args:
        path: The tagged model.
        module: What to list: a tag, a module path, an alias, or a glob; None for all modules.

    Returns:
        The modules in the order of the model's records.

    Raises:
        ArgumentError: If there is no such module, or it has no nodes.
        FileError: If the file cannot be read.
        FormatError: If the model is malformed or has no tags.
    """
    with open_tagged(path) as file:
        if module is not None:
            ref = file.find(module)
            return _describe_modules(file, {ref.path: file.boundary(ref)})
        return _describe_modules(file, _all_boundaries(file))


def _all_boundaries(file: OpenModel) -> dict[str, Boundary]:
    """Find the boundaries of all modules, in time linear in the nodes and the depth."""
    main = file.source.main
    for subgraph in main:
        subgraph.flow(len(subgraph.nodes))  # once, instead of again for each module
    ancestors = functools.cache(_with_ancestors)
    members = find_members(main, lambda path, call: ancestors(path))
    consumers = ConsumerIndex()
    return {
        path: find_boundary(
            members[path], file.modules.results(ModuleRef(path, None)), consumers=consumers
        )
        if path
        else whole_model(main)
        for path in file.modules.tags
        if path in members
    }


def _with_ancestors(path: str) -> tuple[str, ...]:
    """Return a module path and those of all modules around it, the root first."""
    return ("", *itertools.accumulate(path.split("."), "{}.{}".format)) if path else ("",)


def _describe_modules(file: OpenModel, boundaries: dict[str, Boundary]) -> list[ExtractableModule]:
    end = len(file.source.main.nodes)
    values = dict.fromkeys(
        value for found in boundaries.values() for value in (*found.inputs, *found.outputs)
    )
    infos = dict(zip(values, tensor_infos(file.source.types.of(values, end)), strict=True))
    inputs = dict.fromkeys(
        value for path, found in boundaries.items() if path for value in found.inputs
    )
    fixed = file.source.types.fixed_values(inputs, end)
    records = file.modules.records
    return [
        ExtractableModule(
            module=path,
            tag=file.modules.tags[path],
            class_=records[path].class_ if path in records else "",
            nodes=found.size,
            calls=records[path].calls if path in records else 0,
            inputs=tuple(infos[v] for v in found.inputs if v.name not in fixed or not path),
            outputs=tuple(infos[v] for v in found.outputs),
        )
        for path, found in boundaries.items()
    ]
