"""Analyze a model file: the nodes, evidence, operators and sizes of each module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter

import msgspec

from modelexport.analysis.outline import execution_order
from modelexport.analysis.subgraph import BoundaryValues
from modelexport.graph.flat import pause_collector
from modelexport.modules.lookup import ModuleIndex, Selection
from modelexport.modules.record import AUXILIARY, ModuleStatus
from modelexport.modules.tree import Ancestry, subtree_totals
from modelexport.onnx_file.digests import InitializerSize, initializer_sizes
from modelexport.onnx_file.model_file import (
    StrPath,
    is_file,
    opset_imports,
    resolve_data_file,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import TensorInfo
from modelexport.tagged.tables import tensor_infos

ANALYSIS_FORMAT = "modelexport-analysis/1"


class DataFile(msgspec.Struct, frozen=True):
    """A data file of initializers beside the model."""

    name: str
    present: bool


class FileFacts(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """The file as a whole, independent of the selection."""

    file: str
    tagged: bool
    class_: str | None
    strategy: str | None
    exporter: str | None
    opset: dict[str, int]
    ir_version: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    dropped_outputs: tuple[str, ...]
    data_files: tuple[DataFile, ...]
    map_source: str | None
    """Where the map was read: `file`, or `sidecar` for a file without tags."""
    parameters_from: str = "stored"
    """What `parameters` counts: `export`, PyTorch's parameters as recorded at export; or `stored`,
    the elements of initializers, for a file without that record."""
    sidecar_refused: str | None = None
    """Why the sidecar beside the file was needed and could not be used."""


class Totals(msgspec.Struct, frozen=True):
    """Counts over the selected nodes."""

    nodes: int
    tagged_nodes: int
    coverage: float
    auxiliary_nodes: int
    tags: int
    parameters: int
    """Counted as `parameters_from` of the file says; those of the selected modules."""
    stored_values: int
    """The elements of the initializers."""
    bytes: int
    """The size of the initializers in bytes."""
    modules: int


class ModuleFacts(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One module. Counts include the modules below it, unless they are called `own`.

    An initializer belongs to the lowest module that holds all its consumers.
    """

    module: str
    tag: str | None
    class_: str
    status: str
    depth: int
    """0 is the root."""
    calls: int
    execution_order: int | None
    nodes: int
    own_nodes: int
    parameters: int
    """Each parameter once, counted as `parameters_from` of the file says."""
    stored_values: int
    """The elements of its initializers, constants included."""
    bytes: int
    """The size of its initializers in bytes."""
    own_stored_values: int
    own_bytes: int
    operators: dict[str, int]
    """The number of nodes by operator."""
    inputs: tuple[str, ...]
    """The values that enter it."""
    outputs: tuple[str, ...]
    """The values that leave it."""
    flops: int | None = None
    """Floating-point operations of one run; null if the export did not count them."""


class NodeFacts(msgspec.Struct, frozen=True, gc=False):
    """One node, identified by its first output.

    Stored values and bytes are those of the initializers of which it is the first consumer.
    """

    node: str
    name: str
    op_type: str
    domain: str
    tag: str | None
    module: str | None
    call: int | None
    method: str | None
    stored_values: int
    bytes: int
    covers: tuple[str, ...] = ()
    """The modules whose operations the node implements, if they are several."""


class Analysis(msgspec.Struct, frozen=True):
    """The result of `analyze`, and its JSON output."""

    format: str
    """`modelexport-analysis/1`."""
    file: FileFacts
    filter: str | None
    """The selection."""
    suggestions: tuple[str, ...]
    """The most similar tags, if nothing matches."""
    totals: Totals
    by_operator: dict[str, int]
    by_method: dict[str, int]
    by_depth: dict[int, int]
    """The number of nodes by the number of segments of their tag."""
    by_status: dict[str, int]
    by_tag: dict[str, int]
    """The number of nodes by tag."""
    absorbed: tuple[str, ...]
    """The paths of these modules."""
    unused: tuple[str, ...]
    modules: tuple[ModuleFacts, ...]
    nodes: tuple[NodeFacts, ...]
    """Empty without details."""


@keyword_aliases(onnx="path")
def analyze(path: StrPath, filter_tag: str | None = None, details: bool = True) -> Analysis:
    """Analyze an ONNX file, tagged or not, without reading the data of initializers.

    Args:
        path: The ONNX file; its data files may be missing.
        filter_tag: What to select: a tag with all below it, a glob, a module path, or `auxiliary`.
        details: Whether to list all nodes, and the values that enter and leave each module.

    Returns:
        The counts over the selected nodes and modules.

    Raises:
        FileError: If the file cannot be read.
        FormatError: If it is not an ONNX model.
    """
    with pause_collector():
        return _Analyzer(load(path), filter_tag).analyze(details)


class _Analyzer:
    """Counts over the selected nodes of one file."""

    def __init__(self, model: TaggedModel, filter_tag: str | None) -> None:
        self.model = model
        self.graph = model.graph
        self.tags, self.map_source = model.effective_tags, model.in_effect.source
        self.modules = model.modules if self.map_source else {}
        # Files of earlier versions do not record the parameters of their modules.
        self.has_counts = bool(self.modules) and all(
            isinstance(record.parameter_count, int) for record in self.modules.values()
        )
        self.ancestry, self.index = Ancestry(self.modules), ModuleIndex(self.modules, ())
        used = {tag.hierarchy_path for tag in self.tags if tag is not None}
        self.selection = Selection(filter_tag, used, self.modules)
        self.selected: Sequence[int] = range(len(self.tags))
        if filter_tag is not None:
            self.selected = [i for i in self.selected if self.selection.has_node(self.tags[i])]
        self.selected_tags = [
            (index, tag) for index in self.selected if (tag := self.tags[index]) is not None
        ]
        self.own_nodes = Counter(tag.hierarchy_module for _, tag in self.selected_tags)
        self.initializers = initializer_sizes(model.proto)

    def analyze(self, details: bool) -> Analysis:
        """Count everything."""
        modules = self.module_facts(details)
        by_tag = Counter(tag.hierarchy_path for _, tag in self.selected_tags)
        by_depth: Counter[int] = Counter()
        for tag, count in by_tag.items():
            by_depth[tag.count("/")] += count
        by_method = Counter(tag.hierarchy_method for _, tag in self.selected_tags)
        by_operator = Counter(self.graph.nodes[index].op_type for index in self.selected)
        is_empty = not self.selected and not modules
        return Analysis(
            format=ANALYSIS_FORMAT,
            file=self.file_facts(),
            filter=self.selection.text,
            suggestions=tuple(self.selection.nearest()) if is_empty else (),
            totals=self.totals(by_method, len(by_tag), len(modules)),
            by_operator=_largest_first(by_operator),
            by_method=_largest_first(by_method),
            by_depth=dict(sorted(by_depth.items())),
            by_status=dict(sorted(Counter(module.status for module in modules).items())),
            by_tag=dict(sorted(by_tag.items())),
            absorbed=tuple(m.module for m in modules if m.status == ModuleStatus.ABSORBED),
            unused=tuple(m.module for m in modules if m.status == ModuleStatus.UNUSED),
            modules=modules,
            nodes=self.node_facts() if details else (),
        )

    def totals(self, by_method: Mapping[str, int], tags: int, modules: int) -> Totals:
        """Sum up over the selection."""
        stored = self.selected_initializers()
        elements = sum(initializer.elements for initializer in stored)
        tagged = len(self.selected_tags)
        return Totals(
            nodes=len(self.selected),
            tagged_nodes=tagged,
            coverage=tagged / len(self.selected) if self.selected else 1.0,
            auxiliary_nodes=sum(by_method.get(method, 0) for method in AUXILIARY),
            tags=tags,
            parameters=self.selected_parameters() if self.has_counts else elements,
            stored_values=elements,
            bytes=sum(initializer.bytes for initializer in stored),
            modules=modules,
        )

    def file_facts(self) -> FileFacts:
        """Describe the file as a whole."""
        proto, path = self.model.proto, self.model.path
        records = self.model.records if self.map_source else None
        return FileFacts(
            file=path.name,
            tagged=self.map_source is not None,
            map_source=self.map_source,
            parameters_from="export" if self.has_counts else "stored",
            sidecar_refused=self.model.in_effect.refused,
            class_=None if records is None else records.model.class_,
            strategy=None if records is None else records.export.strategy,
            exporter=None if records is None else records.export.exporter,
            opset=opset_imports(proto),
            ir_version=proto.ir_version,
            inputs=tensor_infos(proto.graph.input),
            outputs=tensor_infos(proto.graph.output),
            dropped_outputs=() if records is None else records.export.dropped_outputs,
            data_files=tuple(
                DataFile(name, is_file(resolve_data_file(path, name)))
                for name in self.model.data_files
            ),
        )

    def parameters(self, path: str, stored: int) -> int:
        """Return the recorded parameters of a module, or what is stored if none are recorded."""
        count = self.modules[path].parameter_count
        return count if self.has_counts and isinstance(count, int) else stored

    def selected_parameters(self) -> int:
        """Sum the parameters of the outermost selected modules, which include those below."""
        selected = {path for path in self.modules if self.is_selected(path)}
        return sum(
            self.parameters(path, 0)
            for path in selected
            if selected.isdisjoint(self.ancestry.of(path)[:-1])
        )

    def selected_initializers(self) -> list[InitializerSize]:
        """Return the initializers with only selected consumers; all without a selection."""
        if self.selection.text is None:
            return self.initializers
        consumers, selected = self.graph.consumers, set(self.selected)
        return [
            initializer
            for initializer in self.initializers
            if (indices := consumers.get(initializer.name)) and selected.issuperset(indices)
        ]

    def node_facts(self) -> tuple[NodeFacts, ...]:
        """Describe the selected nodes."""
        elements: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for initializer in self.initializers:
            for first in self.graph.consumers.get(initializer.name, ())[:1]:
                elements[first] += initializer.elements
                sizes[first] += initializer.bytes
        selected = ((index, self.graph.nodes[index], self.tags[index]) for index in self.selected)
        return tuple(
            NodeFacts(
                node=node.key,
                name=node.name,
                op_type=node.op_type,
                domain=node.domain,
                tag=None if tag is None else tag.hierarchy_path,
                module=None if tag is None else tag.hierarchy_module,
                call=None if tag is None else tag.hierarchy_call,
                method=None if tag is None else tag.hierarchy_method,
                stored_values=elements[index],
                bytes=sizes[index],
                covers=() if tag is None else tag.hierarchy_covers,
            )
            for index, node, tag in selected
        )

    def module_facts(self, details: bool) -> tuple[ModuleFacts, ...]:
        """Describe the selected modules, and those of selected nodes, in execution order."""
        nodes = subtree_totals(self.own_nodes, self.ancestry)
        operators = self.operators()
        own_elements, own_bytes = self.module_sizes()
        elements = subtree_totals(own_elements, self.ancestry)
        sizes = subtree_totals(own_bytes, self.ancestry)
        boundary = BoundaryValues(self.graph, self.tags, self.ancestry) if details else None
        return tuple(
            ModuleFacts(
                module=path,
                tag=record.tag,
                class_=record.class_,
                status=record.status,
                depth=len(self.ancestry.of(path)) - 1,
                calls=record.calls,
                execution_order=record.execution_order,
                nodes=nodes[path],
                own_nodes=self.own_nodes[path],
                parameters=self.parameters(path, elements[path]),
                flops=None if record.flops is msgspec.UNSET else record.flops,
                stored_values=elements[path],
                bytes=sizes[path],
                own_stored_values=own_elements[path],
                own_bytes=own_bytes[path],
                operators=_largest_first(operators.get(path, {})),
                inputs=() if boundary is None else tuple(boundary.inputs.get(path, ())),
                outputs=() if boundary is None else tuple(boundary.outputs.get(path, ())),
            )
            for path, record in sorted(self.modules.items(), key=lambda m: execution_order(*m))
            if self.own_nodes[path] or self.is_selected(path)
        )

    def operators(self) -> dict[str, dict[str, int]]:
        """Count the operators of the selected nodes, by module with all below it."""
        nodes = self.graph.nodes
        own: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for index, tag in self.selected_tags:
            counts, op_type = own[tag.hierarchy_module], nodes[index].op_type
            counts[op_type] = counts.get(op_type, 0) + 1
        totals: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for path, counts in own.items():
            for above in self.ancestry.of(path):
                total = totals[above]
                for op_type, count in counts.items():
                    total[op_type] = total.get(op_type, 0) + count
        return totals

    def module_sizes(self) -> tuple[Counter[str], Counter[str]]:
        """Sum the elements and bytes of the initializers that belong to each module itself."""
        elements: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for initializer in self.initializers:
            consumers = (self.tags[i] for i in self.graph.consumers.get(initializer.name, ()))
            modules = {tag.hierarchy_module for tag in consumers if tag is not None}
            if modules:
                owner = self.ancestry.common(modules)
                elements[owner] += initializer.elements
                sizes[owner] += initializer.bytes
        return elements, sizes

    def is_selected(self, path: str) -> bool:
        """Return whether a module is selected, by its path or the tag of the nearest shown one."""
        return self.selection.has_module(path, self.index.carried_tag(path))


def _largest_first(counts: Mapping[str, int]) -> dict[str, int]:
    """Sort counts, equal ones by name."""
    return dict(sorted(sorted(counts.items()), key=itemgetter(1), reverse=True))
