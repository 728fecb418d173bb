"""Run the model in PyTorch: its sets of inputs, and what every module takes and returns."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

# Private by its name only: torch's own way to map over nested arguments.
from torch.utils._pytree import tree_map_only

from modelexport.capture.failure import model_run_error
from modelexport.capture.graph_inputs import as_array
from modelexport.capture.graph_inputs import match_inputs as match_inputs
from modelexport.capture.hooks import filter_outputs, flatten_leaves, flatten_tensors
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.capture.module_tree import read_module_tree
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.option_values import spell_option
from modelexport.verification.records import Array

_SEED_LIMIT = 2**63


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
            got = describe_type(value)
            raise ArgumentTypeError(f"{spell_option(name)} must be a whole number, got {got}")
        if not 0 <= value < _SEED_LIMIT:
            raise ArgumentError(f"{spell_option(name)} must be 0 or more, got {value}")
    if not count:
        return []
    values = (inputs.args, inputs.kwargs)
    if not any(_can_vary(tensor) for tensor in flatten_tensors(values)):
        raise ArgumentError(
            f"{spell_option('random_inputs')} must be 0, got {count}: no input can vary, "
            "since each is of integers or bools that are all equal",
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


class PyTorchCall(NamedTuple):
    """One call of a module, with copies of its values."""

    path: str
    number: int
    """The number of the call among those of this module."""
    inputs: tuple[Array, ...]
    outputs: tuple[Array | None, ...]
    """One for each tensor and number that it returned; None for what has no array."""
    plain: tuple[Array | None, ...] = ()
    """The same without what is in objects such as caches, which a file may lack."""


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
        except Exception as error:  # whatever the model's code raises
            raise model_run_error(error) from error
        finally:
            for handle in handles:
                handle.remove()
    if tree[""].opaque:  # a compiled model takes no hooks, but its result is known
        recorder.before("", model, args, kwargs)
        recorder.after("", model, args, output)
    return recorder.finished


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
                outputs, plain = (
                    tuple(
                        self._copy(leaf) if isinstance(leaf, torch.Tensor) else None
                        for leaf in flatten_leaves(output, with_trees)
                    )
                    for with_trees in (True, False)
                )
                self.finished.append(call._replace(outputs=outputs, plain=plain))
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
