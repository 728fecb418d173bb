"""export_graphml(): write a model as GraphML with the graphics that yEd shows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import escape

import msgspec

from modelexport.errors import plural
from modelexport.garbage import pause_collector
from modelexport.graphml.elements import SHEET, Elements, GroupTree, find_scopes, structure_digest
from modelexport.graphml.format import (
    EDGE_KEYS,
    FORMAT_VERSION,
    GRAPH_KEYS,
    GRAPHML,
    INITIALIZERS,
    MODEL,
    MODULE,
    NODE_KEYS,
    OPERATOR,
    YED,
    Parameters,
    check_graphml,
    checksum,
    data_path,
    escape_name,
)
from modelexport.graphml.graphics import draw_edge, draw_group, draw_shape
from modelexport.graphml.layout import Box, Layout, text_size
from modelexport.graphml.messages import Message, MessageMaker, make_frame, parse_without_nodes
from modelexport.graphml.tensors import EmbeddedStore, ReferenceStore, SidecarStore, Store
from modelexport.graphml.text import Labels, Types, attributes_text, find_types, shorten
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
            store = _open_store(parameters, source, target, stage.work, files)
            messages = MessageMaker(model, data, fields, store, targets)
            types, frame = find_types(model, data, fields), make_frame(data)
            path = stage.work / "graphml"
            file = files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            writer = _Writer(model, types, messages, store, file, on_progress)
            writer.write(frame)
        if store.file_name is not None:
            stage.publish(stage.work / "data", store.file_name)
        stage.publish(path, target.name)
        stage.commit()
    return GraphmlFiles(
        target,
        None if store.file_name is None else data_path(target),
        len(model.graph.nodes),
        sum(group.kind == MODULE for group in writer.tree.groups),
        len(writer.elements.edges),
        model.in_effect.refused,
    )


def _open_store(mode: str, source: Path, target: Path, work: Path, files: ExitStack) -> Store:
    """Open the store of a mode; the file of a sidecar lies in the work folder first."""
    if mode == "sidecar":
        values = files.enter_context((work / "data").open("wb"))
        return SidecarStore(values, data_path(target).name)
    return EmbeddedStore() if mode == "embedded" else ReferenceStore(source.parent)


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
        self._scope = find_scopes(model.graph)
        self._group_scopes = self.tree.scopes()
        self._group_ids = ["n"] * len(self.tree.groups)
        # The last number of an element's id; an operator that is a group has minus its number.
        self._numbers = [0] * len(self.tree.parents)

    def write(self, frame: Message) -> None:
        """Write the file; `frame` is the model without nodes and initializers."""
        put = self._put
        put("<?xml version='1.0' encoding='UTF-8'?>\n")
        put(f'<graphml xmlns="{GRAPHML}" xmlns:y="{YED}">\n')
        for domain, keys in (("graph", GRAPH_KEYS), ("node", NODE_KEYS), ("edge", EDGE_KEYS)):
            for name, kind in keys.items():
                key = f'id="{domain[0]}_{name}" for="{domain}"'
                put(f'<key {key} attr.name="{name}" attr.type="{kind}"/>\n')
            if domain != "graph":
                graphics = f"{domain}graphics"
                put(f'<key id="{graphics}" for="{domain}" yfiles.type="{graphics}"/>\n')
        put('<graph id="G" edgedefault="directed">\n')
        put(f'<data key="g_format_version">{FORMAT_VERSION}</data>')
        put(f'<data key="g_source">{escape(escape_name(self._model.path.name))}</data>\n')
        self._write_card(frame)
        self._write_nodes()
        self._write_edges()
        put("</graph>\n</graphml>\n")

    def _write_card(self, frame: Message) -> None:
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
            {
                "kind": MODEL,
                "name": escape_name(proto.graph.name),
                "format_version": FORMAT_VERSION,
                "operators": str(len(graph.nodes)),
                "topology": structure_digest(graph),
                "parameters": msgspec.json.encode(parameters).decode(),
            }
        )
        self._write_message(frame)
        sheet = self._layout.box(~SHEET)
        width, height = text_size(label)
        box = Box(sheet.x, sheet.y - height - 40, width, height)
        self._put(f'<data key="nodegraphics">{draw_shape(box, MODEL, label)}</data></node>\n')

    def _write_nodes(self) -> None:
        """Write everything on the sheet behind the card, without recursion: groups are deep."""
        groups = self.tree.groups
        on_sheet = iter(enumerate(groups[SHEET].members, 1))
        open_groups: list[tuple[str, Iterator[tuple[int, int]]]] = [("n", on_sheet)]
        while open_groups:
            prefix, members = open_groups[-1]
            number, member = next(members, (-1, 0))
            if number < 0:
                open_groups.pop()
                if open_groups:
                    self._put("</graph></node>\n")
            elif member >= 0:
                self._numbers[member] = number
                self._write_element(member, f"{prefix}{number}")
            else:
                own = self._group_ids[~member] = f"{prefix}{number}"
                self._write_group(~member)
                self._put(f'<graph id="{own}:" edgedefault="directed">\n')
                open_groups.append((f"{own}::n", iter(enumerate(groups[~member].members))))

    def _count(self) -> None:
        self._done += 1
        if self._on_progress is not None and self._done % _PROGRESS_STEP == 0:
            total = len(self.tree.parents) + len(self.elements.edges)
            self._on_progress(self._done / total)

    def _write_element(self, element: int, identity: str) -> None:
        self._count()
        self._put(f'<node id="{identity}">')
        if element < len(self._model.graph.nodes):
            kind = OPERATOR
            self._write_operator(element)
        else:
            kind = self.elements.terminal(element).kind
            self._write_terminal(element)
        graphics = draw_shape(self._layout.box(element), kind, self._label(element))
        self._put(f'<data key="nodegraphics">{graphics}</data></node>\n')

    def _write_terminal(self, element: int) -> None:
        terminal = self.elements.terminal(element)
        element_type, shape = self._types.get(terminal.key, ("", ""))
        self._write_keys(
            {
                "kind": terminal.kind,
                "name": escape_name(terminal.name),
                "type": element_type,
                "shape": shape,
                "scope": terminal.scope,
                "position": str(terminal.position),
            }
        )
        if terminal.kind in INITIALIZERS:
            self._write_message(self._messages.initializer(terminal))

    def _write_operator(self, index: int) -> None:
        graph, tag = self._model.graph, self.tree.tags[index]
        node, proto = graph.nodes[index], graph.protos[index]
        keys = {
            "kind": OPERATOR,
            "operator": escape_name(node.op_type),
            "domain": escape_name(node.domain),
            "name": escape_name(node.name),
            "execution_order": str(index),
            "scope": self._scope(index),
            "attributes": attributes_text(proto.attribute),
            "outputs": ", ".join(map(self._describe_value, node.outputs)),
        }
        if tag is not None:
            record = self._model.modules.get(tag.hierarchy_module)
            keys |= {
                "tag": escape_name(tag.hierarchy_path),
                "module_path": escape_name(tag.hierarchy_module),
                "class": "" if record is None else escape_name(record.class_),
                "evidence": escape_name(tag.hierarchy_method),
                "call": "" if tag.hierarchy_call is None else str(tag.hierarchy_call),
            }
        self._write_keys(keys)
        self._write_message(self._messages.operator(index, proto))

    def _describe_value(self, key: str) -> str:
        element_type, shape = self._types.get(key, ("", ""))
        return f"{escape_name(key)}: {element_type}{shape}" if element_type else escape_name(key)

    def _write_group(self, number: int) -> None:
        """Write a group up to its members."""
        group, closed = self.tree.groups[number], self._layout.is_closed(number)
        folder_type = "folder" if closed else "group"
        self._put(f'<node id="{self._group_ids[number]}" yfiles.foldertype="{folder_type}">')
        if group.element >= 0:
            self._numbers[group.element] = -number
            self._write_operator(group.element)
        elif group.kind == MODULE:
            self._write_module(group.name)
        else:
            scope = self._group_scopes[number]
            self._write_keys({"kind": group.kind, "name": escape_name(group.name), "scope": scope})
        boxes = self._layout.box(~number), self._layout.closed_box(number)
        label, empty = self._label(~number), not group.members
        graphics = draw_group(boxes, closed, group.kind, group.depth, label, empty=empty)
        self._put(f'<data key="nodegraphics">{graphics}</data>\n')

    def _write_module(self, path: str) -> None:
        keys = {"kind": MODULE, "module_path": escape_name(path)}
        record = self._model.modules.get(path)
        if record is not None:
            order = record.execution_order
            keys |= {
                "class": escape_name(record.class_),
                "tag": escape_name(self._nearest_tag(path)),
                "execution_order": "" if order is None else str(order),
                "status": escape_name(record.status),
            }
        self._write_keys(keys)

    def _nearest_tag(self, path: str) -> str:
        """Return the tag of a module, or of its nearest ancestor that is shown."""
        modules = self._model.modules
        while path and (path not in modules or modules[path].tag is None):
            path = path.rpartition(".")[0]
        return (modules[path].tag if path in modules else None) or ""

    def _write_keys(self, values: Mapping[str, str], prefix: str = "n") -> None:
        data = [
            f'<data key="{prefix}_{name}">{escape(text)}</data>'
            for name, text in values.items()
            if text
        ]
        self._put("".join(data))

    def _write_message(self, message: Message) -> None:
        put = self._put
        stored = ""
        put(f'<data key="n_onnx">{base64.b64encode(message.data).decode()}</data>')
        if message.values:
            embedded = isinstance(self._store, EmbeddedStore)
            put('<data key="n_bytes">' if embedded else "")
            entries = [self._store.put(at, field, each, put) for at, field, each in message.values]
            put("</data>" if embedded else "")
            stored = msgspec.json.encode(entries).decode()
            put(f'<data key="n_values">{escape(stored)}</data>')
        put(f'<data key="n_check">{checksum(message.data, stored)}</data>')

    def _write_edges(self) -> None:
        edges = self.elements.edges
        columns = zip(edges.sources, edges.outputs, edges.targets, edges.inputs, strict=True)
        for number, (source, output, target, slot) in enumerate(columns):
            self._count()
            key, name = self._source_value(source, output)
            element_type, shape = self._types.get(key, ("", ""))
            ends = f'source="{self._identity(source)}" target="{self._identity(target)}"'
            self._put(f'<edge id="e{number}" {ends}>')
            self._write_keys(
                {
                    "tensor": escape_name(name),
                    "type": element_type,
                    "shape": shape,
                    "source_output": str(output),
                    "target_input": str(slot),
                },
                "e",
            )
            graphics = draw_edge(shape[1:-1], self._layout.bends(source, target))
            self._put(f'<data key="edgegraphics">{graphics}</data></edge>\n')

    def _source_value(self, source: int, output: int) -> tuple[str, str]:
        """Return the key of an element's output, and the name that its graph has for it."""
        graph = self._model.graph
        if source >= len(graph.nodes):
            terminal = self.elements.terminal(source)
            return terminal.key, terminal.name
        node = graph.nodes[source]
        key = node.outputs[self.elements.slots(source, "output").index(output)]
        if node.enclosing < 0 and not node.function:
            return key, key
        return key, graph.protos[source].output[output]

    def _identity(self, element: int) -> str:
        number = self._numbers[element]
        if number < 0:
            return self._group_ids[-number]
        parent = self.tree.parents[element]
        return f"n{number}" if parent == SHEET else f"{self._group_ids[parent]}::n{number}"
