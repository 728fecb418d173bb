"""What can be cut out of a file: every module that has nodes, with what it takes and gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from modelexport.analysis.modules import Borders, Lineage, totals
from modelexport.graph import flatten
from modelexport.hierarchy.tree import is_within
from modelexport.pieces.cut import Border, leaving_of, members_of
from modelexport.pieces.extract import TaggedFile, opened
from modelexport.pieces.levels import Level
from modelexport.pieces.target import Target
from modelexport.tagged.build import tensor_infos
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
    main, records = file.source.main, file.modules.records
    graph = flatten(file.source.proto)
    tags = list(main.tags_inside())
    tags += [None] * (len(graph.nodes) - len(tags))  # those in functions come along with what calls them
    lineage = Lineage(records)
    counts = totals(Counter(tag.hierarchy_module for tag in tags if tag is not None), lineage)
    constants = [level.prefix + name for level in main for name in level.flow(len(level.nodes)).constant]
    borders = Borders(graph, tags, lineage, constants)
    wanted = [path for path in file.modules.tags if counts[path] and (target is None or path == target.path)]
    if target is not None and not wanted:
        raise file.modules.nothing(target)
    place = {name: number for number, name in enumerate(graph.producer)}
    levels = {level.prefix: level for level in main}

    def crossing(path: str) -> tuple[list[str], list[str]]:
        if not path:
            return graph.inputs, graph.outputs
        results = (name for name in file.modules.results(Target(path, None)) if made_inside(name, path))
        leaving = {*borders.outputs.get(path, ()), *results} or set(_of_constants(file, Target(path, None)))
        return list(borders.inputs.get(path, ())), sorted(leaving, key=lambda name: place[name])

    def made_inside(name: str, path: str) -> bool:
        tag = tags[graph.producer[name]] if name in graph.producer else None
        return tag is not None and is_within(tag.hierarchy_module, path)

    found = {path: crossing(path) for path in wanted}
    keys = dict.fromkeys(key for both in found.values() for names in both for key in names)
    known = dict(
        zip(
            keys,
            tensor_infos(file.source.types.of((_border(levels, key) for key in keys), len(main.nodes))),
            strict=True,
        )
    )
    return [
        Extractable(
            module=path,
            tag=file.modules.tags[path],
            class_=records[path].class_ if path in records else "",
            nodes=counts[path],
            calls=records[path].calls if path in records else 0,
            inputs=tuple(known[key] for key in found[path][0]),
            outputs=tuple(known[key] for key in found[path][1]),
        )
        for path in wanted
    ]


def _of_constants(file: TaggedFile, target: Target) -> Iterator[str]:
    """What a module gives of which everybody has a copy."""
    for level, places in members_of(file.source.main, file.modules.holds(target)):
        yield from (level.prefix + name for name in leaving_of(level, places, ()))


def _border(levels: dict[str, Level], key: str) -> Border:
    """A tensor by its key, which has the path of its level in front."""
    prefix = max((prefix for prefix in levels if key.startswith(prefix)), key=len)
    return Border(levels[prefix], key[len(prefix) :])
