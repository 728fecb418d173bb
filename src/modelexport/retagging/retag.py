"""retag(): carry the map of a tagged file over to what another tool made of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from modelexport.errors import FormatError, NotDescendedError, plural
from modelexport.graph.flat import pause_collector
from modelexport.modules.record import Attribution
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    open_mapped,
    opset_imports,
    parse_model,
    require_data_file,
)
from modelexport.onnx_file.output_files import check_no_overwrite, copy_data_files
from modelexport.onnx_file.wire import Buffer
from modelexport.retagging.anchors import Anchors, Side, find_anchors
from modelexport.retagging.carry import carry_records, find_results
from modelexport.retagging.fill import Filler, Modules
from modelexport.retagging.sketch import Array, Sketch, SketchIndex
from modelexport.retagging.values import OpenFile, sketch_initializers, sketch_values
from modelexport.tagged.hierarchy_map import HierarchyMap, make_map, tagged_chunks
from modelexport.tagged.model import TaggedModel, require_records
from modelexport.tagged.records import (
    EmbeddedMap,
    RetagRecord,
    Sidecar,
    sidecar_path,
)
from modelexport.tagged.tables import tensor_infos
from modelexport.verification.feeds import describe_shape, fits_shape, make_feeds

_LEAST_RELATED = 0.3
"""The share of nodes, values or initializers that a file shares with the one it was made from."""
_RELATED = 0.5
"""The relative error from which two values have nothing to do with each other."""


_CORRELATED = 0.7
_MANY = 64
"""The correlation that so many unrelated numbers do not have by chance."""


class RetagReport(msgspec.Struct, frozen=True):
    """What `retag` wrote: the files, and the map that they carry."""

    onnx_path: Path
    sidecar_path: Path
    data_paths: tuple[Path, ...]
    compared: str | None
    """On which inputs the values of the two files were compared; None if they were not."""
    hierarchy: Sidecar
    """The whole map, as the sidecar has it."""

    @property
    def nodes(self) -> int:
        """The number of nodes; each has a tag."""
        return self.hierarchy.statistics.nodes

    @property
    def methods(self) -> dict[str, int]:
        """How many nodes rest on which evidence."""
        return self.hierarchy.statistics.methods


def retag(
    original: StrPath,
    changed: StrPath,
    output_path: StrPath,
    *,
    inputs: StrPath | Mapping[str, Array] | None = None,
    run: bool = True,
    on_step: Callable[[str], None] | None = None,
) -> RetagReport:
    """Write a file that another tool made from a tagged one, with a tag on every node.

    Nodes are matched by names, by structure, and by the values that they compute, for which both
    files run once in ONNX Runtime. `strip` restores the bytes of the changed file.

    Args:
        original: The tagged file, or one with a sidecar.
        changed: The file that an optimiser, a quantizer or a converter made from it.
        output_path: The file to write, with a sidecar beside it.
        inputs: Arrays by input name, or an `.npz` file with them; None for the example inputs that
            the export recorded.
        run: Compare values. Without it, only names and structure are used, and nothing runs.
        on_step: Called with a line of progress.

    Returns:
        What was written, and the map.

    Raises:
        ArgumentError: The output would overwrite an input, or the inputs do not fit.
        FileError: A file cannot be read or written.
        FormatError: A file is not a model, the original has no tags, or a file does not run.
        NotDescendedError: The changed file was not made from the original.
    """
    target, step = check_output_path(output_path), on_step or (lambda _: None)
    with pause_collector():
        return _retag(
            as_path(original), as_path(changed), target, inputs, run, step, verify_origin=True
        )


def retag_result(
    original: Path,
    changed: Path,
    target: Path,
    feeds: Mapping[str, Array],
    on_step: Callable[[str], None] = lambda _: None,
) -> RetagReport:
    """Retag a file that the caller has just made from the original, so its origin is certain."""
    with pause_collector():
        return _retag(original, changed, target, feeds, True, on_step, verify_origin=False)


def _retag(
    original: Path,
    changed: Path,
    target: Path,
    inputs: StrPath | Mapping[str, Array] | None,
    run: bool,
    step: Callable[[str], None],
    verify_origin: bool,
) -> RetagReport:
    with ExitStack() as stack:
        step("read the two files")
        old, old_model = _open(stack.enter_context(open_mapped(original)), original)
        new, new_model = _open(stack.enter_context(open_mapped(changed, whole=True)), changed)
        records = require_records(old_model)
        for file in (old, new):
            check_no_overwrite(file.path, file.data_files, target)
        sides, compared = _sides(old_model, old, new, inputs, run, step)
        step("match the nodes")
        anchors = find_anchors(*sides, new_model.tags, old_model.effective_tags)
        if verify_origin:
            _check_descent(*sides, anchors, old.path.name, new.path.name)
        modules = Modules(old_model.modules)
        answers = Filler(*sides, anchors, old_model.effective_tags, new_model.tags, modules).fill()
        hierarchy = _build_map(
            records, new, sides, anchors, modules, answers, target,
            RetagRecord(old.path.name, new.path.name, compared),
        )  # fmt: skip
        step("write the files")
        keep = [old.path.parent / name for name in old.data_files]
        data_paths = _write(new, target, hierarchy, keep)
    return RetagReport(target, sidecar_path(target), data_paths, compared, hierarchy.sidecar)


def _open(data: Buffer, path: Path) -> tuple[OpenFile, TaggedModel]:
    proto = parse_model(data, path)
    model = TaggedModel(path, proto)
    data_files = model.data_files
    for name in data_files:
        require_data_file(path, name)
    return OpenFile(path, data, proto, model.graph, data_files), model


def _sides(
    old_model: TaggedModel,
    old: OpenFile,
    new: OpenFile,
    inputs: StrPath | Mapping[str, Array] | None,
    run: bool,
    step: Callable[[str], None],
) -> tuple[tuple[Side, Side], str | None]:
    """Run both files on the same inputs, if values are to be compared."""
    if not run:
        return (_unrun(old), _unrun(new)), None
    feeds = make_feeds(old_model, inputs)
    changed_feeds = _feeds_of_changed(old, new, feeds.values)

    def side(file: OpenFile, values: Mapping[str, Array]) -> Side:
        step(f"run {file.path.name}")
        return msgspec.structs.replace(_unrun(file), sketches=sketch_values(file, values))

    return (side(old, feeds.values), side(new, changed_feeds)), feeds.source


def _unrun(file: OpenFile) -> Side:
    return Side(file.graph, {}, lambda names: sketch_initializers(file, names))


def _feeds_of_changed(
    old: OpenFile, new: OpenFile, values: Mapping[str, Array]
) -> dict[str, Array]:
    """Match the inputs of the two files by name, else by position."""
    before, after = old.graph.inputs, new.graph.inputs
    problem = None
    feeds = {name: values[name] for name in after if name in values}
    if len(feeds) < len(after) and len(before) == len(after):
        feeds = {name: values[origin] for name, origin in zip(after, before, strict=True)}
    elif len(feeds) < len(after):
        problem = f"it has {plural(len(after), 'input')}, not {len(before)}"
    for info in tensor_infos(new.proto.graph.input):
        array = feeds.get(info.name)
        if array is not None and not fits_shape(info, array.shape):
            expected, given = describe_shape(info.shape), describe_shape(array.shape)
            problem = problem or f"its input {info.name!r} is {expected}, not {given}"
    if problem is not None:
        raise NotDescendedError(
            f"{new.path.name} was not made from {old.path.name}: {problem}",
            hint="pass the tagged file that it was made from; --no-run compares no values",
        )
    return feeds


def _check_descent(old: Side, new: Side, anchors: Anchors, original: str, changed: str) -> None:
    """Refuse a file that shares hardly a node, a value or an initializer with the original."""
    reason = _missing_nodes(old, new, anchors)
    if reason is None:
        pairs = _comparable_values(old, new, anchors)
        reason = _unlike_values(pairs) if pairs else _unlike_names(old, new, anchors)
    if reason is None or _outputs_agree(old, new) or _share_initializers(old, new):
        return
    raise NotDescendedError(
        f"{changed} was not made from {original}: {reason}",
        hint="pass the tagged file that it was made from"
        + ("; --no-run compares no values" if new.sketches else ""),
    )


def _missing_nodes(old: Side, new: Side, anchors: Anchors) -> str | None:
    """Describe how few nodes of either file have a counterpart in the other, if they are few."""
    total, matched = len(new.graph.nodes), len(anchors.nodes)
    kept = len({anchor.origin for anchor in anchors.nodes.values()})
    enough = matched >= _LEAST_RELATED * total or kept >= _LEAST_RELATED * len(old.graph.nodes)
    if not enough:
        return f"only {matched} of its {plural(total, 'node')} have a counterpart there"
    return None


def _unlike_names(old: Side, new: Side, anchors: Anchors) -> str | None:
    """Describe how few nodes are like the node of their name, if they are few."""
    total, matched = len(new.graph.nodes), len(anchors.nodes)
    kept = len({anchor.origin for anchor in anchors.nodes.values()})
    # Any two small graphs have nodes with the same surroundings: a name or a value tells more.
    by_structure = all(each.by == "structure" for each in anchors.nodes.values())
    if by_structure:
        is_whole = matched == total == kept == len(old.graph.nodes)
        return None if is_whole else "only the structure of its nodes is similar, and no name"
    enough_nodes = math.ceil(_LEAST_RELATED * min(total, len(old.graph.nodes)))
    found = (index for index in anchors.nodes if _is_alike(old, new, anchors, index))
    alike = sum(1 for _ in itertools.islice(found, enough_nodes))
    if alike == enough_nodes:
        return None
    nodes = plural(total, "node")
    return f"only {alike} of its {nodes} have the name, the operator and an input of a node there"


def _is_alike(old: Side, new: Side, anchors: Anchors, index: int) -> bool:
    """Return whether a node is like the original node of its name: exporters repeat names."""
    anchor, node = anchors.nodes[index], new.graph.nodes[index]
    origin = old.graph.nodes[anchor.origin]
    if anchor.by == "structure" or node.op_type != origin.op_type:
        return False
    inputs = {anchors.values.get(name, name) for name in node.inputs}
    return not origin.inputs or not inputs.isdisjoint(origin.inputs)


def _comparable_values(old: Side, new: Side, anchors: Anchors) -> list[tuple[Sketch, Sketch]]:
    """Pair the values of floats with those of the same name or position; none without a run."""
    if not new.sketches:
        return []
    pairs = [
        (new.sketches[name], old.sketches[origin])
        for name, origin in anchors.values.items()
        if name in new.sketches and origin in old.sketches and name in new.graph.producer
    ]
    return [(a, b) for a, b in pairs if a.is_float and b.is_distinct and a.size == b.size]


def _unlike_values(pairs: Sequence[tuple[Sketch, Sketch]]) -> str | None:
    """Describe how few pairs of values are similar, if they are few."""
    related = sum(a.order_error(b) < _RELATED for a, b in pairs)
    if related >= _LEAST_RELATED * len(pairs):
        return None
    return f"only {related} of {len(pairs)} values with the same name or position are similar"


def _share_initializers(old: Side, new: Side) -> bool:
    """Return whether many initializers are the same, as in a file that a tool damaged."""
    known = SketchIndex(old.initializers(set(old.graph.initializers)))
    sketches = new.initializers(set(new.graph.initializers)).values()
    floats = [each for each in sketches if each.is_float and each.is_distinct]
    shared = sum(bool(known.find(each)) for each in floats)
    return bool(floats) and shared >= _LEAST_RELATED * len(floats)


def _outputs_agree(old: Side, new: Side) -> bool:
    """Return whether both files return similar values, as a quantized file with new names does."""
    pairs = zip(old.graph.outputs, new.graph.outputs, strict=False)
    sketches = [(old.sketches.get(a), new.sketches.get(b)) for a, b in pairs]
    known = [(a, b) for a, b in sketches if a is not None and b is not None and a.is_distinct]
    return bool(known) and all(
        a.order_error(b) < _RELATED or (a.size > _MANY and a.correlation(b) > _CORRELATED)
        for a, b in known
    )


def _build_map(
    records: EmbeddedMap | Sidecar,
    new: OpenFile,
    sides: tuple[Side, Side],
    anchors: Anchors,
    modules: Modules,
    answers: list[Attribution],
    target: Path,
    retagged: RetagRecord,
) -> HierarchyMap:
    results = find_results(*sides, anchors, modules.records.values())
    carried = carry_records(modules, answers, results)
    paths = {answer.path for answer in answers}
    tag_of = {path: modules.carried_tag(path) or "/" for path in paths}
    opset = opset_imports(new.proto).get("ai.onnx", 0)
    model = msgspec.structs.replace(
        records.model, onnx=target.name, opset=opset, ir_version=new.proto.ir_version
    )
    export = msgspec.structs.replace(
        records.export,
        inputs=tensor_infos(new.proto.graph.input),
        outputs=tensor_infos(new.proto.graph.output),
        retag=retagged,
        namespaces=msgspec.UNSET,  # those in the changed file are not of this map
    )
    hierarchy = make_map(new.graph, answers, tag_of, model, export, carried)
    if len(hierarchy.sidecar.nodes) < len(hierarchy.node_tags):
        raise FormatError(f"{new.path.name} is not valid: two of its nodes compute the same value")
    return hierarchy


def _write(
    new: OpenFile, target: Path, hierarchy: HierarchyMap, keep: Sequence[Path]
) -> tuple[Path, ...]:
    """Write the model and its sidecar, with its data files where the folder is another one."""
    with transaction(target.parent) as stage:
        copy_data_files(stage, new.path, new.data_files, target, keep)
        sidecar = stage.write("sidecar", [hierarchy.sidecar_bytes])
        stage.publish(sidecar, sidecar_path(target).name)
        stage.publish(stage.write("model", tagged_chunks(new.data, hierarchy)), target.name)
        stage.commit()
    return tuple(target.parent / name for name in new.data_files)
