"""The type and shape of tensors: as the file says, or by ONNX's shape inference where it does not."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import onnx
from onnx import TensorProto
from onnx.numpy_helper import from_array

from modelexport.errors import FormatError
from modelexport.pieces.cut import Border
from modelexport.pieces.folding import Value, known_values
from modelexport.pieces.levels import Level, untagged

_LARGE = 1 << 10
_WHOLE = {TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}


class Types:
    """Finds the types of tensors; inference runs only if one is asked for that the file does not tell whole."""

    def __init__(self, proto: onnx.ModelProto, main: Level) -> None:
        self._proto = proto
        self._main = main
        self._inferred: dict[str, dict[str, onnx.TypeProto]] = {}
        self._tried: set[Border] = set()
        self._whole: onnx.ModelProto | None = None
        dims = (dim for value in proto.graph.input for dim in value.type.tensor_type.shape.dim)
        self._symbols = {dim.dim_param for dim in dims if dim.dim_param}

    def of(self, wanted: Iterable[Border], end: int) -> list[onnx.ValueInfoProto]:
        """Each tensor with its type; all are made before the node `end` of the main graph."""
        wanted = list(wanted)
        missing = [border for border in wanted if border not in self._tried and not self._is_settled(border)]
        if missing:
            self._tried.update(missing)
            self._infer(missing, end)
        return [onnx.ValueInfoProto(name=border.name, type=self._known(border)) for border in wanted]

    def _is_settled(self, border: Border) -> bool:
        """Whether a shape is told by the file, or inferred whole: numbers, and names that the inputs have."""
        found = self._find(border)
        if found is None or not _has_shape(found):
            return False
        if _has_shape(self._told_by_file(border.level, border.name)):
            return True
        dims = found.tensor_type.shape.dim
        return all(dim.HasField("dim_value") or dim.dim_param in self._symbols for dim in dims)

    def fixed_values(self, wanted: Iterable[Border], end: int) -> dict[str, Value]:
        """The values of those tensors of the main graph that follow from fixed shapes, though inputs stand behind."""
        sizes = [border for border in wanted if self._may_be_sizes(border)]
        if not sizes:
            return {}
        graph = self._main.graph if self._whole is None else self._whole.graph
        types = dict(_declared(graph))
        nodes = self._main.nodes[:end]
        values = known_values(nodes, self._main.graph.initializer, types, self._proto.opset_import)
        return {border.name: values[border.name] for border in sizes if border.name in values}

    def _may_be_sizes(self, border: Border) -> bool:
        """Whether a tensor is a whole number or a list of those, and not an input of the model."""
        if border.level is not self._main or any(value.name == border.name for value in self._main.graph.input):
            return False
        kind = self._known(border).tensor_type
        return kind.elem_type in _WHOLE and kind.HasField("shape") and len(kind.shape.dim) < 2

    def _known(self, border: Border) -> onnx.TypeProto:
        found = self._find(border)
        if found is None:
            raise FormatError(
                f"the file does not say of what type {border.name!r} is, and it cannot be inferred",
                hint="an operator that ONNX does not know makes it; add its value_info to the file",
            )
        return found

    def _find(self, border: Border) -> onnx.TypeProto | None:
        level: Level | None = border.level
        while level is not None:
            told = self._told_by_file(level, border.name)
            if not _has_shape(told):
                told = self._inferred.get(level.prefix, {}).get(border.name, told)
            if told is not None:
                return told
            level = level.outer
        return None

    def _told_by_file(self, level: Level, name: str) -> onnx.TypeProto | None:
        value = level.declared.get(name)
        return value.type if value is not None and _is_whole(value.type) else None

    def _infer(self, missing: list[Border], end: int) -> None:
        """Infer types up to a node; where ONNX gives up on a shape, work out sizes."""
        bare = self._bare(end)
        while True:
            try:
                done = onnx.shape_inference.infer_shapes(bare, data_prop=True)
            except Exception as error:  # inference and its checks raise several unrelated kinds
                raise FormatError(f"shape inference fails on this file: {error}") from error
            self._note(done, {border.name for border in missing})
            if all(self._is_settled(border) for border in missing) or not self._fold(bare):
                return

    def _note(self, done: onnx.ModelProto, wanted: set[str]) -> None:
        """Keep what was inferred of these tensors, in the main graph and those inside it."""
        self._whole = done
        levels = Level(done.graph, untagged) if self._main.bodies else ()
        for prefix, graph in (("", done.graph), *((level.prefix, level.graph) for level in levels)):
            found = self._inferred.setdefault(prefix, {})
            for name, kind in _declared(graph, wanted):
                self._unname(kind)
                if _has_shape(kind) or name not in found:
                    found[name] = kind

    def _unname(self, kind: onnx.TypeProto) -> None:
        """Take away the names that inference makes up for sizes which it does not know."""
        for dim in kind.tensor_type.shape.dim if _has_shape(kind) and kind.HasField("tensor_type") else ():
            if dim.dim_param and dim.dim_param not in self._symbols:
                dim.ClearField("dim_param")

    def _bare(self, end: int) -> onnx.ModelProto:
        """The model up to a node, without what inference does not look at."""
        bare = onnx.ModelProto(ir_version=self._proto.ir_version)
        bare.opset_import.extend(self._proto.opset_import)
        bare.functions.extend(self._proto.functions)
        graph, main = bare.graph, self._main.graph
        graph.name = main.name
        graph.input.extend(main.input)
        graph.initializer.extend(_without_large_values(main.initializer))
        graph.sparse_initializer.extend(main.sparse_initializer)
        graph.value_info.extend(main.value_info)
        graph.node.extend(self._main.nodes[:end])
        for node in graph.node:
            node.ClearField("doc_string")
            node.ClearField("metadata_props")
        return bare

    def _fold(self, bare: onnx.ModelProto) -> bool:
        """Put values in the place of nodes that follow from constants and fixed shapes; whether there were any new."""
        graph = bare.graph
        types = {} if self._whole is None else dict(_declared(self._whole.graph))
        values = known_values(graph.node, graph.initializer, types, bare.opset_import)
        left = [node for node in graph.node if not all(name in values for name in node.output if name)]
        if len(left) == len(graph.node):
            return False
        stored = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(from_array(v, name) for name, v in values.items() if name not in stored)
        kept = onnx.GraphProto()
        kept.node.extend(left)
        del graph.node[:]
        graph.node.extend(kept.node)
        return True


def _without_large_values(weights: Iterable[TensorProto]) -> Iterator[TensorProto]:
    for weight in weights:
        large = len(weight.raw_data) > _LARGE
        yield TensorProto(name=weight.name, dims=weight.dims, data_type=weight.data_type) if large else weight


def _declared(graph: onnx.GraphProto, wanted: Container[str] | None = None) -> Iterator[tuple[str, onnx.TypeProto]]:
    for values in (graph.value_info, graph.input, graph.output):
        for value in values:
            name = value.name
            if (wanted is None or name in wanted) and _is_whole(value.type):
                yield name, value.type


def _has_shape(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and (kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.HasField("shape"))


def _is_whole(kind: onnx.TypeProto) -> bool:
    """Whether a type says what it has to; one that is left empty says nothing."""
    which = kind.WhichOneof("value")
    return which is not None and (which != "tensor_type" or bool(kind.tensor_type.elem_type))
