"""The types of tensors behind a change, and ONNX's own check of what comes out, both without the large weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from modelexport.errors import FormatError
from modelexport.graph.flat import flatten, function_key, nested_graphs
from modelexport.graphml.assembly import Assembly, in_bytes
from modelexport.graphml.views import plain

_SMALL = 2048


def infer_types(
    model: onnx.ModelProto, assembly: Assembly, changed: set[str], functions: set[str]
) -> None:
    """Types that were recorded behind a change may be wrong now: they are what ONNX infers, or gone.

    `changed` are tensors of the main graph, `functions` the keys of local functions that do something else now.
    """
    main = model.graph
    _forget_in_functions(model, functions)
    for node in main.node:
        calls = functions and not functions.isdisjoint(called_by(node))
        if calls or not changed.isdisjoint(node.output) or not changed.isdisjoint(read_by(node)):
            changed.update(filter(None, node.output))
            for _, nested in nested_graphs(node.attribute):
                _forget(nested)
    made = defined(main)
    known = _inferred(model, assembly, changed)
    kept: list[onnx.ValueInfoProto] = []
    for value in main.value_info:
        found = known.get(value.name) if value.name in changed else value
        if value.name in made and found is not None:
            kept.append(onnx.ValueInfoProto.FromString(found.SerializeToString()))
    del main.value_info[:]
    main.value_info.extend(kept)
    for value in main.output:
        if value.name in changed:
            found = known.get(value.name)
            if found is not None and _has_shape(found.type):
                value.type.CopyFrom(found.type)
                continue
            if found is not None:
                value.type.tensor_type.elem_type = found.type.tensor_type.elem_type
            for dim in value.type.tensor_type.shape.dim:  # nobody knows; what was said may be wrong
                dim.Clear()


def _forget_in_functions(model: onnx.ModelProto, functions: set[str]) -> None:
    """Which functions are behind a change, those that call a changed one included; their types go."""
    while True:
        before = len(functions)
        for function in model.functions:
            key = function_key(function.domain, function.name, function.overload)
            called = {called for node in function.node for called in called_by(node)}
            if key in functions or not functions.isdisjoint(called):
                functions.add(key)
                del function.value_info[:]
        if len(functions) == before:
            return


def _forget(graph: onnx.GraphProto) -> None:
    """A body needs no types."""
    del graph.value_info[:]
    for value in graph.output:
        value.ClearField("type")
    for node in graph.node:
        for _, nested in nested_graphs(node.attribute):
            _forget(nested)


def _inferred(
    model: onnx.ModelProto, assembly: Assembly, changed: set[str]
) -> dict[str, onnx.ValueInfoProto]:
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
    declared = (*found.input, *found.value_info, *found.output)
    known = {
        value.name: value
        for value in declared
        if value.name in changed and value.type.WhichOneof("value")
    }
    for tensor in found.initializer:
        if tensor.name in changed:
            known[tensor.name] = onnx.helper.make_tensor_value_info(
                tensor.name, tensor.data_type, list(tensor.dims)
            )
    return known


def _has_shape(declared: onnx.TypeProto) -> bool:
    return bool(
        declared.WhichOneof("value") != "tensor_type" or declared.tensor_type.HasField("shape")
    )


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
            copy.graph.input.append(
                onnx.helper.make_tensor_value_info(head.name, head.data_type, list(head.dims))
            )
    return copy


def check(model: onnx.ModelProto, assembly: Assembly) -> None:
    """Whether the model is a valid one."""
    _check_calls(model)
    try:
        onnx.checker.check_model(_checkable(model, assembly), full_check=True)
    except Exception as error:  # the checker and shape inference raise several unrelated kinds
        why = " ".join(str(error).replace("==> Context:", "").split())
        raise FormatError(
            f"the edited model is not valid: {why}", hint="undo the change"
        ) from error


def _check_calls(model: onnx.ModelProto) -> None:
    """Whether every local function that is called exists and takes that much; the checker does not look."""
    functions = {function_key(f.domain, f.name, f.overload): f for f in model.functions}
    domains = {function.domain for function in model.functions}
    for node in flatten(model).protos if functions else ():
        if node.domain not in domains:
            continue
        key = function_key(node.domain, node.op_type, node.overload)
        place = plain(node.name or node.op_type)
        if key not in functions:
            if not onnx.defs.has(node.op_type, node.domain):
                raise FormatError(
                    f"{place}: there is no function {plain(key)}", hint="undo the change"
                )
        elif len(node.input) > len(functions[key].input) or len(node.output) > len(
            functions[key].output
        ):
            raise FormatError(
                f"{place}: the function {plain(key)} takes or gives less", hint="undo the change"
            )


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those that its bodies take from around it included."""
    yield from node.input
    for _, graph in nested_graphs(node.attribute):
        own = defined(graph)
        for inner in graph.node:
            yield from (name for name in read_by(inner) if name not in own)
        yield from (value.name for value in graph.output if value.name not in own)


def called_by(node: onnx.NodeProto) -> Iterator[str]:
    """The keys of functions that a node may call, itself or in its bodies."""
    yield function_key(node.domain, node.op_type, node.overload)
    for _, graph in nested_graphs(node.attribute):
        for inner in graph.node:
            yield from called_by(inner)


def defined(graph: onnx.GraphProto | onnx.FunctionProto) -> set[str]:
    """The names that a graph defines itself."""
    names = {name for node in graph.node for name in node.output}
    if isinstance(graph, onnx.FunctionProto):
        return names | set(graph.input)
    names |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names | {tensor.values.name for tensor in graph.sparse_initializer}
