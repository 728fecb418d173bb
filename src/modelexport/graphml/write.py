"""export_graphml(): write a model as GraphML with the graphics that yEd shows."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import escape

import msgspec

from modelexport.errors import plural
from modelexport.graph.flat import pause_collector
from modelexport.graphml.elements import SHEET, Elements, GroupTree, Terminal, structure_digest
from modelexport.graphml.format import (
    FORMAT_VERSION,
    GRAPHML,
    INITIALIZERS,
    KEYS,
    YED,
    Box,
    Kind,
    Parameters,
    check_graphml,
    checksum,
    data_path,
    draw_edge,
    draw_group,
    draw_shape,
    escape_name,
)
from modelexport.graphml.layout import Layout, text_size
from modelexport.graphml.messages import Message, MessageMaker, parse_without_nodes
from modelexport.graphml.text import Labels, Types, attributes_text, find_types, shorten
from modelexport.graphml.values import Store
from modelexport.onnx_file.atomic_write import transaction
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    initializer_fields,
    open_mapped,
    opset_imports,
    stored_nodes,
)
from modelexport.options import PARAMETER_MODES, keyword_aliases
from modelexport.tagged.model import TaggedModel

_PROGRESS_STEP = 500


class GraphmlFiles(msgspec.Struct, frozen=True):
    """The files that `export_graphml` wrote.

    Attributes:
        graphml: The GraphML file.
        data: The file with the values of initializers; None if there is none.
        nodes: The number of operators.
        modules: The number of modules.
        edges: The number of edges.
        sidecar_refused: Why the sidecar beside a model without tags was not used; None if it was.
    """

    graphml: Path
    data: Path | None
    nodes: int
    modules: int
    edges: int
    sidecar_refused: str | None = None


@keyword_aliases(onnx="path")
def export_graphml(
    path: StrPath,
    output_path: StrPath | None = None,
    *,
    parameters: str = PARAMETER_MODES[0],
    on_progress: Callable[[float], None] | None = None,
) -> GraphmlFiles:
    """Write a model as GraphML.

    Args:
        path: The model file.
        output_path: The GraphML file; by default `<stem>_hierarchical_graph.graphml` beside the
            model.
        parameters: Where the values of initializers go. `sidecar`: into an .onnxdata file beside
            the GraphML; `embedded`: into the GraphML; `reference`: they stay where the model has
            them.
        on_progress: Called now and then with how much is done, from 0 to 1.

    Returns:
        The files and what is in them.

    Raises:
        ArgumentError: If the mode is unknown, or an output would overwrite a file of the model.
        FileError: If a file cannot be read or written.
        FormatError: If the file is not an ONNX model.
    """
    source = as_path(path)
    target = check_graphml(source, output_path, parameters)
    targets = {target.resolve(), data_path(target).resolve()}
    with ExitStack() as stack:
        stack.enter_context(pause_collector())
        data = stack.enter_context(open_mapped(source))
        fields = initializer_fields(data, source)
        proto = parse_without_nodes(data, fields, source)
        model = TaggedModel(source, proto, stored_nodes(data, source))
        stage = stack.enter_context(transaction(target.parent))
        with ExitStack() as files:
            values = None
            if parameters == "sidecar":
                values = files.enter_context((stage.work / "data").open("wb"))
            store = Store(parameters, source.parent, values, data_path(target).name)
            messages = MessageMaker(model, data, fields, store, targets)
            types = find_types(model, data, fields)
            drawing = stage.work / "graphml"
            file = files.enter_context(drawing.open("w", encoding="utf-8", newline="\n"))
            writer = _Writer(model, types, messages, store, file, on_progress)
            writer.write()
        if store.file_name is not None:
            stage.publish(stage.work / "data", store.file_name)
        stage.publish(drawing, target.name)
        stage.commit()
    return GraphmlFiles(
        target,
        None if store.file_name is None else data_path(target),
        len(model.graph.nodes),
        sum(group.kind == Kind.MODULE for group in writer.tree.groups),
        len(writer.elements.edges),
        model.in_effect.refused,
    )


class _Writer:
    """Writes the elements of a model as a stream."""

    def __init__(
        self,
        model: TaggedModel,
        types: Types,
        messages: MessageMaker,
        store: Store,
        file: TextIO,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        self._model = model
        self._types = types
        self._messages = messages
        self._store = store
        self._put = file.write
        self._on_progress = on_progress
        self._done = 0
        self.elements = Elements(model.graph, model.proto)
        self.tree = GroupTree(self.elements, model.effective_tags, model.modules)
        self._label = Labels(model, self.tree, types)
        self._layout = Layout(self.tree, self._label)
        self._ids = [""] * len(self.tree.parents)  # of the nodes that draw elements

    def write(self) -> None:
        """Write the file."""
        put = self._put
        put("<?xml version='1.0' encoding='UTF-8'?>\n")
        put(f'<graphml xmlns="{GRAPHML}" xmlns:y="{YED}">\n')
        for domain, keys in KEYS.items():
            for name, kind in keys.items():
                key = f'id="{domain[0]}_{name}" for="{domain}"'
                put(f'<key {key} attr.name="{name}" attr.type="{kind}"/>\n')
            if domain != "graph":
                graphics = f"{domain}graphics"
                put(f'<key id="{graphics}" for="{domain}" yfiles.type="{graphics}"/>\n')
        put('<graph id="G" edgedefault="directed">\n')
        self._write_keys("g", format_version=FORMAT_VERSION, source=self._model.path.name)
        put("\n")
        self._write_model_node()
        self._write_nodes()
        self._write_edges()
        put("</graph>\n</graphml>\n")

    def _write_model_node(self) -> None:
        """Write the node that describes the model: editors keep what nodes hold."""
        proto, graph = self._model.proto, self._model.graph
        opsets = opset_imports(proto).items()
        versions = ", ".join(f"{escape_name(domain)} {version}" for domain, version in opsets)
        counts = plural(len(graph.nodes), "node"), plural(len(self.elements.edges), "edge")
        version = f"IR version {proto.ir_version}, opset {versions}"
        lines = [self._model.path.name, version, ", ".join(counts)]
        label = "\n".join(shorten(escape_name(line)) for line in lines)
        initializers = sum(each.kind in INITIALIZERS for each in self.elements.terminals)
        parameters = Parameters(self._store.mode, self._store.file_name, initializers)
        self._put('<node id="n0">')
        self._write_keys(
            kind=Kind.MODEL,
            name=proto.graph.name,
            format_version=FORMAT_VERSION,
            operators=len(graph.nodes),
            topology=structure_digest(graph),
            parameters=msgspec.json.encode(parameters).decode(),
        )
        self._write_message(self._messages.frame())
        sheet = self._layout.box(~SHEET)
        width, height = text_size(label)
        box = Box(sheet.x, sheet.y - height - 40, width, height)
        self._put(f'<data key="nodegraphics">{draw_shape(box, Kind.MODEL, label)}</data></node>\n')

    def _write_nodes(self) -> None:
        """Write all other nodes of the sheet, without recursion: groups are deep."""
        groups = self.tree.groups
        open_groups = [("n", iter(enumerate(groups[SHEET].members, 1)))]
        while open_groups:
            prefix, members = open_groups[-1]
            number, member = next(members, (-1, 0))
            identity = f"{prefix}{number}"
            if number < 0:
                open_groups.pop()
                self._put("</graph></node>\n" if open_groups else "")
            elif member >= 0:
                self._write_element(member, identity)
            else:
                self._write_group(~member, identity)
                open_groups.append((f"{identity}::n", iter(enumerate(groups[~member].members))))

    def _count(self) -> None:
        self._done += 1
        if self._on_progress is not None and self._done % _PROGRESS_STEP == 0:
            total = len(self.tree.parents) + len(self.elements.edges)
            self._on_progress(self._done / total)

    def _write_element(self, element: int, identity: str) -> None:
        self._count()
        self._ids[element] = identity
        self._put(f'<node id="{identity}">')
        kind: str = Kind.OPERATOR
        if element < len(self._model.graph.nodes):
            self._write_operator(element)
        else:
            kind = self._write_terminal(self.elements.terminal(element))
        graphics = draw_shape(self._layout.box(element), kind, self._label(element))
        self._put(f'<data key="nodegraphics">{graphics}</data></node>\n')

    def _write_terminal(self, terminal: Terminal) -> str:
        """Write an input, initializer or output, and return its kind."""
        element_type, shape = self._types.get(terminal.key, ("", ""))
        self._write_keys(kind=terminal.kind, name=terminal.name, type=element_type, shape=shape)
        self._write_keys(scope=terminal.scope, position=terminal.position)
        if terminal.kind in INITIALIZERS:
            self._write_message(self._messages.initializer(terminal))
        return terminal.kind

    def _write_operator(self, index: int) -> None:
        graph, tag = self._model.graph, self._model.effective_tags[index]
        node, proto = graph.nodes[index], graph.protos[index]
        self._write_keys(
            kind=Kind.OPERATOR,
            operator=node.op_type,
            domain=node.domain,
            name=node.name,
            execution_order=index,
            scope=self.elements.scope(index),
            attributes=attributes_text(proto.attribute),
            outputs=", ".join(map(self._describe_value, node.outputs)),
        )
        if tag is not None:
            record = self._model.modules.get(tag.hierarchy_module)
            class_ = None if record is None else record.class_
            self._write_keys(
                tag=tag.hierarchy_path, module_path=tag.hierarchy_module, class_=class_
            )
            self._write_keys(evidence=tag.hierarchy_method, call=tag.hierarchy_call)
        self._write_message(self._messages.operator(index, proto))

    def _describe_value(self, key: str) -> str:
        element_type, shape = self._types.get(key, ("", ""))
        return f"{escape_name(key)}: {element_type}{shape}" if element_type else escape_name(key)

    def _write_group(self, number: int, identity: str) -> None:
        """Write a group up to its members."""
        group, closed = self.tree.groups[number], self._layout.is_closed(number)
        folder_type = "folder" if closed else "group"
        self._put(f'<node id="{identity}" yfiles.foldertype="{folder_type}">')
        if group.element >= 0:
            self._ids[group.element] = identity
            self._write_operator(group.element)
        elif group.kind == Kind.MODULE:
            self._write_module(group.name)
        else:
            self._write_keys(kind=group.kind, name=group.name, scope=group.scope)
        boxes = self._layout.box(~number), self._layout.closed_box(number)
        label, empty = self._label(~number), not group.members
        graphics = draw_group(boxes, closed, group.kind, group.depth, label, empty=empty)
        self._put(f'<data key="nodegraphics">{graphics}</data>\n')
        self._put(f'<graph id="{identity}:" edgedefault="directed">\n')

    def _write_module(self, path: str) -> None:
        modules = self._model.modules
        self._write_keys(kind=Kind.MODULE, module_path=path)
        if path in modules:
            shown = path  # or the nearest ancestor that has a tag
            while shown and (shown not in modules or modules[shown].tag is None):
                shown = shown.rpartition(".")[0]
            tag, record = modules[shown].tag if shown in modules else None, modules[path]
            self._write_keys(class_=record.class_, tag=tag)
            self._write_keys(execution_order=record.execution_order, status=record.status)

    def _write_keys(self, prefix: str = "n", **values: str | int | None) -> None:
        """Write values by the names of their keys; `class_` is the key `class`."""
        for name, value in values.items():
            if value is not None and value != "":
                text = escape(escape_name(str(value) if isinstance(value, int) else value))
                self._put(f'<data key="{prefix}_{name.rstrip("_")}">{text}</data>')

    def _write_message(self, message: Message) -> None:
        put = self._put
        stored = ""
        put(f'<data key="n_onnx">{base64.b64encode(message.data).decode()}</data>')
        if message.values:
            embedded = self._store.mode == "embedded"
            put('<data key="n_bytes">' if embedded else "")
            entries = [self._store.put(at, field, each, put) for at, field, each in message.values]
            put("</data>" if embedded else "")
            stored = msgspec.json.encode(entries).decode()
            put(f'<data key="n_values">{escape(stored)}</data>')
        put(f'<data key="n_check">{checksum(message.data, stored)}</data>')

    def _write_edges(self) -> None:
        rows = zip(self.elements.edges, self.elements.edge_keys, strict=True)
        for number, ((source, output, target, slot), key) in enumerate(rows):
            self._count()
            element_type, shape = self._types.get(key, ("", ""))
            ends = f'source="{self._ids[source]}" target="{self._ids[target]}"'
            self._put(f'<edge id="e{number}" {ends}>')
            name = self._value_name(key, source, output)
            self._write_keys("e", tensor=name, type=element_type, shape=shape)
            self._write_keys("e", source_output=output, target_input=slot)
            graphics = draw_edge(shape[1:-1], self._layout.bends(source, target))
            self._put(f'<data key="edgegraphics">{graphics}</data></edge>\n')

    def _value_name(self, key: str, source: int, output: int) -> str:
        """Return the name that its graph has for a value."""
        graph = self._model.graph
        if source >= len(graph.nodes):
            return self.elements.terminal(source).name
        node = graph.nodes[source]
        if node.enclosing < 0 and not node.function:
            return key
        name: str = graph.protos[source].output[output]  # bytes if it is not UTF-8
        return name
