"""Run the model in PyTorch: its sets of inputs, and what every module takes and returns."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import onnx
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from modelexport.capture.failure import model_run_error
from modelexport.capture.hooks import filter_outputs, flatten_leaves, flatten_tensors
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.capture.module_tree import forward_args, read_module_tree
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type, plural
from modelexport.tagged.tables import tensor_infos
from modelexport.verification.records import Array, numeric_kind

_SEED_LIMIT = 2**63
_MAX_COMBINATIONS = 10_000


def random_input_sets(inputs: ModelInputs, count: int, seed: int) -> list[ModelInputs]:
    """Draw `count` sets of random inputs with the names, dtypes and shapes of the example inputs.

    Values are drawn uniformly from the range of the example's values, so that token ids stay in the
    vocabulary. A float input that holds a single value v is drawn from v - 1 to v + 1; integers and
    bools that are all equal stay as they are.

    Raises:
        ArgumentTypeError: If a number is not an integer.
        ArgumentError: If a number is negative or too large, or if no input can vary.
    """
    for name, value in (("random_inputs", count), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            message = f"{name}: expected an integer, got {describe_type(value)}"
            raise ArgumentTypeError(message, hint="pass 0 or more")
        if not 0 <= value < _SEED_LIMIT:
            message = f"{name}: expected 0 or more, got {value}"
            raise ArgumentError(message, hint="pass an integer from 0")
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

    They are matched by name if the graph uses the argument names of `forward`, else by position,
    so `inputs` has to be in the order in which the exporter takes them.

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


class PyTorchCall(NamedTuple):
    """One call of a module, with copies of its values."""

    path: str
    number: int
    """The number of the call among those of this module."""
    inputs: tuple[Array, ...]
    outputs: tuple[Array | None, ...]
    """One for each tensor and number that it returned; None for what has no array."""


def run_pytorch(
    model: nn.Module, inputs: ModelInputs, root_only: bool = False
) -> list[PyTorchCall]:
    """Run the model once with hooks on its modules, or only on itself with `root_only`.

    Model and inputs are left as they were. Calls are returned in the order in which they finished.

    Raises:
        ModelRunError: If the model does not run on these inputs.
    """
    recorder = _CallRecorder()
    handles = []
    tree = read_module_tree(model)
    with silence_torch(verbose=False), preserve_model(model), filter_outputs(model):
        try:
            for path in [""] if root_only else tree:
                if not tree[path].opaque:
                    module = model.get_submodule(path)
                    before, after = partial(recorder.before, path), partial(recorder.after, path)
                    handles += [
                        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                        module.register_forward_hook(after),
                    ]
            given = (inputs.args, inputs.kwargs)
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)
            with torch.no_grad():
                output = model(*args, **kwargs)
        except Exception as error:
            raise model_run_error(error) from error
        finally:
            for handle in handles:
                handle.remove()
    if tree[""].opaque:  # a compiled model takes no hooks, but its result is known
        recorder.before("", model, args, kwargs)
        recorder.after("", model, args, output)
    return recorder.finished


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


class _CallRecorder:
    """Forward hooks that copy the inputs and outputs of each call."""

    def __init__(self) -> None:
        self.finished: list[PyTorchCall] = []
        self._running: list[PyTorchCall] = []
        self._counts: Counter[str] = Counter()
        # The tensor is kept beside its copy, so that its id is not given to another one.
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, Array | None]] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record that a call begins."""
        if torch.compiler.is_dynamo_compiling():
            return
        copies = (self._copy(tensor) for tensor in flatten_tensors((args, kwargs)))
        inputs = tuple(array for array in copies if array is not None)
        self._running.append(PyTorchCall(path, self._counts[path], inputs, ()))
        self._counts[path] += 1

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Record that a call returns."""
        if torch.compiler.is_dynamo_compiling():
            return
        while self._running:
            call = self._running.pop()
            if call.path == path:
                outputs = tuple(
                    self._copy(leaf) if isinstance(leaf, torch.Tensor) else None
                    for leaf in flatten_leaves(output)
                )
                self.finished.append(call._replace(outputs=outputs))
                return
            # A call above it did not return: the model caught an error that it raised.

    def _copy(self, tensor: torch.Tensor) -> Array | None:
        """Copy the values of a tensor, once for each version of it."""
        if tensor.is_inference():  # torch counts no versions of it
            return _try_copy(tensor)
        key = (id(tensor), int(tensor._version))
        if key not in self._copies:
            self._copies[key] = (tensor, _try_copy(tensor))
        return self._copies[key][1]


def _try_copy(tensor: torch.Tensor) -> Array | None:
    """Copy a tensor; None for the nested, sparse and quantized ones inside some torch modules."""
    try:
        return as_array(tensor).copy()
    except (RuntimeError, TypeError):
        return None
