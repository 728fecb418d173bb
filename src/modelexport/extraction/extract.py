"""Extract one module as a runnable model, or list the modules that can be extracted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx

from modelexport.analysis.subgraph import BoundaryValues
from modelexport.errors import ExtractionWarning, FormatError
from modelexport.extraction.boundary import (
    Boundary,
    Members,
    ends_in_order,
    find_boundary,
    in_graph_order,
    leaving_of,
    members_of,
    whole_model,
)
from modelexport.extraction.build import ExtractedModel, SourceModel, build_model
from modelexport.extraction.initializers import (
    InitializerSource,
    load_initializers,
    write_extracted,
)
from modelexport.garbage import pause_collector
from modelexport.graph.flat import Graph, flatten
from modelexport.graph.inference import TypeInference
from modelexport.graph.nested import Subgraph, SubgraphValue, sort_nodes
from modelexport.modules.lookup import ModuleIndex, ModuleRef
from modelexport.modules.record import NodeTag
from modelexport.modules.tree import Ancestry, is_within, subtree_totals
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

_MOST_LOST = 3
SMALL_FILE = 64 << 20
"""Up to this size a file is read whole; of a larger one, weights are stepped over and copied as they are."""


class Extraction(NamedTuple):
    """A piece of a model, and the record of what it is."""

    model: onnx.ModelProto
    record: ExtractionRecord


@keyword_aliases(onnx_model="path", output="output_path")
def extract(
    path: onnx.ModelProto | StrPath,
    module: str,
    output_path: StrPath | None = None,
    *,
    call: int | None = None,
) -> Extraction:
    """Cut one module out of a tagged model: a runnable model of its nodes, with tags.

    `module` is a tag, a module path or a glob that matches one; `call` takes only one call of a
    module that ran more than once. Its inputs are the tensors that enter it; constants and weights
    come along. With `output_path` the piece is written there with its sidecar, and weights in data files
    are copied into one of its own as far as they are needed; the model returned is then without them.
    Without it the model has all its weights in it. An ExtractionWarning says which values that the
    module returned are not among the outputs, as when the exporter removed them.
    """
    target = None if output_path is None else check_output_path(output_path)
    with pause_collector(), open_tagged(path) as file:
        if target is not None:
            check_no_overwrite(
                file.path, file.source.proto, target, target.with_name(f"{target.name}.data")
            )
        wanted = file.find(module, call)
        found = file.cut(wanted)
        piece = build_model(file.source, found, wanted, "" if target is None else target.name)
        if target is None:
            extracted = Extraction(load_initializers(piece, file.weights), piece.record)
        else:
            write_extracted(piece, file.weights, target)
            extracted = Extraction(piece.proto, piece.record)
        if not file.is_all(wanted):
            _warn_of_lost_results(file, wanted, found)
    return extracted


def _warn_of_lost_results(file: OpenModel, target: ModuleRef, found: Boundary) -> None:
    """Warn where a value that the module returned is neither an input nor an output of the extracted model.

    A constant is not missed: the exporter computed it, so it does not depend on what the module is given.
    """
    present = {border.name for border in (*found.inputs, *found.outputs)}
    calls = file.modules.returned(target)
    missing = [
        (f"value {place}" + (f" of call {call}" if len(calls) > 1 else ""), name)
        for call, names in calls.items()
        for place, name in enumerate(names)
        if name not in present
    ]
    constants = _constants(file.source.main) if missing else frozenset()
    lost = [
        f"{value} is not in the exported graph"
        if name is None
        else f"{value}, {name}, is not among its outputs"
        for value, name in missing
        if name not in constants
    ]
    if lost:
        told = "; ".join(lost[:_MOST_LOST]) + (
            f"; and {len(lost) - _MOST_LOST} more" if len(lost) > _MOST_LOST else ""
        )
        name = target.path or "the root"
        message = f"the extracted model does not give all that {name} returned: {told}"
        warnings.warn(message, ExtractionWarning, stacklevel=4)


def _constants(main: Subgraph) -> frozenset[str]:
    """Return the names of all values that do not depend on the inputs of the model."""
    return frozenset(
        name for level in main for name in (*level.weights, *level.flow(len(level.nodes)).constant)
    )


class OpenModel(NamedTuple):
    """A tagged model, open for as long as pieces are cut from it."""

    path: Path
    source: SourceModel
    modules: ModuleIndex
    weights: InitializerSource

    def find(self, module: str, call: int | None = None) -> ModuleRef:
        target = self.modules.find(module)
        return target if call is None else self.modules.called(target, call)

    def cut(self, target: ModuleRef) -> Boundary:
        """What makes up a module."""
        if self.is_all(target):
            return whole_model(self.source.main)
        return find_boundary(self.members(target), self.modules.results(target))

    def is_all(self, target: ModuleRef) -> bool:
        """Whether the model itself is meant, tagged or not."""
        return not target.path and target.call is None

    def members(self, target: ModuleRef) -> Members:
        """The nodes of a module; a module without any is an error, unless it is the model."""
        main = self.source.main
        if self.is_all(target):
            return [(main, list(range(len(main.nodes))))] if main.nodes else []
        found = members_of(main, self.modules.holds(target))
        if not found:
            raise self.modules.nothing(target)
        return found

    def piece(self, target: ModuleRef, name: str) -> ExtractedModel:
        """A module as a model."""
        return build_model(self.source, self.cut(target), target, name)


@contextmanager
def open_tagged(onnx_model: onnx.ModelProto | StrPath) -> Iterator[OpenModel]:
    """A model by its path or as a protobuf, with its levels and modules."""
    if isinstance(onnx_model, onnx.ModelProto):
        yield _read(Path(), onnx_model.SerializeToString())
        return
    path = as_path(onnx_model)
    with open_mapped(path) as data:
        try:
            yield _read(path, data)
        except (TypeError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError) or _has_odd_names(parse_model(data, path)):
                raise FormatError(
                    f"{path} has names that are not UTF-8", hint="write it again"
                ) from error
            raise


def _has_odd_names(proto: onnx.ModelProto) -> bool:
    """Whether a name is not text; protobuf then gives its bytes."""
    names = [
        name
        for node in proto.graph.node
        for name in (*node.input, *node.output, node.name, node.op_type)
    ]
    names += [tensor.name for tensor in proto.graph.initializer]
    names += [
        value.name for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    ]
    return not all(isinstance(name, str) for name in names)


def _read(path: Path, data: bytes | memoryview) -> OpenModel:
    fields = initializer_fields(data, path) if len(data) > SMALL_FILE else None
    proto = parse_model(data, path, fields, whole=fields is None)
    main = Subgraph(proto.graph, tags_from_doc_strings())
    if not main.flow(len(main.nodes)).in_order:
        sort_nodes(main)
        main = Subgraph(proto.graph, tags_from_doc_strings())
    used = map_in_effect(path, proto, _is_tagged(main), lambda: flatten(proto))
    if used.sidecar is not None:
        main = Subgraph(
            proto.graph,
            tags_from_records(
                {key: recorded_tag(node) for key, node in used.sidecar.nodes.items()}
            ),
        )
    if not _is_tagged(main) and main.nodes:
        raise _without_tags(path, used.refused)
    modules = ModuleIndex({} if used.records is None else used.records.modules, main.tags_inside())
    source = SourceModel(path.name, proto, main, TypeInference(proto, main), used.records)
    return OpenModel(path, source, modules, InitializerSource(data, fields, path))


def _without_tags(path: Path, refused: str | None) -> FormatError:
    if refused is not None:
        told = f"{path.name} has no tags, and {sidecar_path(path).name} cannot be used: {refused}"
        return FormatError(told, hint="export the model again")
    name = path.name or "the model"
    return FormatError(
        f"{name} has no tags, so nothing tells its modules", hint="export it with modelexport"
    )


def _is_tagged(main: Subgraph) -> bool:
    return any(tag is not None for level in main for tag in level.tags)


class ExtractableModule(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One module: how many nodes it has, how often it ran, and the tensors that cross its border."""

    module: str
    tag: str | None
    class_: str
    nodes: int
    calls: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def list_extractable(path: StrPath, module: str | None = None) -> list[ExtractableModule]:
    """The modules that can be extracted, in the order of their paths in the file; only one of them if asked for."""
    with open_tagged(path) as file:
        target = None if module is None else file.find(module)
        return _list(file, target)


def _list(file: OpenModel, target: ModuleRef | None) -> list[ExtractableModule]:
    own = Counter(tag.hierarchy_module for tag in file.source.main.tags_inside() if tag is not None)
    counts = subtree_totals(own, Ancestry(file.modules.records))
    wanted = [
        path
        for path in file.modules.tags
        if counts[path] and (target is None or path == target.path)
    ]
    if target is not None and not wanted:
        raise file.modules.nothing(target)
    exactly = bool(file.source.main.bodies) or len(wanted) == 1
    found = _by_cutting(file, wanted) if exactly else _at_once(file, wanted, counts)
    crossing = dict.fromkeys(
        border for inputs, outputs, _ in found.values() for border in (*inputs, *outputs)
    )
    end = len(file.source.main.nodes)
    known = dict(zip(crossing, tensor_infos(file.source.types.of(crossing, end)), strict=True))
    entering = dict.fromkeys(
        border for path, (inputs, _, _) in found.items() for border in inputs if path
    )
    fixed = file.source.types.fixed_values(entering, end)
    records = file.modules.records
    return [
        ExtractableModule(
            module=path,
            tag=file.modules.tags[path],
            class_=records[path].class_ if path in records else "",
            nodes=nodes,
            calls=records[path].calls if path in records else 0,
            inputs=tuple(
                known[border] for border in inputs if border.name not in fixed or not path
            ),
            outputs=tuple(known[border] for border in outputs),
        )
        for path, (inputs, outputs, nodes) in found.items()
    ]


Crossing = tuple[list[SubgraphValue], list[SubgraphValue], int]
"""What enters and leaves a module, and how many nodes it has."""


def _by_cutting(file: OpenModel, wanted: list[str]) -> dict[str, Crossing]:
    """One cut after the other."""
    found: dict[str, Crossing] = {}
    for path in wanted:
        piece = file.cut(ModuleRef(path, None))
        found[path] = list(piece.inputs), list(piece.outputs), piece.size
    return found


def boundary_values(file: OpenModel) -> tuple[Graph, list[NodeTag | None], BoundaryValues]:
    """The whole graph laid flat, the tags of its nodes, and what crosses the border of each module."""
    main = file.source.main
    graph = flatten(file.source.proto)
    tags = list(main.tags_inside())
    tags += [None] * (len(graph.nodes) - len(tags))  # what is in functions is nobody's
    constant = main.flow(len(main.nodes)).constant
    return graph, tags, BoundaryValues(graph, tags, Ancestry(file.modules.records), constant)


def _at_once(file: OpenModel, wanted: list[str], counts: Mapping[str, int]) -> dict[str, Crossing]:
    """All modules in one walk through a graph without bodies."""
    main = file.source.main
    graph, tags, borders = boundary_values(file)
    place = {name: number for number, name in enumerate(graph.producer)}

    def made_inside(name: str, path: str) -> bool:
        tag = tags[graph.producer[name]] if name in graph.producer else None
        return tag is not None and is_within(tag.hierarchy_module, path)

    found: dict[str, Crossing] = {}
    for path in wanted:
        if not path:
            model = whole_model(main)
            found[path] = list(model.inputs), list(model.outputs), model.size
            continue
        results = [
            name for name in file.modules.results(ModuleRef(path, None)) if made_inside(name, path)
        ]
        leaving = {*borders.outputs.get(path, ()), *results} or set(
            _of_constants(file, ModuleRef(path, None))
        )
        entering = [SubgraphValue(main, name) for name in borders.inputs.get(path, ())]
        leaving_in_order = [
            SubgraphValue(main, name) for name in sorted(leaving, key=lambda name: place[name])
        ]
        found[path] = in_graph_order(entering), ends_in_order(main, leaving_in_order), counts[path]
    return found


def _of_constants(file: OpenModel, target: ModuleRef) -> Iterator[str]:
    """What a module gives of which everybody has a copy."""
    for level, places in members_of(file.source.main, file.modules.holds(target)):
        yield from leaving_of(level, places, ())
