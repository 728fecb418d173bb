"""A model's example inputs as the inputs of its ONNX file."""

from __future__ import annotations

import itertools
from typing import Any

import onnx
import torch
from torch import nn

from modelexport.baseline.calling import ModelInputs
from modelexport.errors import ArgumentError
from modelexport.hierarchy.capture import forward_args, tensors_in
from modelexport.parity.eager import as_array
from modelexport.parity.measure import Array, kind
from modelexport.tagged.build import tensor_infos
from modelexport.wording import plural

_MOST_WAYS = 10_000


def feeds_for(graph: onnx.GraphProto, model: nn.Module, inputs: ModelInputs) -> dict[str, Array]:
    """By name where the file has the names of forward's arguments, else in order; exporters leave unused ones out."""
    weights = {tensor.name for tensor in graph.initializer}
    wanted = [value for value in graph.input if value.name not in weights]
    positional = dict(zip(forward_args(model), inputs.args, strict=False))
    by_name = {name: as_array(v) for name, v in {**positional, **inputs.kwargs}.items() if isinstance(v, torch.Tensor)}
    if all(value.name in by_name for value in wanted):
        found = {value.name: by_name[value.name] for value in wanted}
    else:
        given = [as_array(tensor) for tensor in tensors_in((inputs.args, list(inputs.kwargs.values())))]
        found = _in_order(wanted, given)
    for value in wanted:
        if value.name not in found or not _fits(value, found[value.name], only_shape=True):
            raise _no_fit(value, found.get(value.name))
    return found


def _in_order(wanted: list[Any], given: list[Array]) -> dict[str, Array]:
    """Inputs by their place; where the file has fewer, those that fit, if there is only one way."""
    if len(wanted) == len(given):
        return {value.name: array for value, array in zip(wanted, given, strict=True)}
    fitting = [
        chosen
        for chosen in itertools.islice(itertools.combinations(given, len(wanted)), _MOST_WAYS)
        if all(_fits(value, array) for value, array in zip(wanted, chosen, strict=True))
    ]
    if len(fitting) > 1:
        raise ArgumentError(
            f"the file has {len(wanted)} of the {plural(len(given), 'input')}, and their names do not tell which",
            hint="export with inputs by name, as a dict, or with input_names",
        )
    return {value.name: array for chosen in fitting for value, array in zip(wanted, chosen, strict=True)}


def _fits(value: onnx.ValueInfoProto, array: Array, only_shape: bool = False) -> bool:
    tensor = value.type.tensor_type
    dims = tensor.shape.dim
    if len(dims) != array.ndim or any(
        dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, array.shape, strict=True)
    ):
        return False
    if only_shape:
        return True
    stand_in = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return kind(array) == kind(array.astype(stand_in))


def _no_fit(value: onnx.ValueInfoProto, array: Array | None) -> ArgumentError:
    (info,) = tensor_infos([value])
    dims = ",".join("?" if dim is None else str(dim) for dim in info.shape)
    given = "none" if array is None else f"[{','.join(map(str, array.shape))}]"
    hint = "use the inputs that the file was exported with"
    if array is not None:
        hint = f"{hint}, or others of that shape; export with --dynamic for other shapes"
    return ArgumentError(f"the file's input {value.name!r}: expected [{dims}], got {given}", hint=hint)
