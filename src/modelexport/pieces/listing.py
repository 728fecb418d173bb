"""What can be cut out of a file: every module that has nodes, with what it takes and gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from modelexport.analysis.modules import Borders, Lineage, totals
from modelexport.graph import Graph, flatten
from modelexport.hierarchy.tree import is_within
from modelexport.pieces.cut import Border, ends_in_order, in_graph_order, leaving_of, members_of, whole
from modelexport.pieces.extract import TaggedFile, opened
from modelexport.pieces.target import Target
from modelexport.tagged.build import tensor_infos
from modelexport.tagged.codec import NodeTag
from modelexport.tagged.files import StrPath
from modelexport.tagged.sidecar import TensorInfo


class Extractable(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One module: how many nodes it has, how often it ran, and the tensors that cross its border."""

    module: str
    tag: str | None
    class_: str
    nodes: int
    calls: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


def extractable(onnx_model: StrPath, module: str | None = None) -> list[Extractable]:
    """The modules that can be extracted, in the order of their paths in the file; only one of them if asked for."""
    with opened(onnx_model) as file:
        target = None if module is None else file.find(module)
        return _list(file, target)


def _list(file: TaggedFile, target: Target | None) -> list[Extractable]:
    own = Counter(tag.hierarchy_module for tag in file.source.main.tags_inside() if tag is not None)
    counts = totals(own, Lineage(file.modules.records))
    wanted = [path for path in file.modules.tags if counts[path] and (target is None or path == target.path)]
    if target is not None and not wanted:
        raise file.modules.nothing(target)
    exactly = bool(file.source.main.bodies) or len(wanted) == 1
    found = _by_cutting(file, wanted) if exactly else _at_once(file, wanted, counts)
    crossing = dict.fromkeys(border for inputs, outputs, _ in found.values() for border in (*inputs, *outputs))
    end = len(file.source.main.nodes)
    known = dict(zip(crossing, tensor_infos(file.source.types.of(crossing, end)), strict=True))
    entering = dict.fromkeys(border for path, (inputs, _, _) in found.items() for border in inputs if path)
    fixed = file.source.types.fixed_values(entering, end)
    records = file.modules.records
    return [
        Extractable(
            module=path,
            tag=file.modules.tags[path],
            class_=records[path].class_ if path in records else "",
            nodes=nodes,
            calls=records[path].calls if path in records else 0,
            inputs=tuple(known[border] for border in inputs if border.name not in fixed or not path),
            outputs=tuple(known[border] for border in outputs),
        )
        for path, (inputs, outputs, nodes) in found.items()
    ]


Crossing = tuple[list[Border], list[Border], int]
"""What enters and leaves a module, and how many nodes it has."""


def _by_cutting(file: TaggedFile, wanted: list[str]) -> dict[str, Crossing]:
    """One cut after the other."""
    found: dict[str, Crossing] = {}
    for path in wanted:
        piece = file.cut(Target(path, None))
        found[path] = list(piece.inputs), list(piece.outputs), piece.size
    return found


def all_borders(file: TaggedFile) -> tuple[Graph, list[NodeTag | None], Borders]:
    """The whole graph laid flat, the tags of its nodes, and what crosses the border of each module."""
    main = file.source.main
    graph = flatten(file.source.proto)
    tags = list(main.tags_inside())
    tags += [None] * (len(graph.nodes) - len(tags))  # what is in functions is nobody's
    constant = main.flow(len(main.nodes)).constant
    return graph, tags, Borders(graph, tags, Lineage(file.modules.records), constant)


def _at_once(file: TaggedFile, wanted: list[str], counts: Mapping[str, int]) -> dict[str, Crossing]:
    """All modules in one walk through a graph without bodies."""
    main = file.source.main
    graph, tags, borders = all_borders(file)
    place = {name: number for number, name in enumerate(graph.producer)}

    def made_inside(name: str, path: str) -> bool:
        tag = tags[graph.producer[name]] if name in graph.producer else None
        return tag is not None and is_within(tag.hierarchy_module, path)

    found: dict[str, Crossing] = {}
    for path in wanted:
        if not path:
            model = whole(main)
            found[path] = list(model.inputs), list(model.outputs), model.size
            continue
        results = [name for name in file.modules.results(Target(path, None)) if made_inside(name, path)]
        leaving = {*borders.outputs.get(path, ()), *results} or set(_of_constants(file, Target(path, None)))
        entering = [Border(main, name) for name in borders.inputs.get(path, ())]
        leaving_in_order = [Border(main, name) for name in sorted(leaving, key=lambda name: place[name])]
        found[path] = in_graph_order(entering), ends_in_order(main, leaving_in_order), counts[path]
    return found


def _of_constants(file: TaggedFile, target: Target) -> Iterator[str]:
    """What a module gives of which everybody has a copy."""
    for level, places in members_of(file.source.main, file.modules.holds(target)):
        yield from leaving_of(level, places, ())
