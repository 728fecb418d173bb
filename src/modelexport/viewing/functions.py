"""to_functions() and from_functions(): modules as ONNX local functions, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from modelexport.errors import ArgumentError, FormatError
from modelexport.graph.flat import pause_collector
from modelexport.modules.lookup import ModuleIndex, is_tag_within
from modelexport.modules.record import Method, NodeTag
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    external_files,
    open_mapped,
    parse_model,
)
from modelexport.onnx_file.output_files import check_no_overwrite, copy_data_files
from modelexport.option_values import spell_option
from modelexport.tagged.model import TaggedModel, require_tags
from modelexport.tagged.tables import consumer_tags
from modelexport.viewing.function_bytes import (
    Boundary,
    FunctionWriter,
    Title,
    find_boundaries,
)
from modelexport.viewing.function_names import name_functions
from modelexport.viewing.grouping import (
    Group,
    MainNodes,
    ModuleCalls,
    group_nodes,
    read_main_nodes,
)
from modelexport.viewing.inlining import altered, flat_chunks, read_record


class FunctionsReport(msgspec.Struct, frozen=True):
    """What `to_functions` wrote."""

    onnx_path: Path
    data_files: tuple[str, ...]
    """The names of the data files that the model needs."""
    functions: dict[str, str]
    """The path of the module that each function was made from, by the function's name."""
    split: tuple[str, ...]
    """The paths of modules of which a call takes several functions."""
    levels: int
    """How deep the functions are nested."""
    nodes: int
    """The number of nodes of the flat graph."""
    top_nodes: int
    """The number of nodes that the main graph is left with, calls of functions included."""


def to_functions(
    path: StrPath,
    output_path: StrPath,
    *,
    depth: int | None = None,
    all_modules: bool = False,
    on_step: Callable[[str], None] | None = None,
) -> FunctionsReport:
    """Write a tagged file with an ONNX local function for each call of each module.

    The functions are nested as the modules are, so that viewers which open functions show the model
    by module. The file computes the same as before, and `from_functions` restores the original byte
    for byte. A call gets no function if it has a single node, or if the module never ran itself; it
    gets several if nodes of other modules have to run in the middle.

    Args:
        path: A tagged file, or one with a sidecar.
        output_path: The file to write.
        depth: How many levels of modules below the root become functions; None for all.
        all_modules: Whether modules without a tag of their own become functions as well.
        on_step: Called with a line of progress.

    Returns:
        What was written.

    Raises:
        ArgumentError: The depth is not positive, or the output would overwrite the input.
        FileError: A file cannot be read or written.
        FormatError: The file is not a model, has no tags, or its modules are functions already.
    """
    _check_depth(depth)
    source, target = as_path(path), check_output_path(output_path)
    step = on_step or (lambda _: None)
    with pause_collector(), open_mapped(source) as data:
        step(f"read {source.name}")
        model = TaggedModel(source, parse_model(data, source))
        _check_convertible(model, data)
        data_files = external_files(model.proto)
        check_no_overwrite(source, data_files, target)
        step("group the nodes by module")
        modules = ModuleIndex(model.modules, model.effective_tags)
        main = read_main_nodes(model.graph)
        root = _group(model, main, modules, depth, all_modules)
        boundaries = find_boundaries(main, root, model.proto.graph)
        titles = _make_titles(model, modules, boundaries)
        writer = FunctionWriter(data, model.proto, main, root, boundaries, titles)
        step(f"write {target.name}")
        with transaction(target.parent) as stage:
            copy_data_files(stage, source, data_files, target)
            written = stage.write("model", writer.chunks())
            _check_restores(written, source)
            stage.publish(written, target.name)
            stage.commit()
    return _make_report(target, data_files, titles, root)


def _make_report(
    target: Path, data_files: Iterable[str], titles: Mapping[Group, Title], root: Group
) -> FunctionsReport:
    return FunctionsReport(
        target,
        tuple(data_files),
        {title.function: group.call[0] for group, title in titles.items()},
        tuple(dict.fromkeys(group.call[0] for group in titles if group.part is not None)),
        _count_levels(root),
        len(root.members),
        len(root.items),
    )


def _check_depth(depth: int | None) -> None:
    if depth is None or (isinstance(depth, int) and not isinstance(depth, bool) and depth > 0):
        return
    raise ArgumentError(
        f"{spell_option('depth')} must be a positive number of levels, got {depth!r}",
        hint="leave it out for all levels",
    )


def _check_convertible(model: TaggedModel, data: wire.Buffer) -> None:
    """Refuse a file without tags, one that has been converted, and one that cannot be edited."""
    name = model.path.name
    if model.has_module_functions:
        raise FormatError(
            f"the modules of {name} are functions already",
            hint="modelexport functions --inline restores the flat file",
        )
    require_tags(model)
    if len(list(wire.graphs(data))) != 1:
        raise FormatError(f"{name} has its graph in several parts", hint="save it with onnx")


def _group(
    model: TaggedModel,
    main: MainNodes,
    modules: ModuleIndex,
    depth: int | None,
    all_modules: bool,
) -> Group:
    tags = model.effective_tags
    calls = ModuleCalls(modules, tags, depth, all_modules)
    around = [
        calls.around(tag)
        for node, tag in zip(model.graph.nodes, tags, strict=True)
        if node.enclosing < 0 and not node.function
    ]
    return group_nodes(around, main.find_sources())


def _make_titles(
    model: TaggedModel, modules: ModuleIndex, boundaries: Mapping[Group, Boundary]
) -> dict[Group, Title]:
    """Label the function of each group, outer groups first, and the node that calls it."""
    groups = list(boundaries)[::-1]
    primary = [None if tag is None else tag.hierarchy_path for tag in model.effective_tags]
    consumers = consumer_tags(model.graph, primary)
    # A clean file stays without tags: its sidecar has them.
    is_tagged = model.is_tagged
    titles: dict[Group, Title] = {}
    for group, function in zip(groups, name_functions(groups, modules), strict=True):
        path, call = group.call
        tag = modules.carried_tag(path) or "/"
        others = {tag for name in boundaries[group].outputs for tag in consumers.get(name, ())}
        tags = (tag, *sorted(other for other in others if not is_tag_within(other, tag)))
        own = NodeTag(tags, tag, len(tags), Method.SCOPE.value, path, call)
        record = modules.records.get(path)
        lines = [f"module {path}", f"tag {tag}"]
        lines += [f"class {record.class_}"] if record is not None else []
        lines += [f"call {call}"] if call is not None else []
        lines += [f"part {group.part}"] if group.part is not None else []
        titles[group] = Title(
            function, _node_name(group), "\n".join(lines), own if is_tagged else None
        )
    return titles


def _node_name(group: Group) -> str:
    """Return the name of the node that calls a function: the module path, call and part."""
    path, call = group.call
    name = path if call is None else f"{path}#{call}"
    return name if group.part is None else f"{name}/{group.part}"


def _count_levels(root: Group) -> int:
    levels, current = 0, [root]
    while current:
        current = [item for group in current for item in group.items if isinstance(item, Group)]
        levels += bool(current)
    return levels


def _check_restores(written: Path, source: Path) -> None:
    """Prove that the file that was written restores the one it was made from."""
    with open_mapped(written) as new:
        proto = parse_model(new, written)
        record = read_record(proto, source.name)
        if _digest(flat_chunks(new, proto, record, source.name)) != record.digest:
            raise FormatError(
                f"{source.name} is not stored as onnx writes it, so it could not be restored",
                hint="save it with onnx first",
            )


def _digest(chunks: Iterable[wire.Buffer]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def from_functions(
    path: StrPath, output_path: StrPath, *, on_step: Callable[[str], None] | None = None
) -> Path:
    """Restore the file that `to_functions` was given, byte for byte.

    Args:
        path: A file that `to_functions` wrote.
        output_path: The file to write.
        on_step: Called with a line of progress.

    Returns:
        The path of the file written.

    Raises:
        ArgumentError: The output would overwrite the input.
        FileError: A file cannot be read or written.
        FormatError: The file was not written by `to_functions`, or was changed since.
    """
    source, target = as_path(path), check_output_path(output_path)
    step = on_step or (lambda _: None)
    with pause_collector(), open_mapped(source) as data:
        step(f"read {source.name}")
        proto = parse_model(data, source)
        record = read_record(proto, source.name)
        data_files = external_files(proto)
        check_no_overwrite(source, data_files, target)
        step(f"write {target.name}")
        with transaction(target.parent) as stage:
            copy_data_files(stage, source, data_files, target)
            chunks = list(flat_chunks(data, proto, record, source.name))
            if _digest(chunks) != record.digest:
                raise altered(source.name, "it does not restore the flat file")
            stage.publish(stage.write("model", chunks), target.name)
            stage.commit()
    return target
