"""Match example inputs to the inputs of an ONNX graph."""

from __future__ import annotations

import itertools

import onnx
import torch
from torch import nn

from modelexport.capture.hooks import flatten_tensors
from modelexport.capture.inputs import ModelInputs, name_inputs, named_input_leaves
from modelexport.capture.pytrees import named_tensors
from modelexport.errors import ArgumentError, plural
from modelexport.tagged.example_inputs import Array, numeric_kind
from modelexport.tagged.tables import tensor_infos

INPUT_PREFIX = "input."
"""How the transformers exporter begins the name of an input where an output has the same one."""
_MAX_COMBINATIONS = 10_000


def match_inputs(graph: onnx.GraphProto, model: nn.Module, inputs: ModelInputs) -> dict[str, Array]:
    """Match example inputs to the inputs of an ONNX graph, which may lack unused ones.

    They are matched by name if the graph uses the argument names of `forward`, else by position,
    so `inputs` has to be in the order in which the exporter takes them.

    Raises:
        ArgumentError: If an input has no value, its value has another shape, or there is more than
            one way to match them.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    wanted = [value for value in graph.input if value.name not in initializers]
    leaves = {**transformers_names(model, inputs), **named_input_leaves(model, inputs)}
    named = {n: leaf for n, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    by_name = {value.name: as_array(named[value.name]) for value in wanted if value.name in named}
    if all(value.name in by_name for value in wanted):
        feeds = {value.name: by_name[value.name] for value in wanted}
    else:
        tensors = flatten_tensors((inputs.args, list(inputs.kwargs.values())))
        feeds = _match_by_position(wanted, [as_array(tensor) for tensor in tensors])
    for value in wanted:
        if value.name not in feeds or not _has_shape(value, feeds[value.name]):
            raise _mismatch(value, feeds.get(value.name))
    return feeds


def transformers_names(model: nn.Module, inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """Return the tensors of all inputs by the names that the transformers exporter gives them."""
    leaves = dict(named_tensors(name_inputs(model, inputs)))
    return {**leaves, **{f"{INPUT_PREFIX}{name}": leaf for name, leaf in leaves.items()}}


def _match_by_position(wanted: list[onnx.ValueInfoProto], arrays: list[Array]) -> dict[str, Array]:
    """Match arrays to graph inputs in order; if there are more arrays, by type and shape."""
    names = [value.name for value in wanted]
    if len(wanted) == len(arrays):
        return dict(zip(names, arrays, strict=True))
    subsets = itertools.islice(itertools.combinations(arrays, len(wanted)), _MAX_COMBINATIONS)
    matches = [
        dict(zip(names, subset, strict=True))
        for subset in subsets
        if all(map(_has_shape, wanted, subset)) and all(map(_has_kind, wanted, subset))
    ]
    if len(matches) > 1:
        raise ArgumentError(
            f"the file has {len(wanted)} of the {plural(len(arrays), 'input')}, "
            "and their names do not tell which",
            hint="export with inputs by name, as a dict, or with input_names",
        )
    return matches[0] if matches else {}


def _has_shape(value: onnx.ValueInfoProto, array: Array) -> bool:
    """Return whether an array has the shape of a graph input, whose axes may be symbolic."""
    dims = value.type.tensor_type.shape.dim
    return len(dims) == array.ndim and all(
        not dim.HasField("dim_value") or dim.dim_value == size
        for dim, size in zip(dims, array.shape, strict=True)
    )


def _has_kind(value: onnx.ValueInfoProto, array: Array) -> bool:
    """Return whether an array and a graph input are both of floats, of integers or of bools."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return numeric_kind(dtype) == numeric_kind(array.dtype)


def _mismatch(value: onnx.ValueInfoProto, array: Array | None) -> ArgumentError:
    """Build the error for a graph input whose value is missing or has another shape."""
    (info,) = tensor_infos([value])
    expected = ",".join("?" if dim is None else str(dim) for dim in info.shape)
    got = "none" if array is None else f"[{','.join(map(str, array.shape))}]"
    hint = "use the inputs that the file was exported with"
    if array is not None:
        hint = f"{hint}, or others of that shape; export with --dynamic for other shapes"
    return ArgumentError(
        f"the file's input {value.name!r}: expected [{expected}], got {got}", hint=hint
    )


def as_array(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor; bfloat16, which numpy lacks, as float32.

    Args:
        tensor: A dense tensor.

    Returns:
        An array, which may share the tensor's memory.
    """
    tensor = tensor.detach().cpu()
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return tensor.resolve_conj().resolve_neg().numpy()
