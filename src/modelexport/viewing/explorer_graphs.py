"""The graphs of a model as Model Explorer draws them: nodes, their descriptions, and groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from modelexport.graph.flat import as_text
from modelexport.graphml.elements import Elements, Terminal
from modelexport.graphml.format import INITIALIZERS, Kind
from modelexport.graphml.text import Types, describe_attribute
from modelexport.modules.record import NodeTag
from modelexport.onnx_file.model_file import opset_imports
from modelexport.tagged.model import TaggedModel
from modelexport.viewing.explorer_edges import Edges, GraphNames
from modelexport.viewing.explorer_format import (
    ExplorerGraph,
    GraphNode,
    KeyValue,
    MetadataItem,
    NodeStyle,
    canvas_text,
    panel_text,
)
from modelexport.viewing.namespaces import Namespaces
from modelexport.viewing.node_data import ModuleValues

_INITIALIZER_STYLE = NodeStyle("#eef3e2", "#8aa35c")
_CAPTURED = "captured from an outer graph"


class GraphBuilder:
    """Builds the graphs of a model.

    Args:
        model: The model.
        types: The element type and shape of values, by their keys.
        values: What overlays say about modules.

    Attributes:
        model: The model.
        namespaces: The namespaces of its modules.
        graphs: Its graphs, the main one first.
        module_of: The module path of each operator by the id of its node, by graph id.
        drawn_modules: The paths of the modules that are groups.
    """

    def __init__(self, model: TaggedModel, types: Types, values: ModuleValues) -> None:
        self.model = model
        self._types = types
        self._values = values
        self._elements = Elements(model.graph, model.proto)
        owners = {tag.hierarchy_module for tag in model.effective_tags if tag is not None}
        self.namespaces: Namespaces = Namespaces(model.modules, owners)
        self._names = GraphNames(model)
        self._edges = Edges(model, self._elements, self._names, self.namespaces.lineage)
        self.module_of: dict[str, dict[str, str]] = {
            name: {} for name in self._names.of_scope.values()
        }
        self.drawn_modules: set[str] = set()
        self.graphs: list[ExplorerGraph] = self._build_graphs()

    def _build_graphs(self) -> list[ExplorerGraph]:
        nodes: dict[str, list[GraphNode]] = {scope: [] for scope in self._names.of_scope}
        last: dict[str, list[GraphNode]] = {scope: [] for scope in self._names.of_scope}
        first = len(self.model.graph.nodes)
        for element, terminal in enumerate(self._elements.terminals, first):
            if element not in self._edges.inlined:
                order = last if terminal.kind == Kind.OUTPUT else nodes
                order[terminal.scope].append(self._terminal_node(element, terminal))
        for scope in nodes:
            nodes[scope] += self._captured_nodes(scope)
        for index in range(first):
            nodes[self._edges.scopes[index]].append(self._operator_node(index))
        return [self._make_graph(scope, [*inside, *last[scope]]) for scope, inside in nodes.items()]

    def _make_graph(self, scope: str, nodes: list[GraphNode]) -> ExplorerGraph:
        groups = self.namespaces.groups(node.namespace for node in nodes)
        self.drawn_modules.update(groups.values())
        attributes = {
            namespace: {**self.namespaces.describe(path), **self._values.of(path)}
            for namespace, path in sorted(groups.items())
        }
        if not scope:
            attributes[""] = self._describe_model()
        return ExplorerGraph(self._names.of_scope[scope], nodes, attributes)

    def _describe_model(self) -> dict[str, str]:
        """Return the lines of the side panel while nothing is selected."""
        model = self.model
        versions = (f"{domain} {version}" for domain, version in opset_imports(model.proto).items())
        lines = {
            "file": model.path.name,
            "graph": as_text(model.proto.graph.name),
            "producer": f"{model.proto.producer_name} {model.proto.producer_version}".strip(),
            "IR version": str(model.proto.ir_version),
            "opset": ", ".join(versions),
            "nodes": str(len(model.graph.nodes)),
        }
        if model.records is not None:
            export = model.records.export
            lines |= {"strategy": export.strategy, "exporter": export.exporter}
            lines |= {"modules": str(len(model.modules)), "source": model.records.model.source}
        return {key: panel_text(text) for key, text in lines.items() if text}

    def _namespace(self, element: int) -> str:
        path = self._edges.home(element)
        return "" if path is None else self.namespaces.of(path)

    def _terminal_node(self, element: int, terminal: Terminal) -> GraphNode:
        name = as_text(terminal.name)
        described = [self._describe_value("0", terminal.key, name)]
        is_output = terminal.kind == Kind.OUTPUT
        is_initializer = terminal.kind in INITIALIZERS
        label, namespace = name, self._namespace(element) if is_initializer else ""
        if is_initializer:
            group = self.namespaces.module_of(namespace) if namespace else ""
            label = label.removeprefix(f"{group}.") if group else label
        return GraphNode(
            self._edges.ids[element],
            canvas_text(label),
            namespace,
            attrs=_key_values({"kind": terminal.kind.replace("_", " "), "name": name}),
            incoming_edges=self._edges.incoming.get(element, []),
            inputs_metadata=described if is_output else [],
            outputs_metadata=[] if is_output else described,
            style=_INITIALIZER_STYLE if is_initializer else None,
        )

    def _captured_nodes(self, scope: str) -> Iterator[GraphNode]:
        """Build the nodes through which values of outer graphs enter a subgraph."""
        for key, name in self._edges.captured[scope].items():
            described = [self._describe_value("0", key)]
            attrs = _key_values({"kind": _CAPTURED, "name": key})
            yield GraphNode(name, canvas_text(key), "", attrs=attrs, outputs_metadata=described)

    def _operator_node(self, index: int) -> GraphNode:
        graph, scope = self.model.graph, self._edges.scopes[index]
        node, proto = graph.nodes[index], graph.protos[index]
        name, path = self._edges.ids[index], self._edges.home(index)
        if path is not None:
            self.module_of[self._names.of_scope[scope]][name] = path
        inputs = [
            self._describe_value(str(slot), key)
            for slot, key in _numbered(proto.input, node.inputs)
        ]
        for key, slot in self._edges.captured_inputs.get(index, {}).items():
            note = {"used by": "its subgraphs"}
            inputs.append(self._describe_value(str(slot), key, note=note))
        outputs = [
            self._describe_value(str(slot), key, as_text(proto.output[slot]))
            for slot, key in _numbered(proto.output, node.outputs)
        ]
        return GraphNode(
            name,
            canvas_text(node.op_type),
            self._namespace(index),
            subgraph_ids=self._names.called_by(self.model, index),
            attrs=_key_values(self._describe_operator(index)),
            incoming_edges=self._edges.incoming.get(index, []),
            inputs_metadata=inputs,
            outputs_metadata=outputs,
        )

    def _describe_operator(self, index: int) -> dict[str, str]:
        node, tag = self.model.graph.nodes[index], self.model.effective_tags[index]
        lines = {"name": node.name, "domain": node.domain}
        lines = {key: text for key, text in lines.items() if text}
        if tag is not None:
            lines |= _describe_tag(tag)
        for attribute in self.model.graph.protos[index].attribute:
            if attribute.type not in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                value, key = describe_attribute(attribute), as_text(attribute.name)
                text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                lines[f"attribute {key}" if key in lines else key] = text
        return lines | self._describe_constants(index)

    def _describe_constants(self, index: int) -> dict[str, str]:
        """Describe the inputs that are initializers without a node.

        They are lines of the operator, because Model Explorer lists only inputs that have an edge.
        """
        lines = {}
        names = self.model.graph.protos[index].input
        for slot, key in _numbered(names, self.model.graph.nodes[index].inputs):
            source = self._elements.source(key)
            inlined = None if source is None else self._edges.inlined.get(source[0])
            if inlined is not None:
                lines[f"input {slot}"] = f"{key}: {inlined}"
        return lines

    def _describe_value(
        self, slot: str, key: str, name: str = "", note: dict[str, str] | None = None
    ) -> MetadataItem:
        """Describe an input or output; the keys with underscores have a meaning in Model Explorer.

        `name` is that of an output in its own graph, by which node data may refer to it.
        """
        element_type, shape = self._types.get(key, ("", ""))
        lines = {"__tensor_tag": name or key}
        if name:
            lines["tensor_name"] = name
        if element_type:
            lines["tensor_shape"] = f"{element_type}{shape}"
        return MetadataItem(slot, _key_values(lines | (note or {})))


def _describe_tag(tag: NodeTag) -> dict[str, str]:
    lines = {
        "module": tag.hierarchy_module or "(root)",
        "tag": tag.hierarchy_path,
        "evidence": tag.hierarchy_method,
    }
    if tag.hierarchy_call is not None:
        lines["call"] = str(tag.hierarchy_call)
    if tag.hierarchy_covers:
        lines["covers"] = ", ".join(path or "(root)" for path in tag.hierarchy_covers)
    others = tag.hierarchy_tags[1:]
    return lines | ({"consumers in": ", ".join(others)} if others else {})


def _numbered(names: Iterable[str], keys: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Iterate over values with their positions; a position without a name has none."""
    return zip((slot for slot, name in enumerate(names) if name), keys, strict=True)


def _key_values(lines: dict[str, str]) -> list[KeyValue]:
    return [KeyValue(key, panel_text(text)) for key, text in lines.items()]
