"""Compare two model files: whether the topology is the same, and what differs by module."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from modelexport.analysis.matching import LabeledGraph, canonical_form, match_nodes, node_labels
from modelexport.errors import plural
from modelexport.graph.flat import pause_collector
from modelexport.onnx_file.digests import attribute_digests, initializer_digests
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    open_mapped,
    opset_imports,
    parse_model,
)
from modelexport.tagged.model import TaggedModel
from modelexport.tagged.records import TensorInfo
from modelexport.tagged.tables import tensor_infos


class FileSummary(msgspec.Struct, frozen=True):
    """A summary of one of the two files."""

    file: str
    nodes: int
    tagged_nodes: int
    tags: int
    opset: dict[str, int]
    ir_version: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    initializers: int


class NodeChange(msgspec.Struct, frozen=True):
    """A node that is in both files and differs.

    `what` names the differences: operator, attributes, inputs or weights.
    """

    node: str
    other: str
    op_type: str
    what: tuple[str, ...]


class ModuleChange(msgspec.Struct, frozen=True):
    """The differences within one module; `module` is None for nodes without a tag.

    Nodes are identified by their first output.
    """

    module: str | None
    tag: str | None
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[NodeChange, ...]


class TagChanges(msgspec.Struct, frozen=True):
    """The number of nodes with a tag only in B, only in A, or with another tag in B.

    `distribution` has the node counts in A and B of each tag where they differ.
    """

    added: int
    removed: int
    changed: int
    distribution: dict[str, tuple[int, int]]


class WeightChanges(msgspec.Struct, frozen=True):
    """Differences in the initializers; `renamed` are those with equal values and another name."""

    same: int
    renamed: tuple[tuple[str, str], ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]


class Comparison(msgspec.Struct, frozen=True):
    """The result of `compare`: whether the topology is the same, and every difference."""

    same_topology: bool
    a: FileSummary
    b: FileSummary
    same_opset: bool
    same_inputs: bool
    same_outputs: bool
    modules: tuple[ModuleChange, ...]
    elsewhere: tuple[str, ...]
    """Differences outside nodes: graph outputs, or which of several equal values is consumed."""
    tags: TagChanges
    weights: WeightChanges

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if not self.same_topology:
            return "different topology"
        kinds = [kind for kind in ("added", "removed", "changed") if getattr(self.tags, kind)]
        if not kinds:
            return "identical topology, same tags"
        return f"identical topology, {f'tags {kinds[0]}' if len(kinds) == 1 else 'other tags'}"


class _ComparedFile:
    """A model with what a comparison needs: digests of its initializers and attributes."""

    def __init__(self, path: Path) -> None:
        with open_mapped(path) as data:
            proto = parse_model(data, path)
            self.initializers = initializer_digests(data, proto, path)
        self.model = TaggedModel(path, proto)
        self.graph = self.model.graph
        self.input_index = {name: index for index, name in enumerate(self.graph.inputs)}

    @functools.cached_property
    def attributes(self) -> list[str | None]:
        """The digest of each node's attributes, whichever way tensors are stored in them."""
        return attribute_digests(self.graph)

    @functools.cached_property
    def stored_attributes(self) -> list[str | None]:
        """The digest of each node's attributes as they are stored, which is faster to compute."""
        return attribute_digests(self.graph, as_stored=True)

    @functools.cached_property
    def modules(self) -> list[str | None]:
        """The module path of each node."""
        tags = self.model.effective_tags
        return [None if tag is None else tag.hierarchy_module for tag in tags]

    def label_graph(self, attributes: list[str | None]) -> LabeledGraph:
        """Label the graph for a comparison, given the digest of each node's attributes."""
        labels = node_labels(self.graph, attributes)
        proto = self.model.proto.graph
        types = {value.name: value.type.tensor_type.elem_type for value in proto.input}
        return LabeledGraph(self.graph, labels, self.initializers, self.modules, types)

    def summary(self) -> FileSummary:
        """Summarize the file for the result."""
        proto, tags = self.model.proto, self.model.effective_tags
        return FileSummary(
            file=self.model.path.name,
            nodes=len(tags),
            tagged_nodes=sum(tag is not None for tag in tags),
            tags=len({tag.hierarchy_path for tag in tags if tag is not None}),
            opset=opset_imports(proto),
            ir_version=proto.ir_version,
            inputs=tensor_infos(proto.graph.input),
            outputs=tensor_infos(proto.graph.output),
            initializers=len(self.initializers),
        )


def compare(a: StrPath, b: StrPath) -> Comparison:
    """Compare two ONNX files, tagged or not, and report the differences by module.

    Names of values and the order of nodes do not matter; an attribute, an edge or the content of
    an initializer does, so the data files are read.

    Args:
        a: The path of the first file.
        b: The path of the second file.

    Returns:
        Whether the topology is the same, and every difference.

    Raises:
        FileError: If a file or its data file is missing or cannot be read.
        FormatError: If a file is not a valid model.
    """
    with pause_collector():
        first, second = _ComparedFile(as_path(a)), _ComparedFile(as_path(b))
        same, matches = _match_files(first, second)
        left, right = first.summary(), second.summary()
        modules = () if same else _module_changes(first, second, matches)
        return Comparison(
            same_topology=same,
            a=left,
            b=right,
            same_opset=left.opset == right.opset,
            same_inputs=left.inputs == right.inputs,
            same_outputs=left.outputs == right.outputs,
            modules=modules,
            elsewhere=() if same else _other_changes(first, second, matches, bool(modules)),
            tags=_tag_changes(first.model, second.model, matches),
            weights=_initializer_changes(first.initializers, second.initializers),
        )


def _match_files(a: _ComparedFile, b: _ComparedFile) -> tuple[bool, dict[int, int]]:
    """Return whether the topology is the same, and the node of `b` for each node of `a`."""
    if _is_literally_equal(a, b):
        return True, {index: index for index in range(len(a.graph.nodes))}
    first, second = a.label_graph(a.stored_attributes), b.label_graph(b.stored_attributes)
    left, right = canonical_form(first), canonical_form(second)
    if left.digest != right.digest:
        # Few files store a tensor's values in another way, and seeing through that takes longer.
        first, second = a.label_graph(a.attributes), b.label_graph(b.attributes)
        left, right = canonical_form(first), canonical_form(second)
    if left.digest == right.digest:
        return True, dict(zip(left.order, right.order, strict=True))
    return False, match_nodes(first, second)


def _is_literally_equal(a: _ComparedFile, b: _ComparedFile) -> bool:
    """Return whether nodes, names and order are equal, as for a file and its baseline."""
    left, right = a.graph, b.graph
    return (
        left.nodes == right.nodes
        and a.initializers == b.initializers
        and left.subgraphs == right.subgraphs
        and left.functions == right.functions
        and list(a.model.proto.graph.input) == list(b.model.proto.graph.input)
        and left.outputs == right.outputs
        and a.stored_attributes == b.stored_attributes
    )


def _module_changes(
    a: _ComparedFile, b: _ComparedFile, matches: dict[int, int]
) -> tuple[ModuleChange, ...]:
    """Group all nodes without a match, and all matches that differ, by module."""
    back = {second: first for first, second in matches.items()}
    added: defaultdict[str | None, list[str]] = defaultdict(list)
    removed: defaultdict[str | None, list[str]] = defaultdict(list)
    changed: defaultdict[str | None, list[NodeChange]] = defaultdict(list)
    for index, node in enumerate(a.graph.nodes):
        if index not in matches:
            removed[a.modules[index]].append(node.key)
    for index, node in enumerate(b.graph.nodes):
        module = b.modules[index]
        if index not in back:
            added[module].append(node.key)
        elif what := _node_changes(a, b, back[index], index, matches):
            change = NodeChange(a.graph.nodes[back[index]].key, node.key, node.op_type, what)
            changed[a.modules[back[index]] if module is None else module].append(change)
    tags = {path: record.tag for file in (a, b) for path, record in file.model.modules.items()}
    modules = {*added, *removed, *changed}
    return tuple(
        ModuleChange(
            module,
            None if module is None else tags.get(module),
            tuple(added[module]),
            tuple(removed[module]),
            tuple(changed[module]),
        )
        for module in sorted(modules, key=lambda path: (path is None, path or ""))
    )


def _other_changes(
    a: _ComparedFile, b: _ComparedFile, matches: dict[int, int], is_explained: bool
) -> tuple[str, ...]:
    """Describe the differences that are in no node."""
    left, right = a.graph.outputs, b.graph.outputs
    changes = [
        f"output {new} is computed elsewhere"
        for old, new in zip(left, right, strict=False)
        if _value_change(a, b, old, new, matches) is not None
    ]
    if len(left) != len(right):
        changes.append(f"{plural(len(left), 'output')} became {len(right)}")
    if not changes and not is_explained:
        changes.append("equal constants, weights or nodes are shared in another way")
    return tuple(changes)


def _node_changes(
    a: _ComparedFile, b: _ComparedFile, first: int, second: int, matches: dict[int, int]
) -> tuple[str, ...]:
    """Name the differences between two nodes that match."""
    old, new = a.graph.nodes[first], b.graph.nodes[second]
    changes = []
    if (old.op_type, old.domain) != (new.op_type, new.domain):
        changes.append("operator")
    if a.attributes[first] != b.attributes[second]:
        changes.append("attributes")
    if len(old.inputs) != len(new.inputs) or old.gaps != new.gaps:
        changes.append("inputs")
    else:
        inputs = zip(old.inputs, new.inputs, strict=True)
        kinds = {_value_change(a, b, x, y, matches) for x, y in inputs}
        changes += [kind for kind in ("inputs", "weights") if kind in kinds]
    return tuple(changes)


def _value_change(
    a: _ComparedFile, b: _ComparedFile, old: str, new: str, matches: dict[int, int]
) -> str | None:
    """Return `weights` for initializers that differ, `inputs` for values of different origin."""
    if old in a.initializers and new in b.initializers:
        return None if a.initializers[old] == b.initializers[new] else "weights"
    producer, other = a.graph.producer.get(old), b.graph.producer.get(new)
    if producer is None or other is None:
        same = producer is other and a.input_index.get(old, old) == b.input_index.get(new, new)
    else:
        outputs = a.graph.nodes[producer].outputs, b.graph.nodes[other].outputs
        same = matches.get(producer) == other and outputs[0].index(old) == outputs[1].index(new)
    return None if same else "inputs"


def _tag_changes(a: TaggedModel, b: TaggedModel, matches: dict[int, int]) -> TagChanges:
    added = removed = changed = 0
    for first, second in matches.items():
        old, new = a.effective_tags[first], b.effective_tags[second]
        if old is None or new is None:
            added += new is not None
            removed += old is not None
        else:
            changed += (old.hierarchy_path, old.hierarchy_module) != (
                new.hierarchy_path,
                new.hierarchy_module,
            )
    left, right = (
        Counter(tag.hierarchy_path for tag in model.effective_tags if tag is not None)
        for model in (a, b)
    )
    differing = sorted(tag for tag in {*left, *right} if left[tag] != right[tag])
    return TagChanges(added, removed, changed, {tag: (left[tag], right[tag]) for tag in differing})


def _initializer_changes(a: dict[str, str], b: dict[str, str]) -> WeightChanges:
    """Compare the digests of initializers by name, and by content where a name is in one file."""
    shared = [name for name in a if name in b]
    changed = [name for name in shared if a[name] != b[name]]
    only_in_b: defaultdict[str, list[str]] = defaultdict(list)
    for name, digest in b.items():
        if name not in a:
            only_in_b[digest].append(name)
    renamed, removed = [], []
    for name, digest in a.items():
        if name in b:
            continue
        if only_in_b[digest]:
            renamed.append((name, only_in_b[digest].pop(0)))
        else:
            removed.append(name)
    return WeightChanges(
        same=len(shared) - len(changed),
        renamed=tuple(renamed),
        changed=tuple(changed),
        added=tuple(name for names in only_in_b.values() for name in names),
        removed=tuple(removed),
    )
