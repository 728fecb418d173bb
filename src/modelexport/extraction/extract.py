"""Extract one module as a runnable model, or list the modules that can be extracted."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from modelexport.errors import ExtractionWarning, FormatError
from modelexport.extraction.boundary import (
    Boundary,
    OpenModel,
    consumers_by_value,
    find_boundary,
    find_members,
)
from modelexport.extraction.build import build_model
from modelexport.graph.flat import flatten, pause_collector
from modelexport.graph.inference import TypeInference
from modelexport.graph.nested import Subgraph, sort_nodes
from modelexport.modules.lookup import ModuleIndex, ModuleRef
from modelexport.modules.tags import describe_lost_tags
from modelexport.modules.tree import Ancestry
from modelexport.onnx_file.atomic_write import check_output_path
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    external_files,
    initializer_fields,
    open_mapped,
    parse_model,
)
from modelexport.onnx_file.output_files import check_no_overwrite
from modelexport.options import keyword_aliases
from modelexport.tagged.model import (
    has_module_functions,
    map_in_effect,
    no_map_error,
    recorded_tag,
    tags_from_doc_strings,
    tags_from_records,
)
from modelexport.tagged.records import ExtractionRecord, TensorInfo
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
            check_no_overwrite(file.path, external_files(file.proto), target, data_file)
        ref = file.find(module, call)
        boundary = file.boundary(ref)
        extracted = build_model(file, boundary, ref, "" if target is None else target.name)
        if target is not None:
            extracted.write(target)
        model = extracted.load() if target is None else extracted.proto
        if not file.is_whole_model(ref):
            _warn_of_lost_results(file, ref, boundary)
            _warn_of_lost_tags(file)
    return Extraction(model, extracted.record)


def _warn_of_lost_results(file: OpenModel, ref: ModuleRef, boundary: Boundary) -> None:
    """Warn if a value that the module returned is neither an input nor an output.

    Constants do not count: they were computed at export, so they depend on no input.
    """
    present = {value.name for value in (*boundary.inputs, *boundary.outputs)}
    calls = file.modules.returned_values(ref)
    if all(name in present for names in calls.values() for name in names):
        return
    for subgraph in file.main:
        present |= {*subgraph.initializers, *subgraph.flow(len(subgraph.nodes)).constant}
    lost = [
        f"value {index}"
        + (f" of call {call}" if len(calls) > 1 else "")
        + (
            " is not in the exported graph"
            if name is None
            else f", {name}, is not among its outputs"
        )
        for call, names in calls.items()
        for index, name in enumerate(names)
        if name not in present
    ]
    if lost:
        more = f"; and {len(lost) - _MOST_LOST} more" if len(lost) > _MOST_LOST else ""
        message = (
            f"the extracted model lacks outputs that {ref.path or 'the root'} returned: "
            f"{'; '.join(lost[:_MOST_LOST])}{more}"
        )
        warnings.warn(message, ExtractionWarning, stacklevel=4)


def _warn_of_lost_tags(file: OpenModel) -> None:
    message = describe_lost_tags(file.modules.records, list(file.main.all_tags()))
    if message is not None:
        warnings.warn(f"the extracted model is incomplete: {message}", ExtractionWarning, 4)


@contextmanager
def open_tagged(onnx_model: onnx.ModelProto | StrPath) -> Iterator[OpenModel]:
    """Open a model for extraction until the block ends; raise if it is malformed or has no tags."""
    if isinstance(onnx_model, onnx.ModelProto):
        yield _parse(Path(), onnx_model.SerializeToString())
        return
    path = as_path(onnx_model)
    with open_mapped(path) as data:
        try:
            yield _parse(path, data)
        except (TypeError, UnicodeDecodeError) as error:
            # protobuf gives bytes for a name that is not UTF-8, which breaks in many places.
            is_decoding = isinstance(error, UnicodeDecodeError)
            if not is_decoding and not flatten(parse_model(data, path)).non_utf8_names:
                raise
            message = f"{path} has names that are not UTF-8"
            raise FormatError(message, hint="write it again") from error


def _parse(path: Path, data: bytes | memoryview) -> OpenModel:
    fields = initializer_fields(data, path) if len(data) > SMALL_FILE else None
    proto = parse_model(data, path, fields, whole=fields is None)
    if has_module_functions(proto):
        raise FormatError(
            f"the modules of {path.name or 'the model'} are functions",
            hint="modelexport functions --inline restores the flat file",
        )
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
        raise no_map_error(path, effective)
    records = effective.records
    modules = ModuleIndex({} if records is None else records.modules, main.all_tags())
    types = TypeInference(proto, main)
    return OpenModel(path, proto, main, types, records, modules, data, fields)


def _is_tagged(main: Subgraph) -> bool:
    return any(tag is not None for subgraph in main for tag in subgraph.tags)


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
    for subgraph in file.main:
        subgraph.flow(len(subgraph.nodes))  # once, instead of again for each module
    ancestry = Ancestry({})
    members = find_members(file.main, lambda path, call: ancestry.of(path))
    consumers_of = functools.cache(consumers_by_value)
    boundaries: dict[str, Boundary] = {}
    for path in file.modules.tags:
        if path in members:
            ref = ModuleRef(path, None)
            results = file.modules.results(ref)
            boundaries[path] = (
                find_boundary(members[path], results, consumers_of=consumers_of)
                if path
                else file.boundary(ref)
            )
    return boundaries


def _describe_modules(file: OpenModel, boundaries: dict[str, Boundary]) -> list[ExtractableModule]:
    end, records = len(file.main.nodes), file.modules.records
    values = dict.fromkeys(v for b in boundaries.values() for v in (*b.inputs, *b.outputs))
    infos = dict(zip(values, tensor_infos(file.types.of(values, end)), strict=True))
    inputs = dict.fromkeys(value for path, b in boundaries.items() if path for value in b.inputs)
    fixed = file.types.fixed_values(inputs, end)
    return [
        ExtractableModule(
            module=path,
            tag=file.modules.tags[path],
            class_=records[path].class_ if path in records else "",
            nodes=boundary.size,
            calls=records[path].calls if path in records else 0,
            inputs=tuple(infos[v] for v in boundary.inputs if v.name not in fixed or not path),
            outputs=tuple(infos[v] for v in boundary.outputs),
        )
        for path, boundary in boundaries.items()
    ]
