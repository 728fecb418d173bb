"""select(): the names of the nodes, values or initializers of modules, for other tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import onnx

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.graph.flat import Graph, Initializer, as_text
from modelexport.modules.lookup import ModuleIndex
from modelexport.modules.record import NodeTag
from modelexport.modules.tags import describe_lost_tags
from modelexport.modules.tree import Ancestry
from modelexport.onnx_file.model_file import StrPath
from modelexport.tagged.model import TaggedModel, load, require_tags

WHAT = ("nodes", "values", "initializers")
_MOST_OPERATORS = 8


class Selected(msgspec.Struct, frozen=True):
    """The names that a selection has, and the nodes that have none."""

    names: tuple[str, ...]
    nodes: int
    """The number of nodes that were selected."""
    unnamed: int
    """How many of these nodes have an empty name."""
    lost: str | None
    """That nodes have lost their tags, if so."""


def select(
    path: StrPath,
    patterns: str | Sequence[str],
    *,
    what: str = "nodes",
    invert: bool = False,
    op_types: Sequence[str] = (),
    call: int | None = None,
    covering: bool = False,
) -> list[str]:
    """Return the names of the nodes, values or initializers of modules, in the order of the file.

    Other tools take such names: `nodes_to_exclude` and `nodes_to_quantize` of the quantizers of
    ONNX Runtime, `node_block_list` of its float16 converter.

    Args:
        path: The tagged file, or one with a sidecar.
        patterns: Tags, module paths, aliases, or globs on paths and tags. A module stands for
            itself and all modules below it.
        what: `nodes`; `values`, which the nodes produce; or `initializers`, which they read.
        invert: Whether to return the names that are not those of the modules.
        op_types: The operators that count; all if empty.
        call: Which call of the modules, from 0; each pattern then has to name one module.
        covering: Whether nodes count that implement operations of the modules as well, by
            `hierarchy_covers`, and belong to another one.

    Returns:
        The names, each once. Nodes without a name are left out.

    Raises:
        ArgumentError: A pattern matches nothing, or nothing is left to name.
        ArgumentTypeError: A pattern is not a text, or the call is not a number.
        FileError: The file cannot be read.
        FormatError: It is not a model, or has no tags.
    """
    return list(
        select_names(
            path, patterns, what=what, invert=invert, op_types=op_types, call=call,
            covering=covering,
        ).names
    )  # fmt: skip


def select_names(
    path: StrPath,
    patterns: str | Sequence[str],
    *,
    what: str,
    invert: bool,
    op_types: Sequence[str],
    call: int | None,
    covering: bool,
) -> Selected:
    """Select names as `select` does, and count the nodes that have none."""
    if what not in WHAT:
        raise ArgumentError(f"there is no {what!r} to select", hint=f"one of {', '.join(WHAT)}")
    patterns = as_patterns(patterns)
    if not patterns:
        raise ArgumentError("no pattern is given", hint="pass a module path, a tag or a glob")
    model = load(path)
    matched = find_nodes(model, patterns, call=call, covering=covering)
    nodes = model.graph.nodes
    op_types = as_patterns(op_types)
    wanted = set(op_types)
    counted = [index for index in range(len(nodes)) if not wanted or nodes[index].op_type in wanted]
    chosen = [index for index in counted if (index in matched) != invert]
    if not chosen:
        raise _nothing_left(model.graph, matched, op_types, invert)
    names = _names(model.graph, chosen, what)
    if invert and what != "nodes":
        # A value may be produced in one place only, but an initializer may be read inside as well.
        inside = set(_names(model.graph, [i for i in counted if i in matched], what))
        names = [name for name in names if name not in inside]
    unnamed = sum(not nodes[index].name for index in chosen)
    lost = describe_lost_tags(model.modules, model.effective_tags)
    return Selected(tuple(dict.fromkeys(filter(None, names))), len(chosen), unnamed, lost)


def _names(graph: Graph, chosen: Iterable[int], what: str) -> list[str]:
    return list(_NAMED[what](graph, chosen))


def _node_names(graph: Graph, chosen: Iterable[int]) -> Iterator[str]:
    return (graph.nodes[index].name for index in chosen)


def _value_names(graph: Graph, chosen: Iterable[int]) -> Iterator[str]:
    """Return the outputs of nodes, by the names that the file has, not by keys."""
    return (as_text(name) for index in chosen for name in graph.protos[index].output)


def _initializer_names(graph: Graph, chosen: Iterable[int]) -> Iterator[str]:
    known = {name: name for name in graph.initializers}
    for subgraphs in graph.subgraphs.values():
        for subgraph in subgraphs:
            known.update((key, _stored_name(each)) for key, each in subgraph.initializers.items())
    return (known[name] for i in chosen for name in graph.nodes[i].inputs if name in known)


def _stored_name(tensor: Initializer) -> str:
    return as_text(tensor.name if isinstance(tensor, onnx.TensorProto) else tensor.values.name)


_NAMED: dict[str, Callable[[Graph, Iterable[int]], Iterator[str]]] = {
    "nodes": _node_names,
    "values": _value_names,
    "initializers": _initializer_names,
}


def _nothing_left(
    graph: Graph, matched: set[int], op_types: Sequence[str], invert: bool
) -> ArgumentError:
    if not op_types:
        return ArgumentError(
            "the patterns match every node, and nothing is left", hint="match fewer modules"
        )
    present = sorted({graph.nodes[i].op_type for i in range(len(graph.nodes))
                      if (i in matched) != invert})  # fmt: skip
    listed = ", ".join(present[:_MOST_OPERATORS])
    more = f" and {len(present) - _MOST_OPERATORS} more" if len(present) > _MOST_OPERATORS else ""
    return ArgumentError(
        f"no node of the selection is a {' or a '.join(op_types)}",
        hint=f"its operators are {listed}{more}" if present else "match other modules",
    )


def find_nodes(
    model: TaggedModel,
    patterns: str | Sequence[str],
    *,
    call: int | None = None,
    covering: bool = False,
) -> set[int]:
    """Find the nodes of modules.

    Args:
        model: The file.
        patterns: What `ModuleNames.resolve` takes.
        call: Which call of the modules; all if None.
        covering: Whether nodes count that implement operations of the modules as well.

    Returns:
        The indices of the nodes.

    Raises:
        ArgumentError: A pattern matches no module, or only modules without nodes.
        ArgumentTypeError: A pattern is not a text.
        FormatError: The file has no tags.
    """
    require_tags(model)
    tags = model.effective_tags
    index = ModuleIndex(model.modules, tags)
    found: set[int] = set()
    for pattern in as_patterns(patterns):
        belongs = _matcher(index, pattern, call, covering)
        nodes = {i for i, tag in enumerate(tags) if tag is not None and belongs(tag)}
        if not nodes:
            raise _without_nodes(index, pattern, call, tags)
        found |= nodes
    return found


def as_patterns(patterns: str | Sequence[str]) -> Sequence[str]:
    """Return the given patterns as a sequence; an empty pattern is the root.

    Raises:
        ArgumentTypeError: It is neither a text nor a list.
    """
    if isinstance(patterns, str):
        return [patterns]
    if not isinstance(patterns, Sequence):
        raise ArgumentTypeError(
            f"the patterns are {describe_type(patterns)}", hint="pass a text or a list of texts"
        )
    return patterns


def _matcher(
    index: ModuleIndex, pattern: str, call: int | None, covering: bool
) -> Callable[[NodeTag], bool]:
    """Return the predicate for the nodes that a pattern matches, given their tags."""
    index.require_match(pattern)
    if call is not None:
        belongs = index.node_filter(index.select_call(index.find(pattern), call))
        return lambda tag: belongs(tag.hierarchy_module, tag.hierarchy_call)
    resolution, lineage = index.resolve(pattern), Ancestry({})

    @functools.cache
    def is_meant(path: str) -> bool:
        # A glob may match a module and none of the paths below it.
        above = lineage.of(path) if resolution.glob is not None else (path,)
        return any(resolution.covers(each, index.carried_tag(each)) for each in above)

    return lambda tag: (
        is_meant(tag.hierarchy_module)
        or resolution.covers(tag.hierarchy_module, tag.hierarchy_path)
        or (covering and any(map(is_meant, tag.hierarchy_covers)))
    )


def _without_nodes(
    index: ModuleIndex, pattern: str, call: int | None, tags: Sequence[NodeTag | None]
) -> ArgumentError:
    """Return the error for a pattern whose modules have no nodes."""
    resolution = index.resolve(pattern)
    matches = [p for p in index.tags if resolution.covers(p, index.carried_tag(p))]
    if resolution.path is not None or len(matches) == 1:
        target = index.find(pattern)
        return index.no_nodes_error(
            target if call is None else msgspec.structs.replace(target, call=call), tags
        )
    return ArgumentError(
        f"the {plural(len(matches), 'module')} that match {pattern!r} have no nodes",
        hint="modelexport analyze ONNX shows the modules that have some",
    )
