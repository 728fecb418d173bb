"""Prepare a copy of a model for ONNX Runtime's tools: every node has a name, and a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Set
from pathlib import Path

import msgspec
import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import Graph, flatten
from modelexport.graph.nested import Subgraph
from modelexport.onnx_file.digests import initializer_sizes
from modelexport.onnx_file.model_file import external_files, require_data_file
from modelexport.quantization.convert import LARGE_MODEL, Target, preprocess_file
from modelexport.retagging.retag import retag_result
from modelexport.tagged.example_inputs import Array
from modelexport.tagged.model import TaggedModel, load
from modelexport.tagged.strip import strip_file


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A copy of a model in a work folder, whose nodes all have names of their own.

    The nodes of the copy and of `model` are the same, in the same order.
    """

    path: Path
    model: TaggedModel
    """The same nodes with their map: the original file, or what preprocessing made of it."""
    names: tuple[str, ...]
    """The name of each node in the copy."""
    bytes: int
    """The size of the initializers."""
    is_large: bool
    """Whether what is made of it needs a data file."""
    notes: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The nodes."""
        return self.model.graph


def prepare(
    original: Path,
    folder: Path,
    to: Target,
    preprocess: bool,
    feeds: dict[str, Array],
    step: Callable[[str], None],
) -> Prepared:
    """Copy a model into a work folder, and preprocess it if requested.

    Args:
        original: The tagged file.
        folder: An empty folder.
        to: What the copy will be quantized to.
        preprocess: Whether ONNX Runtime infers shapes and optimizes the graph first.
        feeds: The inputs on which the map is carried over to the preprocessed file.
        step: Called with a line of progress.

    Raises:
        FileError: A file cannot be read or written.
        FormatError: ONNX Runtime cannot preprocess the model.
    """
    notes: tuple[str, ...] = ()
    copy, model = folder / "copy.onnx", load(original)
    strip_file(original, copy)
    is_large = _stored_bytes(original, model.proto) > LARGE_MODEL
    if preprocess:
        step("preprocess the model")
        optimized = folder / "preprocessed.onnx"
        notes = preprocess_file(copy, optimized, is_large)
        tagged = folder / "tagged.onnx"
        retag_result(original, optimized, tagged, feeds)
        copy, model = optimized, load(tagged)
    proto = onnx.load(copy, load_external_data=False)
    if preprocess:
        _rename_initializers(proto, {*load(original).graph.initializers})
    _drop_initializer_types(proto)
    if to is Target.INT8_DYNAMIC:
        _separate_transposed(proto)
    names = _name_nodes(proto)
    if len(names) != len(model.graph.nodes):
        raise FormatError(f"{original.name} cannot be copied: it has nodes that were not read")
    path = folder / "named.onnx"
    onnx.save(proto, path)
    size = sum(each.bytes for each in initializer_sizes(proto))
    return Prepared(path, model, names, size, is_large, notes)


def default_preprocess(to: Target, preprocess: bool | None) -> bool:
    """Return whether to preprocess: by default only where ranges of values are measured.

    A static quantization needs the types and shapes of all values. The others do not, and leave
    the nodes that are kept in float as they are.
    """
    return to is Target.INT8_STATIC if preprocess is None else preprocess


def _stored_bytes(path: Path, proto: onnx.ModelProto) -> int:
    data = (require_data_file(path, name) for name in external_files(proto))
    return path.stat().st_size + sum(file.stat().st_size for file in data)


def _name_nodes(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Give a name to every node that has none, or that of an earlier node."""
    graph = flatten(proto)
    given = {node.name for node in graph.nodes}
    used: set[str] = set()
    names = []
    for node, stored in zip(graph.nodes, graph.protos, strict=True):
        name = node.name
        if not name or name in used:
            name = _free_name(node.key, used | given if not node.name else used)
            stored.name = name
        used.add(name)
        names.append(name)
    return tuple(names)


def _rename_initializers(proto: onnx.ModelProto, known: Set[str]) -> None:
    """Rename the initializers that the optimizer of ONNX Runtime added.

    It derives their names from a constant and a counter. When the quantized file is loaded, it
    would derive the same names again, and fail.
    """
    names = {t.name: f"{t.name}_preprocessed" for t in proto.graph.initializer}
    returned = {value.name for value in proto.graph.output}
    names = {name: new for name, new in names.items() if name not in known | returned}
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for subgraph in Subgraph(proto.graph):
        for node in subgraph.nodes:
            if not names.keys().isdisjoint(node.input):
                node.input[:] = [names.get(name, name) for name in node.input]


def _separate_transposed(proto: onnx.ModelProto) -> None:
    """Give each node that stores its matrix transposed one that no other node consumes.

    The dynamic quantizer transposes it in place for each of them, also if the node stays in float.
    """
    nodes = [node for subgraph in Subgraph(proto.graph) for node in subgraph.nodes]
    uses = Counter(name for node in nodes for name in node.input)
    uses.update(value.name for value in proto.graph.output)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    used = {*uses, *tensors, *(name for node in nodes for name in node.output)}
    for node in nodes:
        if not any(each.name == "transB" and each.i for each in node.attribute):
            continue
        name = node.input[1]
        if name in tensors and uses[name] > 1:
            copy = proto.graph.initializer.add()
            copy.CopyFrom(tensors[name])
            copy.name = node.input[1] = _free_name(f"{name}_copy", used)
            used.add(copy.name)
            uses[name] -= 1


def _drop_initializer_types(proto: onnx.ModelProto) -> None:
    """Remove the declared types of initializers, which the float16 converter takes for values.

    It would cast an initializer that stays in float to float.
    """
    stored = {tensor.name for tensor in proto.graph.initializer}
    values = [value for value in proto.graph.value_info if value.name not in stored]
    if len(values) < len(proto.graph.value_info):
        rest = onnx.GraphProto()
        rest.value_info.extend(values)
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(rest.value_info)


def _free_name(wanted: str, used: Collection[str]) -> str:
    name, number = wanted, 1
    while name in used:
        name, number = f"{wanted}_{number}", number + 1
    return name
