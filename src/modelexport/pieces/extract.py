"""extract(): one module of a tagged file as a model of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import onnx

from modelexport.collector import collector_paused
from modelexport.errors import ExtractionWarning, FormatError
from modelexport.graph import flatten
from modelexport.pieces.build import Piece, Source, build
from modelexport.pieces.cut import Cut, Members, cut, members_of, whole
from modelexport.pieces.levels import Level, by_doc_string, by_record, sort_nodes
from modelexport.pieces.target import Modules, Target
from modelexport.pieces.types import Types
from modelexport.pieces.write import Weights, loaded, write
from modelexport.tagged.files import StrPath, as_path, check_not_overwritten, mapped, parse
from modelexport.tagged.model import map_in_effect, recorded_tag
from modelexport.tagged.sidecar import PieceRecord, sidecar_path
from modelexport.tagged.staging import check_target
from modelexport.tagged.weights import weight_fields

_MOST_LOST = 3
SMALL_FILE = 64 << 20
"""Up to this size a file is read whole; of a larger one, weights are stepped over and copied as they are."""


class Extracted(NamedTuple):
    """A piece of a model, and the record of what it is."""

    model: onnx.ModelProto
    record: PieceRecord


def extract(
    onnx_model: onnx.ModelProto | StrPath, module: str, output: StrPath | None = None, *, call: int | None = None
) -> Extracted:
    """Cut one module out of a tagged model: a runnable model of its nodes, with tags.

    `module` is a tag, a module path or a glob that matches one; `call` takes only one call of a
    module that ran more than once. Its inputs are the tensors that enter it; constants and weights
    come along. With `output` the piece is written there with its sidecar, and weights in data files
    are copied into one of its own as far as they are needed; the model returned is then without them.
    Without `output` the model has all its weights in it. An ExtractionWarning says which values that the
    module returned are not among the outputs, as when the exporter removed them.
    """
    target = None if output is None else check_target(output)
    with collector_paused(), opened(onnx_model) as file:
        if target is not None:
            check_not_overwritten(file.path, file.source.proto, target, target.with_name(f"{target.name}.data"))
        wanted = file.find(module, call)
        found = file.cut(wanted)
        piece = build(file.source, found, wanted, "" if target is None else target.name)
        if target is None:
            extracted = Extracted(loaded(piece, file.weights), piece.record)
        else:
            write(piece, file.weights, target)
            extracted = Extracted(piece.proto, piece.record)
        if not file.is_all(wanted):
            _warn_of_lost_results(file, wanted, found)
    return extracted


def _warn_of_lost_results(file: TaggedFile, target: Target, found: Cut) -> None:
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
        f"{value} is not in the exported graph" if name is None else f"{value}, {name}, is not among its outputs"
        for value, name in missing
        if name not in constants
    ]
    if lost:
        told = "; ".join(lost[:_MOST_LOST]) + (f"; and {len(lost) - _MOST_LOST} more" if len(lost) > _MOST_LOST else "")
        name = target.path or "the root"
        message = f"the extracted model does not give all that {name} returned: {told}"
        warnings.warn(message, ExtractionWarning, stacklevel=3)


def _constants(main: Level) -> frozenset[str]:
    """Return the names of all values that do not depend on the inputs of the model."""
    return frozenset(name for level in main for name in (*level.weights, *level.flow(len(level.nodes)).constant))


class TaggedFile(NamedTuple):
    """A tagged model, open for as long as pieces are cut from it."""

    path: Path
    source: Source
    modules: Modules
    weights: Weights

    def find(self, module: str, call: int | None = None) -> Target:
        target = self.modules.find(module)
        return target if call is None else self.modules.called(target, call)

    def cut(self, target: Target) -> Cut:
        """What makes up a module."""
        if self.is_all(target):
            return whole(self.source.main)
        return cut(self.members(target), self.modules.results(target))

    def is_all(self, target: Target) -> bool:
        """Whether the model itself is meant, tagged or not."""
        return not target.path and target.call is None

    def members(self, target: Target) -> Members:
        """The nodes of a module; a module without any is an error, unless it is the model."""
        main = self.source.main
        if self.is_all(target):
            return [(main, list(range(len(main.nodes))))] if main.nodes else []
        found = members_of(main, self.modules.holds(target))
        if not found:
            raise self.modules.nothing(target)
        return found

    def piece(self, target: Target, name: str) -> Piece:
        """A module as a model."""
        return build(self.source, self.cut(target), target, name)


@contextmanager
def opened(onnx_model: onnx.ModelProto | StrPath) -> Iterator[TaggedFile]:
    """A model by its path or as a protobuf, with its levels and modules."""
    if isinstance(onnx_model, onnx.ModelProto):
        yield _read(Path(), onnx_model.SerializeToString())
        return
    path = as_path(onnx_model)
    with mapped(path) as data:
        try:
            yield _read(path, data)
        except (TypeError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError) or _has_odd_names(parse(data, path)):
                raise FormatError(f"{path} has names that are not UTF-8", hint="write it again") from error
            raise


def _has_odd_names(proto: onnx.ModelProto) -> bool:
    """Whether a name is not text; protobuf then gives its bytes."""
    names = [name for node in proto.graph.node for name in (*node.input, *node.output, node.name, node.op_type)]
    names += [tensor.name for tensor in proto.graph.initializer]
    names += [value.name for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)]
    return not all(isinstance(name, str) for name in names)


def _read(path: Path, data: bytes | memoryview) -> TaggedFile:
    fields = weight_fields(data, path) if len(data) > SMALL_FILE else None
    proto = parse(data, path, fields, whole=fields is None)
    main = Level(proto.graph, by_doc_string())
    if not main.flow(len(main.nodes)).in_order:
        sort_nodes(main)
        main = Level(proto.graph, by_doc_string())
    used = map_in_effect(path, proto, _is_tagged(main), lambda: flatten(proto))
    if used.sidecar is not None:
        main = Level(proto.graph, by_record({key: recorded_tag(node) for key, node in used.sidecar.nodes.items()}))
    if not _is_tagged(main) and main.nodes:
        raise _without_tags(path, used.refused)
    modules = Modules({} if used.records is None else used.records.modules, main.tags_inside())
    source = Source(path.name, proto, main, Types(proto, main), used.records)
    return TaggedFile(path, source, modules, Weights(data, fields, path))


def _without_tags(path: Path, refused: str | None) -> FormatError:
    if refused is not None:
        told = f"{path.name} has no tags, and {sidecar_path(path).name} cannot be used: {refused}"
        return FormatError(told, hint="export the model again")
    name = path.name or "the model"
    return FormatError(f"{name} has no tags, so nothing tells its modules", hint="export it with modelexport")


def _is_tagged(main: Level) -> bool:
    return any(tag is not None for level in main for tag in level.tags)
