"""Applies what an editor changed in the structure: operators and edges removed, added, moved, or saying something else.

An edit that leaves no valid model is refused with its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import flatten, function_key, nested_graphs
from modelexport.graph.order import running_order
from modelexport.graphml.comparison import Comparison
from modelexport.graphml.dialect import INPUT, OUTPUT
from modelexport.graphml.parts import READ_BACK
from modelexport.graphml.read import NodeData, whole_number
from modelexport.graphml.retype import check, defined, infer_types, read_by
from modelexport.graphml.views import EditError, edited_attributes, plain
from modelexport.graphml.wiring import Wire, body_scope, filled, function_scope, scopes_of

_UNDO = "undo the change, or write the GraphML again"
_MOST_OUTPUTS = 256
_OPTION = onnx.defs.OpSchema.FormalParameterOption

Graphish = onnx.GraphProto | onnx.FunctionProto


def applied(comparison: Comparison) -> tuple[str, ...]:
    """Make the changes of a picture in the model that is written; returns what was changed, in words."""
    editor = _Editor(comparison)
    editor.edit_operators()
    editor.add_operators()
    editor.connect()
    editor.remove_ends()
    editor.sort()
    editor.keep_output_names()
    if not editor.changes:
        if comparison.is_recorded():
            return ()
        raise FormatError("the operators are not those that were recorded", hint=_UNDO)
    infer_types(
        editor.model, comparison.assembly, editor.changed_tensors(), editor.changed_functions()
    )
    check(editor.model, comparison.assembly)
    comparison.assembly.replace(editor.model)
    return tuple(editor.changes)


class _Editor:
    """Elements go by their numbers in the wiring; new operators by numbers behind those."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._parts = comparison.parts
        self._wiring = comparison.wiring
        self.model = comparison.assembly.model(with_nodes=True)
        graph = flatten(self.model)
        self._operators = len(graph.nodes)
        self._elements = dict(comparison.elements)
        self._protos = dict(enumerate(graph.protos))
        scope_of = scopes_of(graph)
        self._scopes = {index: scope_of(index) for index in range(self._operators)}
        self._graphs: dict[str, Graphish] = {"": self.model.graph}
        self._inside: dict[str, int] = {}  # the operator that a body is in
        for index in graph.bodies:
            for place, (_, nested) in enumerate(nested_graphs(graph.protos[index].attribute)):
                scope = body_scope(index, place)
                self._graphs[scope] = nested
                self._inside[scope] = index
        self._functions = {
            function_scope(place): function for place, function in enumerate(self.model.functions)
        }
        self._graphs |= self._functions
        orders = comparison.assembly.orders
        self._places = {
            index: self._parts.operators[order].place for index, order in enumerate(orders)
        }
        self._versions = {
            entry.domain or "ai.onnx": entry.version for entry in self.model.opset_import
        }
        self._names = set[str]().union(*map(defined, self._graphs.values()))
        self._node_names: Counter[str] = Counter()
        self._touched: set[int] = set()
        self._left: frozenset[int] = frozenset()
        self._led_out: dict[int, tuple[str, str]] = {}
        self._renamed: dict[str, str] = {}
        self.changes: list[str] = []
        self._count_removed(
            "operator", whole_number(self._parts.card.told.get("operators", "")) - len(orders)
        )
        self._count_removed("weight", self._parts.parameters.weights - len(self._parts.weights))

    def _count_removed(self, what: str, count: int) -> None:
        if count > 0:
            self.changes.append(f"{count} {what}{'s' if count > 1 else ''} removed")

    def _refuse(self, place: str, why: str) -> FormatError:
        return FormatError(f"{place}: {why}", hint=_UNDO)

    def edit_operators(self) -> None:
        """What operators say of themselves."""
        for number, element in self._elements.items():
            if element >= self._operators:
                terminal, told = self._wiring.terminal(element), self._parts.told_names[number]
                if told and told != plain(terminal.name):
                    raise self._refuse(
                        f"{terminal.kind} {plain(terminal.name)!r}",
                        "its name cannot be changed here",
                    )
        for index, order in enumerate(self._comparison.assembly.orders):
            edits = self._parts.operators[order].edits
            if edits:
                place = self._places[index]
                self._say(self._protos[index], edits, place)
                if set(edits) != {"name"}:
                    self._touched.add(index)
                self.changes.append(f"{place}: {', '.join(edits)} changed")
        self._node_names = Counter(node.name for node in self._protos.values() if node.name)
        for index, order in enumerate(self._comparison.assembly.orders):
            edits = self._parts.operators[order].edits
            if edits and self._node_names[edits.get("name", "")] > 1:
                raise self._refuse(
                    self._places[index], f"another node is called {edits['name']!r} too"
                )

    def _say(self, node: onnx.NodeProto, told: Mapping[str, str], place: str) -> None:
        for key, field in (("operator", "op_type"), ("domain", "domain"), ("name", "name")):
            if key in told and getattr(node, field) != told[key]:
                setattr(node, field, told[key])
        if not node.op_type:
            raise self._refuse(place, "it does not say which operator it is")
        if "attributes" in told:
            try:
                edited_attributes(node, told["attributes"], _kinds(self._schema(node)))
            except EditError as error:
                raise self._refuse(place, str(error)) from error

    def _schema(self, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
        version = self._versions.get(node.domain or "ai.onnx", 0)
        if not version or not onnx.defs.has(node.op_type, version, node.domain):
            return None
        return onnx.defs.get_schema(node.op_type, version, node.domain)

    def add_operators(self) -> None:
        """Nodes that were drawn and say which operator they are."""
        for number, drawn in self._parts.added.items():
            scope = self._comparison.scope(self._parts.scope_around(number))
            if scope not in self._graphs:
                raise self._refuse(drawn.place, "the graph that it was drawn in is not there")
            element = self._operators + len(self._wiring.terminals) + len(self._protos)
            node = self._copied(drawn)
            self._say(node, {key: drawn.told.get(key, "") for key in READ_BACK}, drawn.place)
            node.name = _unused(node.name, self._node_names) if node.name else ""
            self._node_names[node.name] += 1
            self._protos[element] = node
            self._scopes[element] = scope
            self._places[element] = drawn.place
            self._elements[number] = element
            self._touched.add(element)
            self.changes.append(f"{drawn.place}: added")

    def _copied(self, drawn: NodeData) -> onnx.NodeProto:
        """What a new operator was copied from, without its inputs and outputs; an empty one if it was not."""
        node = onnx.NodeProto()
        if "onnx" in drawn.told:
            node.ParseFromString(
                self._comparison.assembly.in_memory(self._parts.copy_of(drawn), onnx.NodeProto())
            )
            del node.input[:], node.output[:]
        return node

    def connect(self) -> None:
        """Inputs as the edges say."""
        self._left = frozenset(self._elements.values())
        drawn: dict[int, list[Wire]] = {}
        edges = self._parts.edges
        notes: dict[int, set[str]] = {}
        for source, output, target, slot in zip(
            edges.sources, edges.outputs, edges.targets, edges.slots, strict=True
        ):
            ends = self._elements.get(source), self._elements.get(target)
            if source in self._parts.notes or target in self._parts.notes:
                self._note_edge(notes, source, target)
            elif ends[0] is None or ends[1] is None:
                where = self._parts.places.get(source if ends[0] is None else target, "a node")
                raise self._refuse(
                    where, "an edge ends here, but it is no operator, input, output or weight"
                )
            else:
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

    def _note_edge(self, notes: dict[int, set[str]], source: int, target: int) -> None:
        """A line to a note means nothing; but what has lines in and out is meant to be an operator."""
        for number, side, other in ((source, "out", target), (target, "in", source)):
            if number in self._parts.notes and other in self._elements:
                notes.setdefault(number, set()).add(side)
                if len(notes[number]) == 2:
                    where = self._parts.places.get(number, "a node")
                    raise self._refuse(
                        where, "edges lead in and out, but its property `operator` is empty"
                    )

    def _targets(self, expected: dict[int, list[Wire]], drawn: dict[int, list[Wire]]) -> list[int]:
        """What takes something else than it did, or has lost what it took."""
        changed = {
            t
            for t in {**expected, **drawn}
            if sorted(expected.get(t, [])) != sorted(drawn.get(t, []))
        }
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
        names = [""] * len(old)
        taken: set[int] = set()
        for wire in sorted(drawn, key=lambda wire: wire.slot < 0):
            slot = wire.slot
            if slot < 0:
                slot = next((free for free in range(len(names)) if free not in taken), len(names))
            if slot in taken:
                raise self._refuse(place, f"two edges lead into its input {slot}")
            if slot > len(names) + len(drawn):
                raise self._refuse(
                    place, f"an edge leads into its input {slot}, which it does not have"
                )
            names += [""] * (slot + 1 - len(names))
            names[slot] = self._tensor(wire, target)
            taken.add(slot)
        names = self._without_gaps(node, names, sorted(set(filled(old)) - taken), place)
        del node.input[:]
        node.input.extend(names)
        self._touched.add(target)
        if target < self._operators and names != old:
            self.changes.append(f"{place}: reads {_listed(names)} instead of {_listed(old)}")

    def _without_gaps(
        self, node: onnx.NodeProto, names: list[str], lost: list[int], place: str
    ) -> list[str]:
        """Inputs that were lost: refused where the operator needs them, closed up where it takes any number."""
        schema = self._schema(node)
        formal = [] if schema is None else schema.inputs
        for slot in lost:
            if slot < len(formal) and formal[slot].option == _OPTION.Single:
                raise self._refuse(
                    place,
                    f"nothing leads into its input {slot} any more, and {node.op_type} needs it",
                )
        if formal and formal[-1].option == _OPTION.Variadic:
            first = len(formal) - 1
            names = [*names[:first], *filter(None, names[first:])]
        while names and not names[-1]:
            names.pop()
        return names

    def _tensor(self, wire: Wire, target: int) -> str:
        """The name of the tensor that an edge stands for."""
        scope = (
            self._scopes[target] if target in self._scopes else self._wiring.terminal(target).scope
        )
        if wire.source not in self._protos:
            terminal = self._wiring.terminal(wire.source)
            place = f"{terminal.kind} {plain(terminal.name)!r}"
            if terminal.kind == OUTPUT:
                raise self._refuse(place, "an edge comes from it, but it gives nothing")
            name, home = terminal.name, terminal.scope
        else:
            place, home = self._places[wire.source], self._scopes[wire.source]
            name = self._output(wire, place)
        self._check_visible(name, home, scope, place)
        return name

    def _output(self, wire: Wire, place: str) -> str:
        node = self._protos[wire.source]
        if wire.source >= self._operators:
            return self._new_output(node, max(wire.output, 0), place)
        if 0 <= wire.output < len(node.output) and node.output[wire.output]:
            return str(node.output[wire.output])
        outputs = filled(node.output)
        if len(outputs) != 1:
            raise self._refuse(
                place, "an edge comes from it that does not say from which of its outputs"
            )
        return str(node.output[outputs[0]])

    def _check_visible(self, name: str, home: str, scope: str, place: str) -> None:
        """A body sees what is around it, unless something of its own has the same name."""
        around = list(self._outwards(scope))
        if home not in around:
            raise self._refuse(
                place, "an edge crosses the border of a body or function that it cannot cross"
            )
        if any(name in defined(self._graphs[inner]) for inner in around[: around.index(home)]):
            raise self._refuse(place, f"an edge leads to where {plain(name)!r} is something else")

    def _new_output(self, node: onnx.NodeProto, place: int, where: str) -> str:
        """An output of a new operator; an edge that comes from elsewhere may have another place in mind."""
        schema = self._schema(node)
        if place >= (_MOST_OUTPUTS if schema is None else min(schema.max_output, _MOST_OUTPUTS)):
            place = 0
        if schema is not None and schema.max_output == 0:
            raise self._refuse(where, "an edge comes from it, but it gives nothing")
        while len(node.output) <= place:
            name = _unused(f"{node.name or node.op_type}_output_{len(node.output)}", self._names)
            self._names.add(name)
            node.output.append(name)
        return str(node.output[place])

    def _lead_out(self, target: int, drawn: list[Wire]) -> None:
        terminal = self._wiring.terminal(target)
        place = f"output {plain(terminal.name)!r}"
        if target not in self._left:
            return
        if len(drawn) != 1:
            raise self._refuse(
                place, "it needs one edge that leads to it" + (", and has several" if drawn else "")
            )
        name = self._tensor(drawn[0], target)
        graph = self._graphs[terminal.scope]
        if isinstance(graph, onnx.FunctionProto):
            graph.output[terminal.position] = name
        else:
            graph.output[terminal.position].name = name
        self._led_out[target] = (terminal.name, name)
        self.changes.append(f"{place}: comes from {plain(name)!r} now")

    def remove_ends(self) -> None:
        """Inputs and outputs whose nodes were removed."""
        gone = [
            terminal
            for element, terminal in enumerate(self._wiring.terminals, self._operators)
            if element not in self._left and terminal.kind in (INPUT, OUTPUT)
        ]
        for terminal in sorted(gone, key=lambda terminal: -terminal.position):
            place = f"{terminal.kind} {plain(terminal.name)!r}"
            if terminal.scope and not self._is_gone(terminal.scope):
                raise self._refuse(
                    place, "an input or output of a body or function cannot be removed"
                )
            graph = self._graphs[terminal.scope]
            del (graph.input if terminal.kind == INPUT else graph.output)[terminal.position]
            self.changes.append(f"{place}: removed")
        if not self.model.graph.output and any(
            terminal.kind == OUTPUT and not terminal.scope for terminal in gone
        ):
            raise self._refuse("the model", "all its outputs are removed")
        for scope in [scope for scope in self._functions if self._is_gone(scope)]:
            self._remove_function(scope)

    def _is_gone(self, scope: str) -> bool:
        """Whether nothing is left of a function."""
        ends = (
            e for e, t in enumerate(self._wiring.terminals, self._operators) if t.scope == scope
        )
        return (
            scope in self._functions
            and not self._functions[scope].node
            and self._left.isdisjoint(ends)
        )

    def _remove_function(self, scope: str) -> None:
        key = _key(self._functions[scope])
        for element, node in self._protos.items():
            if function_key(node.domain, node.op_type, node.overload) == key:
                raise self._refuse(
                    self._places[element], f"it calls the function {plain(key)}, which is removed"
                )
        self.model.functions.remove(self._functions.pop(scope))
        self.changes.append(f"function {plain(key)}: removed")

    def keep_output_names(self) -> None:
        """Outputs of the model keep their names: what leads to one now is called so, what did before otherwise."""
        main = self.model.graph
        led = {
            old: new
            for target, (old, new) in self._led_out.items()
            if not self._wiring.terminal(target).scope
        }
        made = {name for node in main.node for name in node.output if name}
        kept = [
            terminal.name
            for element, terminal in enumerate(self._wiring.terminals, self._operators)
            if terminal.kind == OUTPUT
            and not terminal.scope
            and element in self._left
            and element not in self._led_out
        ]
        names = {name: name for name in kept}
        for old, new in led.items():
            if new not in made:
                raise self._refuse(
                    f"output {plain(old)!r}", "an input or weight leads straight to it"
                )
            if new in names:
                raise self._refuse(
                    f"output {plain(old)!r}",
                    f"what leads to it is output {plain(names[new])!r} already",
                )
            names[new] = old
        for old in led:
            if old in made and old not in names:
                names[old] = _unused(f"{old}_before", self._names)
                self._names.add(names[old])
        self._renamed = {old: new for old, new in names.items() if old != new}
        _rename(main, self._renamed)

    def sort(self) -> None:
        """New operators into their graphs, and every graph that changed into an order in which it can run."""
        depth = {scope: len(list(self._outwards(scope))) for scope in self._changed_scopes()}
        for scope in sorted(
            depth, key=depth.__getitem__, reverse=True
        ):  # a body before what it is copied with
            graph = self._graphs[scope]
            added = [
                node
                for element, node in self._protos.items()
                if element >= self._operators and self._scopes[element] == scope
            ]
            nodes = [*graph.node, *added]
            for node in added:
                schema = self._schema(node)
                if schema is not None and schema.min_output > len(node.output):
                    self._new_output(node, schema.min_output - 1, node.op_type)
            ordered = self._in_order(nodes)
            if added or ordered is not nodes:
                copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered]
                del graph.node[:]
                graph.node.extend(copies)

    def _in_order(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """An order in which every node comes after what it reads, as near to the present one as can be."""
        producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        reads = [{producer[name] for name in read_by(node) if name in producer} for node in nodes]
        if all(earlier < index for index, sources in enumerate(reads) for earlier in sources):
            return nodes
        readers: list[list[int]] = [[] for _ in nodes]
        for index, sources in enumerate(reads):
            for earlier in sources:
                readers[earlier].append(index)
        order = running_order(readers, range(len(nodes)))
        done: set[int] = set()
        for index in order:
            if not reads[index] <= done:
                name = plain(nodes[index].name or nodes[index].op_type)
                raise self._refuse(name, "it waits for its own result: the edges go round")
            done.add(index)
        return [nodes[index] for index in order]

    def changed_tensors(self) -> set[str]:
        """The tensors of the main graph that may be something else now, those behind them not counted."""
        names = {
            new
            for target, (_, new) in self._led_out.items()
            if not self._wiring.terminal(target).scope
        }
        for element in self._touched:
            names.update(filter(None, self._protos[element].output))
        for scope in self._changed_scopes():
            if scope in self._inside:  # a change in a body changes what its operator gives
                names.update(filter(None, self._protos[self._inside[scope]].output))
        return {self._renamed.get(name, name) for name in names}

    def changed_functions(self) -> set[str]:
        """The functions that do something else now."""
        changed = self._changed_scopes()
        return {_key(function) for scope, function in self._functions.items() if scope in changed}

    def _changed_scopes(self) -> set[str]:
        """The graphs that something changed in, and those around them."""
        touched = {self._scopes[element] for element in self._touched}
        touched |= {self._wiring.terminal(target).scope for target in self._led_out}
        return {outer for scope in touched for outer in self._outwards(scope)}

    def _outwards(self, scope: str) -> Iterator[str]:
        """A graph, the one that its operator is in, and so on."""
        yield scope
        while scope in self._inside:
            scope = self._scopes[self._inside[scope]]
            yield scope


def _kinds(schema: Any) -> dict[str, int]:
    """The kinds of the attributes that an operator may have."""
    return (
        {}
        if schema is None
        else {name: int(attribute.type) for name, attribute in schema.attributes.items()}
    )


def _key(function: onnx.FunctionProto) -> str:
    return function_key(function.domain, function.name, function.overload)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Tensors by other names, wherever they are read."""
    for node in graph.node:
        for field in (node.input, node.output):
            for place, name in enumerate(field):
                if name in names:
                    field[place] = names[name]
        for _, nested in nested_graphs(node.attribute):
            own = defined(nested)
            _rename(nested, {old: new for old, new in names.items() if old not in own})
    for value in (*graph.value_info, *graph.output):
        value.name = names.get(value.name, value.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = names.get(entry.value, entry.value)


def _unused(name: str, names: Container[str]) -> str:
    """The name, or one like it that nothing has."""
    number, found = 1, name
    while found in names:
        found, number = f"{name}_{number}", number + 1
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(plain(name) or "nothing" for name in names) or "nothing"
