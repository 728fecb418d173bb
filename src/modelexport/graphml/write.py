"""export_graphml(): a model file as GraphML with the graphics that yEd shows, written as a stream."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TextIO
from xml.sax.saxutils import escape

import msgspec

from modelexport.errors import ArgumentError, plural
from modelexport.garbage import pause_collector
from modelexport.graphml import yed
from modelexport.graphml.dialect import (
    FORMAT_VERSION,
    GRAPHML,
    MODEL,
    MODES,
    MODULE,
    ON_EDGES,
    ON_GRAPH,
    ON_NODES,
    OPERATOR,
    WEIGHTS,
    YED,
    data_path,
    graphml_path,
)
from modelexport.graphml.exact import Exact, ExactForms, frame, without_nodes
from modelexport.graphml.labels import Labels, Types, inferred_types, shortened, tensor_types
from modelexport.graphml.layout import Layout, text_size
from modelexport.graphml.scene import SHEET, Scene
from modelexport.graphml.store import Embedded, Reference, Sidecar, Store, part_check
from modelexport.graphml.views import attributes_text, plain
from modelexport.graphml.wiring import Wiring, filled, scopes_of, structure_digest
from modelexport.onnx_file.atomic_write import check_output_path, transaction
from modelexport.onnx_file.model_file import (
    StrPath,
    as_path,
    initializer_fields,
    open_mapped,
    opset_imports,
    stored_nodes,
)
from modelexport.options import keyword_aliases
from modelexport.tagged.model import TaggedModel

_STEP = 500


class GraphmlFiles(msgspec.Struct, frozen=True):
    """What was written. `data` is the file with the values of the weights, if there is one."""

    graphml: Path
    data: Path | None
    nodes: int
    modules: int
    edges: int
    sidecar_refused: str | None = None
    """Why the sidecar beside a model without tags was not used."""


@keyword_aliases(onnx="path")
def export_graphml(
    path: StrPath,
    output_path: StrPath | None = None,
    *,
    parameters: str = MODES[0],
    on_progress: Callable[[float], None] | None = None,
) -> GraphmlFiles:
    """Write a model as GraphML, `<stem>_hierarchical_graph.graphml` beside it if no output is named.

    `parameters` says where the values of weights go: `sidecar`, into an .onnxdata beside the GraphML;
    `embedded`, into the GraphML; `reference`, nowhere: the GraphML says where the model has them.
    `on_progress` is told now and then how much is done, from 0 to 1.
    """
    source = as_path(path)
    target = check_graphml(source, output_path, parameters)
    with ExitStack() as stack:
        stack.enter_context(pause_collector())
        data = stack.enter_context(open_mapped(source))
        fields = initializer_fields(data, source)
        proto = without_nodes(data, fields, source)
        stage = stack.enter_context(transaction(target.parent))
        store: Store = Embedded() if parameters == "embedded" else Reference(source.parent)
        apart: BinaryIO | None = None
        if parameters == "sidecar":
            apart = stack.enter_context((stage.work / "data").open("wb"))
            store = Sidecar(apart, data_path(target).name)
        model = TaggedModel(source, proto, stored_nodes(data, source))
        targets = {target.resolve(), data_path(target).resolve()}
        exact = ExactForms(source, data, fields, model.graph, proto, targets)
        with (stage.work / "graphml").open("w", encoding="utf-8", newline="\n") as file:
            types = tensor_types(model, inferred_types(model, data, fields))
            writer = _Writer(model, types, exact, frame(data), store, file, on_progress)
            writer.write()
        if apart is not None:
            apart.close()
            stage.place(stage.work / "data", data_path(target).name)
        stage.place(stage.work / "graphml", target.name)
        stage.commit()
    modules = sum(group.kind == MODULE for group in writer.scene.groups)
    nodes, edges = len(writer.model.graph.nodes), len(writer.scene.sources)
    refused = writer.model.in_effect.refused
    return GraphmlFiles(
        target, None if apart is None else data_path(target), nodes, modules, edges, refused
    )


def check_graphml(source: Path, output_path: StrPath | None, parameters: str) -> Path:
    """The path of the GraphML of a model, if one with its weights in this place can be written there."""
    target = check_output_path(
        graphml_path(source) if output_path is None else output_path, suffix=".graphml"
    )
    for path in (source, target):
        if plain(path.name) != path.name:
            raise ArgumentError(
                f"XML cannot hold the name {plain(path.name)!r}", hint="rename the file"
            )
    if source.resolve() in (target.resolve(), data_path(target).resolve()):
        raise ArgumentError(f"{source} is the model itself", hint="choose another output")
    check_mode(parameters)
    if parameters == "reference" and not (
        _beside(source, target) and _beside(source, source.resolve())
    ):
        raise ArgumentError(
            f"{target} is not beside {source.name} itself, whose weights it would refer to",
            hint="write it into the model's folder, or choose sidecar or embedded",
        )
    return target


def check_mode(parameters: str) -> None:
    """Raise for a place of weights that nobody knows."""
    if parameters not in MODES:
        raise ArgumentError(
            f"there is no parameter mode {parameters!r}", hint=f"known: {', '.join(MODES)}"
        )


def _beside(first: Path, second: Path) -> bool:
    return first.parent.resolve() == second.parent.resolve()


class _Writer:
    def __init__(
        self,
        model: TaggedModel,
        types: Types,
        exact: ExactForms,
        frame: bytes,
        store: Store,
        file: TextIO,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        self._on_progress = on_progress
        self._done = 0
        self.model = model
        self._exact = exact
        self._frame = frame
        self._store = store
        self._file = file
        graph, proto = model.graph, model.proto
        self._wiring = Wiring(graph, proto)
        self._types = types
        self._modules = model.modules
        self.scene = Scene(self._wiring, model.effective_tags, self._modules)
        self._label = Labels(model, self.scene, self._types)
        self._layout = Layout(self.scene, self._label)
        self._ids: list[str] = ["n"] * len(self.scene.groups)
        self._numbers = [0] * len(self.scene.parents)
        self._operators = len(graph.nodes)
        self._scope = scopes_of(graph)
        self._group_scopes = self.scene.scopes

    def write(self) -> None:
        put = self._file.write
        put("<?xml version='1.0' encoding='UTF-8'?>\n")
        put(f'<graphml xmlns="{GRAPHML}" xmlns:y="{YED}">\n')
        for scope, keys, graphics in (
            ("graph", ON_GRAPH, ""),
            ("node", ON_NODES, "node"),
            ("edge", ON_EDGES, "edge"),
        ):
            for name, kind in keys.items():
                put(
                    f'<key id="{scope[0]}_{name}" for="{scope}" attr.name="{name}" attr.type="{kind}"/>\n'
                )
            if graphics:
                put(
                    f'<key id="{graphics}graphics" for="{graphics}" yfiles.type="{graphics}graphics"/>\n'
                )
        put('<graph id="G" edgedefault="directed">\n')
        put(f'<data key="g_format_version">{FORMAT_VERSION}</data>')
        put(f'<data key="g_source">{escape(plain(self.model.path.name))}</data>\n')
        self._card()
        self._nodes()
        self._edges()
        put("</graph>\n</graphml>\n")

    def _card(self) -> None:
        """What the model says as a whole, on a node of its own: editors keep what is on nodes."""
        proto, scene = self.model.proto, self.scene
        versions = ", ".join(
            f"{plain(domain)} {version}" for domain, version in opset_imports(proto).items()
        )
        lines = [
            self.model.path.name,
            f"IR version {proto.ir_version}, opset {versions}",
            f"{plural(len(self.model.graph.nodes), 'node')}, {plural(len(scene.sources), 'edge')}",
        ]
        label = "\n".join(shortened(plain(line)) for line in lines)
        width, height = text_size(label)
        sheet = self._layout.open_box(SHEET)
        told = {
            "kind": MODEL,
            "name": plain(proto.graph.name),
            "format_version": FORMAT_VERSION,
            "operators": str(len(self.model.graph.nodes)),
            "topology": structure_digest(self.model.graph),
            "parameters": msgspec.json.encode(self._parameters()).decode(),
        }
        self._file.write('<node id="n0">')
        self._told(told)
        self._payload(Exact(self._frame, []))
        box = (sheet.x, sheet.y - height - 40, width, height)
        self._file.write(f'<data key="nodegraphics">{yed.shape(box, MODEL, label)}</data></node>\n')

    def _parameters(self) -> dict[str, str | int | None]:
        weights = sum(terminal.kind in WEIGHTS for terminal in self._wiring.terminals)
        return {"mode": self._store.mode, "file": self._store.name, "weights": weights}

    def _nodes(self) -> None:
        """Everything on the sheet behind the card, groups with what is in them."""
        first = iter(enumerate(self.scene.groups[SHEET].members, 1))
        waiting: list[tuple[str, Iterator[tuple[int, int]]]] = [("n", first)]
        put = self._file.write
        while waiting:
            prefix, members = waiting[-1]
            number, member = next(members, (-1, 0))
            if number < 0:
                waiting.pop()
                if waiting:
                    put("</graph></node>\n")
            elif member >= 0:
                self._numbers[member] = number
                self._leaf(member, f"{prefix}{number}")
            else:
                own = self._ids[~member] = f"{prefix}{number}"
                self._open_group(~member)
                put(f'<graph id="{own}:" edgedefault="directed">\n')
                waiting.append((f"{own}::n", iter(enumerate(self.scene.groups[~member].members))))

    def _count(self) -> None:
        self._done += 1
        if self._on_progress is not None and self._done % _STEP == 0:
            self._on_progress(self._done / (len(self.scene.parents) + len(self.scene.sources)))

    def _leaf(self, element: int, identity: str) -> None:
        self._count()
        put = self._file.write
        put(f'<node id="{identity}">')
        if element < self._operators:
            kind = OPERATOR
            self._operator(element)
        else:
            terminal = self._wiring.terminal(element)
            kind = terminal.kind
            element_type, shape = self._types.get(terminal.key, ("", ""))
            self._told(
                {
                    "kind": kind,
                    "name": plain(terminal.name),
                    "type": element_type,
                    "shape": shape,
                    "scope": terminal.scope,
                    "position": str(terminal.position),
                }
            )
            if kind in WEIGHTS:
                self._payload(self._exact.weight(terminal, self._store))
        graphics = yed.shape(self._layout.box(element), kind, self._label(element))
        put(f'<data key="nodegraphics">{graphics}</data></node>\n')

    def _operator(self, index: int) -> None:
        node, proto, tag = (
            self.model.graph.nodes[index],
            self.model.graph.protos[index],
            self.scene.tags[index],
        )
        told = {
            "kind": OPERATOR,
            "operator": plain(node.op_type),
            "domain": plain(node.domain),
            "name": plain(node.name),
            "execution_order": str(index),
            "scope": self._scope(index),
            "attributes": attributes_text(proto.attribute),
            "outputs": ", ".join(map(self._described, node.outputs)),
        }
        if tag is not None:
            record = self._modules.get(tag.hierarchy_module)
            told |= {
                "tag": plain(tag.hierarchy_path),
                "module_path": plain(tag.hierarchy_module),
                "class": "" if record is None else plain(record.class_),
                "evidence": plain(tag.hierarchy_method),
                "call": "" if tag.hierarchy_call is None else str(tag.hierarchy_call),
            }
        self._told(told)
        self._payload(self._exact.operator(index, proto, self._store))

    def _open_group(self, number: int) -> None:
        group = self.scene.groups[number]
        closed = self._layout.is_closed(number)
        folded = "folder" if closed else "group"
        self._file.write(f'<node id="{self._ids[number]}" yfiles.foldertype="{folded}">')
        if group.element >= 0:
            self._numbers[group.element] = -number
            self._operator(group.element)
        elif group.kind == MODULE:
            record = self._modules.get(group.name)
            told = {"kind": MODULE, "module_path": plain(group.name)}
            if record is not None:
                order = record.execution_order
                told |= {
                    "class": plain(record.class_),
                    "tag": plain(self._carried_tag(group.name)),
                    "execution_order": "" if order is None else str(order),
                    "status": plain(record.status),
                }
            self._told(told)
        else:
            self._told(
                {"kind": group.kind, "name": plain(group.name), "scope": self._group_scopes[number]}
            )
        label = self._label(~number)
        boxes = self._layout.open_box(number), self._layout.closed_box(number)
        graphics = yed.group(boxes, closed, group.kind, group.depth, label, empty=not group.members)
        self._file.write(f'<data key="nodegraphics">{graphics}</data>\n')

    def _carried_tag(self, path: str) -> str:
        """The tag that the nodes of a module carry: its own, or that of the nearest module above that has one."""
        while True:
            record = self._modules.get(path)
            if record is not None and record.tag is not None:
                return record.tag
            if not path:
                return ""
            path = path.rpartition(".")[0]

    def _told(self, told: Mapping[str, str]) -> None:
        """What is known, each under its key."""
        data = [
            f'<data key="n_{name}">{escape(text)}</data>' for name, text in told.items() if text
        ]
        self._file.write("".join(data))

    def _payload(self, exact: Exact) -> None:
        put = self._file.write
        told = ""
        put(f'<data key="n_onnx">{base64.b64encode(exact.message).decode()}</data>')
        if exact.values:
            inside = isinstance(self._store, Embedded)
            put('<data key="n_bytes">' if inside else "")
            stored = [self._store.put(at, field, values, put) for at, field, values in exact.values]
            put("</data>" if inside else "")
            told = msgspec.json.encode(stored).decode()
            put(f'<data key="n_values">{escape(told)}</data>')
        put(f'<data key="n_check">{part_check(exact.message, told)}</data>')

    def _edges(self) -> None:
        put, scene, nodes = self._file.write, self.scene, self.model.graph.nodes
        for number in range(len(scene.sources)):
            self._count()
            source, target, output = (
                scene.sources[number],
                scene.targets[number],
                scene.outputs[number],
            )
            if source >= self._operators:
                key = self._wiring.terminal(source).key
                name = self._wiring.terminal(source).name
            else:
                key = name = self._key(source, output)
                if nodes[source].enclosing >= 0 or nodes[source].function:
                    name = self.model.graph.protos[source].output[output]
            element_type, shape = self._types.get(key, ("", ""))
            told = {
                "tensor": plain(name),
                "type": element_type,
                "shape": shape,
                "source_output": str(output),
                "target_input": str(scene.slots[number]),
            }
            data = "".join(
                f'<data key="e_{name}">{escape(text)}</data>' for name, text in told.items() if text
            )
            put(
                f'<edge id="e{number}" source="{self._identity(source)}" target="{self._identity(target)}">{data}'
                f'<data key="edgegraphics">{yed.edge(shape[1:-1], self._layout.bends(source, target))}</data></edge>\n'
            )

    def _key(self, source: int, output: int) -> str:
        """The key of an operator's output, wherever the operator is."""
        node = self.model.graph.nodes[source]
        return node.outputs[
            filled(self.model.graph.protos[source].output).index(output) if node.gaps else output
        ]

    def _identity(self, element: int) -> str:
        number = self._numbers[element]
        if number < 0:
            return self._ids[-number]
        parent = self.scene.parents[element]
        return f"n{number}" if parent == SHEET else f"{self._ids[parent]}::n{number}"

    def _described(self, key: str) -> str:
        element_type, shape = self._types.get(key, ("", ""))
        return f"{plain(key)}: {element_type}{shape}" if element_type else plain(key)
