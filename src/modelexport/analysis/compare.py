"""Compares two model files: the same topology or not, and what differs, module by module."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import msgspec

from modelexport.analysis.canonical import canonical_form, node_labels
from modelexport.analysis.matching import Side, match
from modelexport.errors import plural
from modelexport.garbage import pause_collector
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


class FileSide(msgspec.Struct, frozen=True):
    """What is told of each of the two files."""

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
    """A node that is in both files and not the same: `what` names operator, attributes, inputs or weights."""

    node: str
    other: str
    op_type: str
    what: tuple[str, ...]


class ModuleChange(msgspec.Struct, frozen=True):
    """What differs within one module; nodes go by their first output. `module` is None for nodes without a tag."""

    module: str | None
    tag: str | None
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[NodeChange, ...]


class TagChanges(msgspec.Struct, frozen=True):
    """Nodes whose tag is only in B, only in A, or another; and the tags whose node counts differ."""

    added: int
    removed: int
    changed: int
    distribution: dict[str, tuple[int, int]]


class WeightChanges(msgspec.Struct, frozen=True):
    """Initializers by content: `renamed` holds the same values under another name."""

    same: int
    renamed: tuple[tuple[str, str], ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]


class Comparison(msgspec.Struct, frozen=True):
    """The answer: `same_topology`, and every difference."""

    same_topology: bool
    a: FileSide
    b: FileSide
    same_opset: bool
    same_inputs: bool
    same_outputs: bool
    modules: tuple[ModuleChange, ...]
    elsewhere: tuple[str, ...]
    """Differences that lie in no node: outputs of the graph, or which of several equal parts is read."""
    tags: TagChanges
    weights: WeightChanges

    @property
    def verdict(self) -> str:
        """The answer in a few words."""
        if not self.same_topology:
            return "different topology"
        tags = self.tags
        if not (tags.added or tags.removed or tags.changed):
            return "identical topology, same tags"
        told = [("added", tags.added), ("removed", tags.removed), ("changed", tags.changed)]
        if sum(count > 0 for _, count in told) == 1:
            return f"identical topology, tags {next(word for word, count in told if count)}"
        return "identical topology, other tags"


class _File:
    """A model with what a comparison needs of it."""

    def __init__(self, path: Path) -> None:
        with open_mapped(path) as data:
            proto = parse_model(data, path)
            self.weights = initializer_digests(data, proto, path)
        self.model = TaggedModel(path, proto)
        self.places = {name: place for place, name in enumerate(self.model.graph.inputs)}

    @functools.cached_property
    def attributes(self) -> list[str | None]:
        return attribute_digests(self.model.graph)

    def summary(self) -> FileSide:
        proto, tags = self.model.proto, self.model.effective_tags
        return FileSide(
            file=self.model.path.name,
            nodes=len(tags),
            tagged_nodes=sum(tag is not None for tag in tags),
            tags=len({tag.hierarchy_path for tag in tags if tag is not None}),
            opset=opset_imports(proto),
            ir_version=proto.ir_version,
            inputs=tensor_infos(proto.graph.input),
            outputs=tensor_infos(proto.graph.output),
            initializers=len(self.weights),
        )


def compare(a: StrPath, b: StrPath) -> Comparison:
    """Compare two ONNX files, tagged or not, and say what differs, module by module.

    Names of tensors and the order of nodes do not matter; an attribute, an edge or a weight does. Reads the weights.
    """
    with pause_collector():
        first, second = _File(as_path(a)), _File(as_path(b))
        same, pairs = _paired(first, second)
        left, right = first.summary(), second.summary()
        modules = () if same else _module_changes(first, second, pairs)
        return Comparison(
            same_topology=same,
            a=left,
            b=right,
            same_opset=left.opset == right.opset,
            same_inputs=left.inputs == right.inputs,
            same_outputs=left.outputs == right.outputs,
            modules=modules,
            elsewhere=() if same else _elsewhere(first, second, pairs, bool(modules)),
            tags=_tag_changes(first.model, second.model, pairs),
            weights=_weight_changes(first.weights, second.weights),
        )


def _paired(a: _File, b: _File) -> tuple[bool, dict[int, int]]:
    """Whether the topology is the same, and the nodes of `a` with their partners in `b`."""
    if _same_as_it_stands(a, b):
        return True, {index: index for index in range(len(a.model.graph.nodes))}
    for as_stored in (
        True,
        False,
    ):  # the other way of storing a tensor's values is rare, and slower to see through
        digests = [attribute_digests(file.model.graph, as_stored) for file in (a, b)]
        labels = [
            node_labels(file.model.graph, told) for file, told in zip((a, b), digests, strict=True)
        ]
        forms = [
            canonical_form(file.model.graph, file.model.proto, file.weights, told)
            for file, told in zip((a, b), labels, strict=True)
        ]
        if forms[0].digest == forms[1].digest:
            return True, dict(zip(forms[0].order, forms[1].order, strict=True))
    sides = [
        Side(file.model.graph, told, file.weights, _modules(file.model))
        for file, told in zip((a, b), labels, strict=True)
    ]
    return False, match(*sides)


def _same_as_it_stands(a: _File, b: _File) -> bool:
    """Whether nodes, names and order are all the same, which most comparisons with a baseline find at once."""
    left, right = a.model.graph, b.model.graph
    return (
        left.nodes == right.nodes
        and a.weights == b.weights
        and left.bodies == right.bodies
        and left.functions == right.functions
        and list(a.model.proto.graph.input) == list(b.model.proto.graph.input)
        and left.outputs == right.outputs
        and attribute_digests(left, as_stored=True) == attribute_digests(right, as_stored=True)
    )


def _modules(model: TaggedModel) -> list[str | None]:
    return [None if tag is None else tag.hierarchy_module for tag in model.effective_tags]


def _module_changes(a: _File, b: _File, pairs: dict[int, int]) -> tuple[ModuleChange, ...]:
    """Every node without a partner, and every pair that is not the same, under its module."""
    left, right = _modules(a.model), _modules(b.model)
    back = {second: first for first, second in pairs.items()}
    added: dict[str | None, list[str]] = {}
    removed: dict[str | None, list[str]] = {}
    changed: dict[str | None, list[NodeChange]] = {}
    for index, node in enumerate(a.model.graph.nodes):
        if index not in pairs:
            removed.setdefault(left[index], []).append(node.key)
    for index, node in enumerate(b.model.graph.nodes):
        if index not in back:
            added.setdefault(right[index], []).append(node.key)
            continue
        what = _what_changed(a, b, back[index], index, pairs)
        if what:
            module = right[index] if right[index] is not None else left[back[index]]
            change = NodeChange(a.model.graph.nodes[back[index]].key, node.key, node.op_type, what)
            changed.setdefault(module, []).append(change)
    tags = {path: record.tag for file in (a, b) for path, record in file.model.modules.items()}
    modules = sorted(
        {*added, *removed, *changed}, key=lambda module: (module is None, module or "")
    )
    return tuple(
        ModuleChange(
            module,
            None if module is None else tags.get(module),
            tuple(added.get(module, ())),
            tuple(removed.get(module, ())),
            tuple(changed.get(module, ())),
        )
        for module in modules
    )


def _elsewhere(a: _File, b: _File, pairs: dict[int, int], explained: bool) -> tuple[str, ...]:
    left, right = a.model.graph.outputs, b.model.graph.outputs
    moved = [
        f"output {new} is computed elsewhere"
        for old, new in zip(left, right, strict=False)
        if _same_source(a, b, old, new, pairs) is not None
    ]
    if len(left) != len(right):
        moved.append(f"{plural(len(left), 'output')} became {len(right)}")
    if not moved and not explained:
        moved.append("equal constants, weights or nodes are shared in another way")
    return tuple(moved)


def _what_changed(
    a: _File, b: _File, first: int, second: int, pairs: dict[int, int]
) -> tuple[str, ...]:
    old, new = a.model.graph.nodes[first], b.model.graph.nodes[second]
    what = []
    if (old.op_type, old.domain) != (new.op_type, new.domain):
        what.append("operator")
    if a.attributes[first] != b.attributes[second]:
        what.append("attributes")
    if len(old.inputs) != len(new.inputs) or old.gaps != new.gaps:
        what.append("inputs")
    else:
        sources = [
            _same_source(a, b, x, y, pairs) for x, y in zip(old.inputs, new.inputs, strict=True)
        ]
        what += [word for word in ("inputs", "weights") if word in sources]
    return tuple(what)


def _same_source(a: _File, b: _File, old: str, new: str, pairs: dict[int, int]) -> str | None:
    """What differs between two tensors at the same place of a pair: nothing, where they come from, or their values."""
    if old in a.weights and new in b.weights:
        return None if a.weights[old] == b.weights[new] else "weights"
    producer, other = a.model.graph.producer.get(old), b.model.graph.producer.get(new)
    if producer is None or other is None:
        places = a.places.get(old, old), b.places.get(new, new)
        return None if producer is other and places[0] == places[1] else "inputs"
    outputs = a.model.graph.nodes[producer].outputs, b.model.graph.nodes[other].outputs
    same = pairs.get(producer) == other and outputs[0].index(old) == outputs[1].index(new)
    return None if same else "inputs"


def _tag_changes(a: TaggedModel, b: TaggedModel, pairs: dict[int, int]) -> TagChanges:
    added = removed = changed = 0
    for first, second in pairs.items():
        old, new = a.effective_tags[first], b.effective_tags[second]
        if old is None or new is None:
            added += new is not None
            removed += old is not None
        elif (old.hierarchy_path, old.hierarchy_module) != (
            new.hierarchy_path,
            new.hierarchy_module,
        ):
            changed += 1
    left, right = (
        Counter(tag.hierarchy_path for tag in m.effective_tags if tag is not None) for m in (a, b)
    )
    differing = sorted(tag for tag in {*left, *right} if left[tag] != right[tag])
    return TagChanges(added, removed, changed, {tag: (left[tag], right[tag]) for tag in differing})


def _weight_changes(a: dict[str, str], b: dict[str, str]) -> WeightChanges:
    shared = [name for name in a if name in b]
    changed = [name for name in shared if a[name] != b[name]]
    gone = [name for name in a if name not in b]
    spare: dict[str, list[str]] = {}
    for name in b:
        if name not in a:
            spare.setdefault(b[name], []).append(name)
    renamed, removed = [], []
    for name in gone:
        heirs = spare.get(a[name])
        if heirs:
            renamed.append((name, heirs.pop(0)))
        else:
            removed.append(name)
    return WeightChanges(
        same=len(shared) - len(changed),
        renamed=tuple(renamed),
        changed=tuple(changed),
        added=tuple(name for names in spare.values() for name in names),
        removed=tuple(removed),
    )
