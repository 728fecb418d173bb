"""Inputs of a verification: random sets of them, and the values to feed to the ONNX file."""

from __future__ import annotations

import itertools

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from modelexport.capture.hooks import flatten_tensors
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.module_tree import forward_args
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.tagged.tables import tensor_infos
from modelexport.verification.pytorch_run import as_array
from modelexport.verification.records import Array, numeric_kind

_SEED_LIMIT = 2**63
_MAX_COMBINATIONS = 10_000


def random_input_sets(inputs: ModelInputs, count: int, seed: int) -> list[ModelInputs]:
    """Draw sets of random inputs with the names, dtypes and shapes of the example inputs.

    Values are drawn uniformly from the range of the example's values, so that token ids stay in the
    vocabulary. A float input that holds a single value v is drawn from v - 1 to v + 1; integers and
    bools that are all equal stay as they are.

    Args:
        inputs: The example inputs.
        count: Number of sets.
        seed: Seed of the random generator.

    Returns:
        The sets.

    Raises:
        ArgumentTypeError: If a number is not an integer.
        ArgumentError: If a number is negative or too large, or if no input can vary.
    """
    for name, value in (("random_inputs", count), ("seed", seed)):
        _check_number(name, value)
    if not count:
        return []
    values = (inputs.args, inputs.kwargs)
    if not any(_can_vary(tensor) for tensor in flatten_tensors(values)):
        raise ArgumentError(
            f"random_inputs is {count}, and no input can vary: "
            "each is of integers or bools that are all equal",
            hint="pass example inputs that span the values to draw from",
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = (
        tree_map_only(torch.Tensor, lambda tensor: _draw_like(tensor, generator), values)
        for _ in range(count)
    )
    return [ModelInputs(args, kwargs, inputs.named) for args, kwargs in drawn]


def _check_number(name: str, value: object) -> None:
    """Raise if a value is not an integer that a random generator takes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"{name}: expected an integer, got {describe_type(value)}", hint="pass 0 or more"
        )
    if not 0 <= value < _SEED_LIMIT:
        raise ArgumentError(
            f"{name}: expected 0 or more, got {value}", hint="pass an integer from 0"
        )


def _can_vary(tensor: torch.Tensor) -> bool:
    """Return whether random values can be drawn in the range of a tensor."""
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return tensor.is_floating_point()
    return bool((tensor != tensor.flatten()[0]).any())


def _draw_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values in the range of a tensor; values that are not finite, as in masks, stay."""
    if not tensor.numel() or not _can_vary(tensor):
        return tensor
    if not tensor.is_floating_point():
        lowest, highest = int(tensor.min()), int(tensor.max())
        return torch.randint(lowest, highest + 1, tensor.shape, generator=generator).to(tensor)
    finite = tensor.detach().isfinite()
    if not finite.any():
        return tensor
    low, high = float(tensor[finite].min()), float(tensor[finite].max())
    if low == high:
        low, high = low - 1, high + 1
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return torch.where(finite, drawn.to(tensor), tensor.detach())


def match_inputs(graph: onnx.GraphProto, model: nn.Module, inputs: ModelInputs) -> dict[str, Array]:
    """Match example inputs to the inputs of an ONNX graph, which may lack unused ones.

    They are matched by name if the graph uses the argument names of `forward`, else by position.

    Args:
        graph: The main graph of the file.
        model: The model that takes the inputs.
        inputs: The example inputs, in the order in which the exporter takes them.

    Returns:
        The values to feed, by input name.

    Raises:
        ArgumentError: If an input has no value, its value has another shape, or there is more than
            one way to match them.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    wanted = [value for value in graph.input if value.name not in initializers]
    named = {**dict(zip(forward_args(model), inputs.args, strict=False)), **inputs.kwargs}
    by_name = {n: as_array(value) for n, value in named.items() if isinstance(value, torch.Tensor)}
    if all(value.name in by_name for value in wanted):
        feeds = {value.name: by_name[value.name] for value in wanted}
    else:
        tensors = flatten_tensors((inputs.args, list(inputs.kwargs.values())))
        feeds = _match_by_position(wanted, [as_array(tensor) for tensor in tensors])
    for value in wanted:
        if value.name not in feeds or not _has_shape(value, feeds[value.name]):
            raise _mismatch(value, feeds.get(value.name))
    return feeds


def _match_by_position(wanted: list[onnx.ValueInfoProto], arrays: list[Array]) -> dict[str, Array]:
    """Match arrays to graph inputs in order; if there are more arrays, by type and shape."""
    if len(wanted) == len(arrays):
        matches = [tuple(arrays)]
    else:
        matches = [
            chosen
            for chosen in itertools.islice(
                itertools.combinations(arrays, len(wanted)), _MAX_COMBINATIONS
            )
            if all(
                _has_shape(value, array) and _has_kind(value, array)
                for value, array in zip(wanted, chosen, strict=True)
            )
        ]
    if len(matches) > 1:
        raise ArgumentError(
            f"the file has {len(wanted)} of the {plural(len(arrays), 'input')}, "
            "and their names do not tell which",
            hint="export with inputs by name, as a dict, or with input_names",
        )
    return {
        value.name: array for chosen in matches for value, array in zip(wanted, chosen, strict=True)
    }


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
