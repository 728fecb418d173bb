"""Analyzes one model file: what each module holds, on what evidence, and how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from modelexport.analysis.outline import execution_order
from modelexport.analysis.subgraph import BoundaryValues, initializer_owners
from modelexport.garbage import pause_collector
from modelexport.modules.lookup import Selection
from modelexport.modules.record import AUXILIARY, ModuleStatus, NodeTag
from modelexport.modules.tree import Ancestry, subtree_totals
from modelexport.onnx_file.model_file import (
    InitializerSize,
    StrPath,
    external_files,
    initializer_sizes,
    is_file,
    opset_imports,
    resolve_data_file,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.records import TensorInfo
from modelexport.tagged.tables import tensor_infos

ANALYSIS_FORMAT = "modelexport-analysis/1"
_NOWHERE = [-1]


class DataFile(msgspec.Struct, frozen=True):
    """A file of weights beside the model."""

    name: str
    present: bool


class FileFacts(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """The file as a whole, whatever is selected in it."""

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
    """Where the map was read: `file`, or `sidecar` for a file that carries none."""
    parameters_from: str = "stored"
    """What `parameters` counts: `export`, PyTorch's own parameters as recorded at export; or `stored`, the values of
    initializers, for a file that has no such record."""
    sidecar_refused: str | None = None
    """Why the sidecar beside the file is not used, where it was needed."""


class Totals(msgspec.Struct, frozen=True):
    """Counts over the selected nodes."""

    nodes: int
    tagged_nodes: int
    coverage: float
    auxiliary_nodes: int
    tags: int
    parameters: int
    """As `parameters_from` of the file says; of a selection, those of the selected modules."""
    stored_values: int
    """The values of the initializers."""
    bytes: int
    """The size of the initializers."""
    modules: int


class ModuleFacts(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One module. Counts are with everything below it, unless they are called `own`.

    Initializers belong to the lowest module that holds all nodes which read them.
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
    """Of PyTorch, each parameter once; as `parameters_from` of the file says."""
    stored_values: int
    """The values of its initializers: constants count, weights that the exporter merged do not."""
    bytes: int
    """The size of its initializers."""
    own_stored_values: int
    own_bytes: int
    operators: dict[str, int]
    """How many nodes of each operator."""
    inputs: tuple[str, ...]
    """Tensors that enter it."""
    outputs: tuple[str, ...]
    """Tensors that leave it."""


class NodeFacts(msgspec.Struct, frozen=True, gc=False):
    """One node, known by its first output. `stored_values` are those of the initializers it is the first to read."""

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
    """The modules whose operations are in the node, where they are several."""


class Analysis(msgspec.Struct, frozen=True):
    """Everything that `analyze` finds out; the JSON output is this record."""

    format: str
    """`modelexport-analysis/1`."""
    file: FileFacts
    filter: str | None
    """What was asked for."""
    suggestions: tuple[str, ...]
    """The nearest tags, where nothing matches."""
    totals: Totals
    by_operator: dict[str, int]
    by_method: dict[str, int]
    by_depth: dict[int, int]
    """Nodes by the number of segments of their tag."""
    by_status: dict[str, int]
    by_tag: dict[str, int]
    """Nodes by tag."""
    absorbed: tuple[str, ...]
    """Modules by path."""
    unused: tuple[str, ...]
    modules: tuple[ModuleFacts, ...]
    nodes: tuple[NodeFacts, ...]
    """Empty without details."""


@keyword_aliases(onnx="path")
def analyze(path: StrPath, filter_tag: str | None = None, details: bool = True) -> Analysis:
    """Read a file, tagged or not, and count; weights are not read, and a data file may be missing.

    `filter_tag` takes a tag with all below it, a glob, a module path, or `auxiliary`. Without `details` the list of
    nodes and the tensors that enter and leave each module are left out.
    """
    with pause_collector():
        return _Analyzer(load(path), filter_tag).result(details)


class _Analyzer:
    """The counts over the chosen nodes of one file."""

    def __init__(self, model: TaggedModel, filter_tag: str | None) -> None:
        self.model = model
        self.tags, self.map_source = model.effective_tags, model.in_effect.source
        self.modules = model.modules if self.map_source else {}
        self.has_counts = bool(self.modules) and all(
            isinstance(record.parameter_count, int) for record in self.modules.values()
        )
        self.lineage = Ancestry(self.modules)
        seen = {tag.hierarchy_path for tag in self.tags if tag is not None}
        self.selection = Selection(filter_tag, seen, self.modules)
        self.chosen = [index for index, tag in enumerate(self.tags) if self.selection.has_node(tag)]
        self.own = Counter(tag.hierarchy_module for _, tag in self.chosen_tags())
        self.weights = initializer_sizes(model.proto)

    def chosen_tags(self) -> Iterator[tuple[int, NodeTag]]:
        """The chosen nodes that have a tag."""
        return ((index, tag) for index in self.chosen if (tag := self.tags[index]) is not None)

    def result(self, details: bool) -> Analysis:
        modules = self.module_facts(details)
        read, own = self.read_weights(), self.own_weights()
        by_method = Counter(tag.hierarchy_method for _, tag in self.chosen_tags())
        by_tag = Counter(tag.hierarchy_path for _, tag in self.chosen_tags())
        by_depth: Counter[int] = Counter()
        for tag, count in by_tag.items():
            by_depth[tag.count("/")] += count
        tagged = sum(by_method.values())
        found = bool(self.chosen or modules)
        return Analysis(
            format=ANALYSIS_FORMAT,
            file=self.file_facts(),
            filter=self.selection.text,
            suggestions=() if found else tuple(self.selection.nearest()),
            totals=Totals(
                nodes=len(self.chosen),
                tagged_nodes=tagged,
                coverage=tagged / len(self.chosen) if self.chosen else 1.0,
                auxiliary_nodes=sum(by_method[method] for method in AUXILIARY),
                tags=len(by_tag),
                parameters=self.selected_parameters()
                if self.has_counts
                else sum(w.elements for w in own),
                stored_values=sum(weight.elements for weight in own),
                bytes=sum(weight.bytes for weight in own),
                modules=len(modules),
            ),
            by_operator=_ranked(
                Counter([self.model.graph.nodes[index].op_type for index in self.chosen])
            ),
            by_method=_ranked(by_method),
            by_depth=dict(sorted(by_depth.items())),
            by_status=dict(sorted(Counter(module.status for module in modules).items())),
            by_tag=dict(sorted(by_tag.items())),
            absorbed=tuple(
                module.module for module in modules if module.status == ModuleStatus.ABSORBED
            ),
            unused=tuple(
                module.module for module in modules if module.status == ModuleStatus.UNUSED
            ),
            modules=modules,
            nodes=self.node_facts(read) if details else (),
        )

    def file_facts(self) -> FileFacts:
        proto = self.model.proto
        source = self.model.records if self.map_source else None
        return FileFacts(
            file=self.model.path.name,
            tagged=self.map_source is not None,
            map_source=self.map_source,
            parameters_from="export" if self.has_counts else "stored",
            sidecar_refused=self.model.in_effect.refused,
            class_=None if source is None else source.model.class_,
            strategy=None if source is None else source.export.strategy,
            exporter=None if source is None else source.export.exporter,
            opset=opset_imports(proto),
            ir_version=proto.ir_version,
            inputs=tensor_infos(proto.graph.input),
            outputs=tensor_infos(proto.graph.output),
            dropped_outputs=() if source is None else source.export.dropped_outputs,
            data_files=tuple(
                DataFile(name, is_file(resolve_data_file(self.model.path, name)))
                for name in external_files(proto)
            ),
        )

    def parameters(self, path: str, stored: int) -> int:
        """PyTorch's parameters of a module, or the values stored for it in a file that does not record them."""
        count = self.modules[path].parameter_count
        return count if self.has_counts and isinstance(count, int) else stored

    def selected_parameters(self) -> int:
        """The parameters of the selected modules; those below another selected one are in its count."""
        selected = {
            path for path in self.modules if self.selection.has_module(path, self.carried_tag(path))
        }
        outermost = [path for path in selected if selected.isdisjoint(self.lineage.of(path)[:-1])]
        return sum(self.parameters(path, 0) for path in outermost)

    def own_weights(self) -> list[InitializerSize]:
        """The initializers that no node reads which is not chosen: of all nodes all of them."""
        if self.selection.text is None:
            return list(self.weights)
        consumers, chosen = self.model.graph.consumers, set(self.chosen)
        return [
            w for w in self.weights if w.name in consumers and chosen.issuperset(consumers[w.name])
        ]

    def read_weights(self) -> dict[int, tuple[int, int]]:
        """Elements and bytes of the initializers that each chosen node is the first to read; -1 has the unread ones."""
        consumers = self.model.graph.consumers
        everything = self.selection.text is None
        chosen = {*self.chosen, *([-1] if everything else [])}
        read: dict[int, tuple[int, int]] = {}
        for weight in self.weights:
            first = consumers.get(weight.name, _NOWHERE)[0]
            if first in chosen:
                elements, size = read.get(first, (0, 0))
                read[first] = (elements + weight.elements, size + weight.bytes)
        return read

    def node_facts(self, read: Mapping[int, tuple[int, int]]) -> tuple[NodeFacts, ...]:
        facts = []
        for index in self.chosen:
            node, tag = self.model.graph.nodes[index], self.tags[index]
            facts.append(
                NodeFacts(
                    node=node.key,
                    name=node.name,
                    op_type=node.op_type,
                    domain=node.domain,
                    tag=None if tag is None else tag.hierarchy_path,
                    module=None if tag is None else tag.hierarchy_module,
                    call=None if tag is None else tag.hierarchy_call,
                    method=None if tag is None else tag.hierarchy_method,
                    stored_values=read[index][0] if index in read else 0,
                    bytes=read[index][1] if index in read else 0,
                    covers=() if tag is None else tag.hierarchy_covers,
                )
            )
        return tuple(facts)

    def module_facts(self, details: bool) -> tuple[ModuleFacts, ...]:
        nodes = subtree_totals(self.own, self.lineage)
        operators = self.operators()
        own_values, own_sizes = self.module_weights()
        values, sizes = (
            subtree_totals(own_values, self.lineage),
            subtree_totals(own_sizes, self.lineage),
        )
        borders = BoundaryValues(self.model.graph, self.tags, self.lineage) if details else None
        facts = []
        for path, record in sorted(self.modules.items(), key=lambda item: execution_order(*item)):
            if not (self.own[path] or self.selection.has_module(path, self.carried_tag(path))):
                continue
            facts.append(
                ModuleFacts(
                    module=path,
                    tag=record.tag,
                    class_=record.class_,
                    status=record.status,
                    depth=len(self.lineage.of(path)) - 1,
                    calls=record.calls,
                    execution_order=record.execution_order,
                    nodes=nodes[path],
                    own_nodes=self.own[path],
                    parameters=self.parameters(path, values[path]),
                    stored_values=values[path],
                    bytes=sizes[path],
                    own_stored_values=own_values[path],
                    own_bytes=own_sizes[path],
                    operators=_ranked(operators.get(path, {})),
                    inputs=() if borders is None else tuple(borders.inputs.get(path, ())),
                    outputs=() if borders is None else tuple(borders.outputs.get(path, ())),
                )
            )
        return tuple(facts)

    def operators(self) -> dict[str, dict[str, int]]:
        own: dict[tuple[str, str], int] = {}
        nodes = self.model.graph.nodes
        for index, tag in self.chosen_tags():
            key = (tag.hierarchy_module, nodes[index].op_type)
            own[key] = own.get(key, 0) + 1
        whole: dict[str, dict[str, int]] = {}
        for (path, op_type), count in own.items():
            for above in self.lineage.of(path):
                counts = whole.get(above)
                if counts is None:
                    counts = whole[above] = {}
                counts[op_type] = counts.get(op_type, 0) + count
        return whole

    def module_weights(self) -> tuple[Counter[str], Counter[str]]:
        owners = initializer_owners(self.model.graph, self.tags, self.lineage)
        elements: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            owner = owners.get(weight.name)
            if owner is not None:
                elements[owner] += weight.elements
                sizes[owner] += weight.bytes
        return elements, sizes

    def carried_tag(self, path: str) -> str | None:
        """The tag of the nearest shown module, from this one up."""
        records = (self.modules.get(above) for above in reversed(self.lineage.of(path)))
        return next(
            (record.tag for record in records if record is not None and record.tag is not None),
            None,
        )


def _ranked(counts: Mapping[str, int]) -> dict[str, int]:
    """Largest first; equal ones by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
