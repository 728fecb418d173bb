"""The data of the page: the graph and the map of one model, as columns of numbers and texts.

`docs/formats.md` describes each column; `viewer/src/data.ts` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from modelexport.graph.flat import Graph, as_text
from modelexport.graphml.text import Types, attributes_text
from modelexport.modules.record import ModuleRecord, NodeTag
from modelexport.onnx_file.model_file import opset_imports
from modelexport.tagged.model import TaggedModel
from modelexport.viewing.boxes import Boxes

_LONGEST_TEXT = 400
_MOST_VALUES = 4
"""Longer attributes are cut, and larger tensors described: the file has the values."""

_KINDS = ("module", "subgraph", "function")


class Texts:
    """A table of texts, in which each is stored once and referred to by its index."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """Return the index of a text; add it if it is new."""
        index = self.indices.get(text)
        if index is None:
            index = self.indices[text] = len(self.indices)
        return index


def page_data(
    model: TaggedModel, types: Types, marks: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the data of one model, to be written as JSON.

    Args:
        model: The model, with tags or without.
        types: The types of its values.
        marks: What differs from another file: `added`, `removed` or `changed`, by node key.
    """
    graph, tags = model.graph, model.effective_tags
    texts = Texts()
    modules = _Modules(model.modules, tags)
    boxes = Boxes(graph, tags, model.modules)
    values = _Values(graph, types, texts)
    result = {
        "file": model.path.name,
        "facts": _facts(model),
        "modules": modules.columns(texts),
        "boxes": {
            "parent": _deltas(box.parent for box in boxes.boxes),
            "module": _deltas(modules.index(box.module) for box in boxes.boxes),
            "call": [-1 if box.call is None else box.call for box in boxes.boxes],
            "kind": [_KINDS.index(box.kind) for box in boxes.boxes],
            "node": [box.node for box in boxes.boxes],
            "label": [texts.add(box.label) for box in boxes.boxes],
        },
        "nodes": _nodes(model, boxes.of_node, modules, values, texts),
        "graphs": _graphs(graph, boxes, values),
        "values": values.columns(graph),
        "marks": _marks(graph, marks or {}),
    }
    return result | {"texts": list(texts.indices)}


def _deltas(numbers: Iterable[int]) -> list[int]:
    """Write numbers as differences from the one before, which compresses well."""
    result, last = [], 0
    for number in numbers:
        result.append(number - last)
        last = number
    return result


def _facts(model: TaggedModel) -> dict[str, str]:
    """Return what the page says of the file as a whole."""
    records = model.records
    opsets = opset_imports(model.proto)
    facts = {
        "operator sets": ", ".join(f"{name or 'ai.onnx'} {n}" for name, n in opsets.items()),
        "IR version": str(model.proto.ir_version),
        "nodes": f"{len(model.graph.nodes):,}",
    }
    if records is not None:
        facts = {
            "class": records.model.class_,
            "strategy": records.export.strategy,
            "exporter": records.export.exporter,
            **facts,
            "modules": f"{len(records.modules):,}",
        }
    return facts


class _Modules:
    """The modules in the order in which they run, parents before their children.

    Those that only tags name are among them.
    """

    def __init__(self, records: Mapping[str, ModuleRecord], tags: Sequence[NodeTag | None]) -> None:
        self._records = records
        children: dict[str, list[str]] = {}
        named = {tag.hierarchy_module: None for tag in tags if tag is not None}
        for path in (*records, *named):
            while path not in children:
                children[path] = []
                path = path.rpartition(".")[0]
        for path in filter(None, children):
            children[path.rpartition(".")[0]].append(path)
        self._indices: dict[str, int] = {}
        first = _first_runs(records, children)
        pending = [""] if children else []
        while pending:
            path = pending.pop()
            self._indices[path] = len(self._indices)
            pending += sorted(children[path], key=lambda each: first[each], reverse=True)

    def index(self, path: str | None) -> int:
        """Return the index of a module, -1 for None."""
        return -1 if path is None else self._indices[path]

    def columns(self, texts: Texts) -> dict[str, list[Any]]:
        """Return the columns of the modules."""
        names = ("parent", "name", "class", "tag", "status", "calls", "parameters", "flops")
        table: dict[str, list[Any]] = {name: [] for name in names}
        for path in self._indices:
            parent, _, name = path.rpartition(".")
            record = self._records.get(path)
            count = None if record is None else record.parameter_count
            flops = None if record is None else record.flops
            row = (
                self._indices[parent] if path else -1,
                texts.add(name),
                texts.add("" if record is None else record.class_),
                texts.add((record.tag if record is not None else None) or ""),
                texts.add("" if record is None else record.status),
                0 if record is None else record.calls,
                None if count is msgspec.UNSET else count,
                None if flops is msgspec.UNSET else flops,
            )
            for column, value in zip(table.values(), row, strict=True):
                column.append(value)
        return table


def _first_runs(
    records: Mapping[str, ModuleRecord], children: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, tuple[int, str]]]:
    """Return, to sort by, when a module or one below it first runs; then its number or name."""
    last = len(records)
    runs: dict[str, tuple[int, tuple[int, str]]] = {}
    for path in sorted(children, key=lambda path: (bool(path), path.count(".")), reverse=True):
        record = records.get(path)
        own = None if record is None else record.execution_order
        inside = min((runs[each][0] for each in children[path]), default=last)
        name = path.rpartition(".")[2]
        number = int(name) if name.isdecimal() and len(name) < 10 else last
        runs[path] = (inside if own is None else min(own, inside), (number, name))
    return runs


class _Values:
    """The values of all graphs by key, numbered as they appear."""

    def __init__(self, graph: Graph, types: Types, texts: Texts) -> None:
        self._types, self._texts = types, texts
        self._indices: dict[str, int] = {}
        self.initializers = self.add_all(graph.initializers)
        self.inputs = self.add_all(graph.inputs)

    def add_all(self, keys: Iterable[str]) -> list[int]:
        """Return the indices of values; add those that are new."""
        indices = self._indices
        return [indices.setdefault(key, len(indices)) for key in keys]

    def columns(self, graph: Graph) -> dict[str, list[Any]]:
        """Return the columns of the values.

        A name that begins with that of the node that produces it is written without it.
        """
        texts, types = self._texts, self._types
        unknown = ("", "")
        names, begins = [], []
        for key in self._indices:
            producer = graph.producer.get(key)
            prefix = "" if producer is None else as_text(graph.nodes[producer].name)
            name = as_text(key)
            is_prefix = bool(prefix) and name.startswith(prefix)
            names.append(name[len(prefix) :] if is_prefix else name)
            begins.append(int(is_prefix))
        return {
            "name": names,
            "begins": begins,
            "type": [texts.add("".join(types.get(key, unknown))) for key in self._indices],
        }


def _nodes(
    model: TaggedModel, of_node: Sequence[int], modules: _Modules, values: _Values, texts: Texts
) -> dict[str, Any]:
    """Return the columns of the nodes; `inputs` and `outputs` are concatenated."""
    graph, tags = model.graph, model.effective_tags
    inputs: list[int] = []
    outputs: list[int] = []
    for node in graph.nodes:
        outputs += values.add_all(node.outputs)
        inputs += values.add_all(node.inputs)
    owners = [None if tag is None else tag.hierarchy_module for tag in tags]
    covers = {
        str(index): [modules.index(path) for path in tag.hierarchy_covers]
        for index, tag in enumerate(tags)
        if tag is not None and tag.hierarchy_covers
    }
    attributes = [
        texts.add(attributes_text(graph.protos[index].attribute, _MOST_VALUES)[:_LONGEST_TEXT])
        for index in graph.attributed
    ]
    return {
        "op": [texts.add(node.op_type) for node in graph.nodes],
        "domain": [texts.add(node.domain) for node in graph.nodes],
        "name": [as_text(node.name) for node in graph.nodes],
        "box": _deltas(of_node),
        "module": _deltas(modules.index(path) for path in owners),
        "evidence": [texts.add("" if tag is None else tag.hierarchy_method) for tag in tags],
        "call": [_call(tag) for tag in tags],
        "covers": covers,
        "attributed": _deltas(graph.attributed),
        "attributes": attributes,
        "inputCount": [len(node.inputs) for node in graph.nodes],
        "outputCount": [len(node.outputs) for node in graph.nodes],
        "inputs": _deltas(inputs),
        "outputs": _deltas(outputs),
    }


def _call(tag: NodeTag | None) -> int:
    return -1 if tag is None or tag.hierarchy_call is None else tag.hierarchy_call


def _graphs(graph: Graph, boxes: Boxes, values: _Values) -> list[dict[str, Any]]:
    """Return the inputs, outputs and initializers of the main graph and of nested ones, by box."""
    main = {
        "box": 0,
        "inputs": values.inputs,
        "outputs": values.add_all(graph.outputs),
        "initializers": values.initializers,
    }
    nested = []
    numbers: dict[int, int] = {}
    for index, box in enumerate(boxes.boxes):
        if box.kind == "module":
            continue
        if box.kind == "function":
            inner = graph.functions[box.label]
        else:
            number = numbers[box.node] = numbers.get(box.node, -1) + 1
            inner = graph.subgraphs[box.node][number]
        nested.append(
            {
                "box": index,
                "inputs": values.add_all(inner.inputs),
                "outputs": values.add_all(inner.outputs),
                "initializers": values.add_all(inner.initializers),
            }
        )
    return [main, *nested]


def _marks(graph: Graph, marks: Mapping[str, str]) -> dict[str, str]:
    if not marks:
        return {}
    return {str(i): marks[node.key] for i, node in enumerate(graph.nodes) if node.key in marks}
