"""Applies what an editor changed in the structure: operators and edges removed, added, moved, or saying something else.

An edit that leaves no valid model is refused with its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import onnx

from modelexport.errors import FormatError, first_line
from modelexport.graph import flatten, function_key, nested_graphs
from modelexport.graphml.assembly import Assembly, Comparison, in_bytes
from modelexport.graphml.dialect import INPUT, OUTPUT
from modelexport.graphml.views import EditError, edited_attributes, plain
from modelexport.graphml.wiring import Wire, body_scope, filled, scope_of

_SMALL = 2048
_UNDO = "undo the change, or write the GraphML again"

Graphish = onnx.GraphProto | onnx.FunctionProto


def applied(comparison: Comparison) -> tuple[str, ...]:
    """Make the changes of a picture in the model that is written; returns what was changed, in words."""
    editor = _Editor(comparison)
    editor.edit_operators()
    editor.add_operators()
    editor.connect()
    editor.remove_ends()
    editor.sort()
    editor.infer_types()
    if not editor.changes:
        raise FormatError(f"{comparison.parts.path}: the operators are not those that were recorded", hint=_UNDO)
    _check(editor.model, comparison.assembly)
    comparison.assembly.replace(editor.model)
    return tuple(editor.changes)


class _Editor:
    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._parts = comparison.parts
        self._wiring = comparison.wiring
        self.model = comparison.assembly.model(with_nodes=True)
        self.graph = flatten(self.model)
        self._operators = len(self.graph.nodes)
        self._elements = dict(comparison.elements)
        self._protos = dict(enumerate(self.graph.protos))
        self._scopes = {index: plain(scope_of(self.graph, index)) for index in range(self._operators)}
        self._graphs: dict[str, Graphish] = {"": self.model.graph}
        self._around: dict[str, str] = {}
        for index in self.graph.bodies:
            for label, nested in nested_graphs(self.graph.protos[index].attribute):
                scope = plain(body_scope(index, label))
                self._graphs[scope] = nested
                self._around[scope] = self._scopes[index]
        self._graphs |= {plain(function_key(f.domain, f.name)): f for f in self.model.functions}
        orders = comparison.assembly.orders
        parts = self._parts
        self._places = {index: parts.operators[order].place for index, order in enumerate(orders)}
        self._touched: set[int] = set()
        self._names = _all_names(self.model)
        self.changes: list[str] = []
        removed = _recorded(parts.card.told.get("operators", "")) - len(orders)
        if removed > 0:
            self.changes.append(f"{removed} operator{'s' if removed > 1 else ''} removed")
        removed = parts.parameters.weights - len(parts.weights)
        if removed > 0:
            self.changes.append(f"{removed} weight{'s' if removed > 1 else ''} removed")

    def _refuse(self, place: str, why: str) -> FormatError:
        return FormatError(f"{self._parts.path}: {place}: {why}", hint=_UNDO)

    def edit_operators(self) -> None:
        """What operators say of themselves."""
        for number, element in self._elements.items():
            if element >= self._operators:
                terminal, told = self._wiring.terminal(element), self._parts.told_names[number]
                if told and told != plain(terminal.name):
                    raise self._refuse(f"{terminal.kind} {plain(terminal.name)!r}", "its name cannot be changed here")
        for index, order in enumerate(self._comparison.assembly.orders):
            edits = self._parts.operators[order].edits
            if edits:
                self._say(self._protos[index], edits, self._places[index])
                self._touched.add(index)
                self.changes.append(f"{self._places[index]}: {', '.join(edits)} changed")

    def _say(self, node: onnx.NodeProto, told: dict[str, str], place: str) -> None:
        for key, field in (("operator", "op_type"), ("domain", "domain"), ("name", "name")):
            if key in told:
                setattr(node, field, told[key])
        if "attributes" in told:
            try:
                edited_attributes(node, told["attributes"])
            except EditError as error:
                raise self._refuse(place, str(error)) from error

    def add_operators(self) -> None:
        """Nodes that were drawn and say which operator they are."""
        for number, drawn in self._parts.added.items():
            scope = self._comparison.scope(self._parts.scope_around(number))
            if scope not in self._graphs:
                raise self._refuse(drawn.place, "the graph that it was drawn in is not there")
            element = self._operators + len(self._wiring.terminals) + len(self._protos)
            node = onnx.NodeProto()
            self._say(node, drawn.told, drawn.place)
            self._protos[element] = node
            self._scopes[element] = scope
            self._places[element] = drawn.place
            self._elements[number] = element
            self._touched.add(element)
            self.changes.append(f"{drawn.place}: added")

    def connect(self) -> None:
        """Inputs as the edges say."""
        drawn: dict[int, list[Wire]] = {}
        edges = self._parts.edges
        for source, output, target, slot in zip(edges.sources, edges.outputs, edges.targets, edges.slots, strict=True):
            ends = [self._elements.get(number) for number in (source, target)]
            for number, end in zip((source, target), ends, strict=True):
                if end is None:
                    where = self._parts.places.get(number, "a node")
                    raise self._refuse(where, "an edge ends here, but it is no operator, input, output or weight")
            assert ends[0] is not None
            assert ends[1] is not None
            drawn.setdefault(ends[1], []).append(Wire(ends[0], output, ends[1], slot))
        expected: dict[int, list[Wire]] = {}
        for wire in self._wiring.wires():
            expected.setdefault(wire.target, []).append(wire)
        for target in self._targets(expected, drawn):
            now = drawn.get(target, [])
            if target in self._protos:
                self._reconnect(target, now)
            elif self._wiring.terminal(target).kind == OUTPUT:
                self._lead_out(target, now)
            else:
                name = plain(self._wiring.terminal(target).name)
                raise self._refuse(name, "an edge leads into it, but it takes nothing")

    def _targets(self, expected: dict[int, list[Wire]], drawn: dict[int, list[Wire]]) -> list[int]:
        """What takes something else than it did, or has lost what it took."""
        changed = {t for t in {**expected, **drawn} if sorted(expected.get(t, [])) != sorted(drawn.get(t, []))}
        for index in range(self._operators):
            if len(filled(self._protos[index].input)) != len(expected.get(index, [])):
                changed.add(index)
        for element, terminal in enumerate(self._wiring.terminals, self._operators):
            if terminal.kind == OUTPUT and element not in expected:
                changed.add(element)
        return sorted(changed)

    def _reconnect(self, target: int, drawn: list[Wire]) -> None:
        node, place = self._protos[target], self._places[target]
        old = list(node.input)
        before = set(filled(old))
        names = [""] * len(old)
        taken: set[int] = set()
        for wire in sorted(drawn, key=lambda wire: wire.slot < 0):
            slot = wire.slot
            if slot < 0:
                slot = next((free for free in range(len(names)) if not names[free] and free not in taken), len(names))
            if slot in taken:
                raise self._refuse(place, f"two edges lead into its input {slot}")
            if slot > len(names) + len(drawn):
                raise self._refuse(place, f"an edge leads into its input {slot}, which it does not have")
            names += [""] * (slot + 1 - len(names))
            names[slot] = self._tensor(wire, target)
            taken.add(slot)
        for slot in sorted(before - taken):
            if self._is_required(node, slot):
                raise self._refuse(place, f"nothing leads into its input {slot} any more, and {node.op_type} needs it")
        while names and not names[-1]:
            names.pop()
        del node.input[:]
        node.input.extend(names)
        self._touched.add(target)
        if target < self._operators:
            self.changes.append(f"{place}: reads {_listed(names)} instead of {_listed(old)}")

    def _is_required(self, node: onnx.NodeProto, slot: int) -> bool:
        versions = {entry.domain: entry.version for entry in self.model.opset_import}
        version = versions.get(node.domain, versions.get("ai.onnx", 0) if not node.domain else 0)
        if not version or not onnx.defs.has(node.op_type, version, node.domain):
            return False
        formal = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
        return slot < len(formal) and formal[slot].option == onnx.defs.OpSchema.FormalParameterOption.Single

    def _tensor(self, wire: Wire, target: int) -> str:
        """The name of the tensor that an edge stands for."""
        scope = self._scopes[target] if target in self._scopes else plain(self._wiring.terminal(target).scope)
        if wire.source not in self._protos:
            terminal = self._wiring.terminal(wire.source)
            if terminal.kind == OUTPUT:
                raise self._refuse(f"output {plain(terminal.name)!r}", "an edge comes from it, but it gives nothing")
            self._check_visible(plain(terminal.scope), scope, plain(terminal.name))
            return str(terminal.name)
        node, place = self._protos[wire.source], self._places[wire.source]
        self._check_visible(self._scopes[wire.source], scope, place)
        if wire.source >= self._operators:
            return self._new_output(node, max(wire.output, 0))
        if 0 <= wire.output < len(node.output) and node.output[wire.output]:
            return str(node.output[wire.output])
        outputs = filled(node.output)
        if len(outputs) != 1:
            raise self._refuse(place, "an edge comes from it that does not say from which of its outputs")
        return str(node.output[outputs[0]])

    def _check_visible(self, inner: str, scope: str | None, place: str) -> None:
        while scope is not None:
            if scope == inner:
                return
            scope = self._around.get(scope)
        raise self._refuse(place, "an edge leads out of the body or function that it is in")

    def _new_output(self, node: onnx.NodeProto, place: int) -> str:
        if place > 255:
            raise self._refuse(node.op_type, f"an edge comes from its output {place}")
        while len(node.output) <= place:
            name = base = f"{node.name or node.op_type}_output_{len(node.output)}"
            number = 1
            while name in self._names:
                name, number = f"{base}_{number}", number + 1
            self._names.add(name)
            node.output.append(name)
        return str(node.output[place])

    def _lead_out(self, target: int, drawn: list[Wire]) -> None:
        terminal = self._wiring.terminal(target)
        place = f"output {plain(terminal.name)!r}"
        if target not in self._elements.values():
            return
        if len(drawn) != 1:
            raise self._refuse(place, "it needs one edge that leads to it" + (", and has several" if drawn else ""))
        name = self._tensor(drawn[0], target)
        graph = self._graphs[plain(terminal.scope)]
        if isinstance(graph, onnx.FunctionProto):
            graph.output[terminal.position] = name
        else:
            graph.output[terminal.position].name = name
            known = {value.name: value for value in (*graph.value_info, *graph.input)}
            if name in known:
                graph.output[terminal.position].type.CopyFrom(known[name].type)
        self.changes.append(f"{place}: is {name!r} now")

    def remove_ends(self) -> None:
        """Inputs and outputs whose nodes were removed."""
        left = set(self._elements.values())
        gone = [
            terminal
            for element, terminal in enumerate(self._wiring.terminals, self._operators)
            if element not in left and terminal.kind in (INPUT, OUTPUT)
        ]
        for terminal in sorted(gone, key=lambda terminal: -terminal.position):
            graph = self._graphs[plain(terminal.scope)]
            del (graph.input if terminal.kind == INPUT else graph.output)[terminal.position]
            self.changes.append(f"{terminal.kind} {plain(terminal.name)!r}: removed")

    def sort(self) -> None:
        """New operators into their graphs, and every graph that changed into an order in which it can run."""
        scopes = {self._scopes[element] for element in self._touched}
        for scope in sorted(scopes, key=self._depth, reverse=True):  # a body before the operator that it is copied with
            graph = self._graphs[scope]
            nodes = list(graph.node) + [
                node
                for element, node in self._protos.items()
                if element >= self._operators and self._scopes[element] == scope
            ]
            ordered = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self._in_order(nodes)]
            del graph.node[:]
            graph.node.extend(ordered)

    def _depth(self, scope: str) -> int:
        depth = 0
        while scope in self._around:
            scope, depth = self._around[scope], depth + 1
        return depth

    def _in_order(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """An order in which every node comes after what it reads, as near to the present one as can be."""
        producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        reads = [{producer[name] for name in _read_by(node) if name in producer} for node in nodes]
        if all(earlier < index for index, sources in enumerate(reads) for earlier in sources):
            return nodes
        readers: list[list[int]] = [[] for _ in nodes]
        for index, sources in enumerate(reads):
            for earlier in sources:
                readers[earlier].append(index)
        waits = [len(sources) for sources in reads]
        ready = [index for index, count in enumerate(waits) if not count]
        heapify(ready)
        ordered = []
        while ready:
            index = heappop(ready)
            ordered.append(nodes[index])
            for reader in readers[index]:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(ready, reader)
        if len(ordered) < len(nodes):
            stuck = next(nodes[index] for index, count in enumerate(waits) if count)
            raise self._refuse(plain(stuck.name or stuck.op_type), "it waits for its own result: the edges go round")
        return ordered

    def infer_types(self) -> None:
        """Types that were recorded of tensors behind a change may be wrong now: they are what ONNX infers, or gone."""
        changed = {name for element in self._touched for name in self._protos[element].output if name}
        main = self.model.graph
        for node in main.node:
            if not changed.isdisjoint(node.output) or not changed.isdisjoint(_read_by(node)):
                changed.update(filter(None, node.output))
                for _, nested in nested_graphs(node.attribute):
                    _forget_types(nested)
        made = {name for node in main.node for name in node.output} | {value.name for value in main.input}
        inferred = _inferred(self.model, self._comparison.assembly, changed)
        kept: list[onnx.ValueInfoProto] = []
        for value in main.value_info:
            found = inferred.get(value.name) if value.name in changed else value
            if value.name in made and found is not None:
                kept.append(onnx.ValueInfoProto.FromString(found.SerializeToString()))
        del main.value_info[:]
        main.value_info.extend(kept)
        for value in main.output:
            if value.name in changed and value.name in inferred:
                value.type.CopyFrom(inferred[value.name].type)


def _inferred(model: onnx.ModelProto, assembly: Assembly, changed: set[str]) -> dict[str, onnx.ValueInfoProto]:
    """What ONNX infers of these tensors."""
    copy = _checkable(model, assembly)
    kept = [value for value in copy.graph.value_info if value.name not in changed]
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept]
    del copy.graph.value_info[:]
    copy.graph.value_info.extend(kept)
    for value in copy.graph.output:
        if value.name in changed:
            value.ClearField("type")
    try:
        found = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
    except Exception:  # inference raises several unrelated kinds; the check says what is wrong
        return {}
    return {
        value.name: value
        for value in (*found.value_info, *found.output)
        if value.name in changed and _is_known(value.type)
    }


def _is_known(declared: onnx.TypeProto) -> bool:
    kind = declared.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or declared.tensor_type.HasField("shape"))


def _forget_types(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for node in graph.node:
        for _, nested in nested_graphs(node.attribute):
            _forget_types(nested)


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those that its bodies take from around it included."""
    yield from node.input
    for _, graph in nested_graphs(node.attribute):
        for inner in graph.node:
            yield from _read_by(inner)
        yield from (value.name for value in graph.output)


def _all_names(model: onnx.ModelProto) -> set[str]:
    names = {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.input}
    waiting: list[Iterable[onnx.NodeProto]] = [model.graph.node, *(function.node for function in model.functions)]
    for nodes in waiting:
        for node in nodes:
            names.update(node.output)
            waiting += [graph.node for _, graph in nested_graphs(node.attribute)]
    return names


def _recorded(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _listed(names: list[str]) -> str:
    return ", ".join(plain(name) or "nothing" for name in names) or "nothing"


def _checkable(model: onnx.ModelProto, assembly: Assembly) -> onnx.ModelProto:
    """The model with its small weights; those that are too large to look at stand in as inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {value.name for value in copy.graph.input}
    del copy.graph.initializer[:]
    for head, pieces in zip(model.graph.initializer, assembly.initializers, strict=True):
        if sum(map(len, pieces)) <= _SMALL and not head.data_location:
            copy.graph.initializer.add().ParseFromString(b"".join(in_bytes(pieces)))
        elif head.name not in known:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(head.name, head.data_type, list(head.dims)))
    return copy


def _check(model: onnx.ModelProto, assembly: Assembly) -> None:
    try:
        onnx.checker.check_model(_checkable(model, assembly), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated kinds
        told = [line.strip() for line in str(error).splitlines() if line.strip()]
        context = next((line.removeprefix("==> Context: ") for line in told if line.startswith("==> Context")), "")
        why = first_line(error) + (f" ({context})" if context else "")
        raise FormatError(f"the edited model is not valid: {why}", hint=_UNDO) from error
