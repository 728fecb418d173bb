"""Run the model in PyTorch and record what every module takes and returns."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from modelexport.capture.failure import model_run_error
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.capture.module_tree import read_module_tree
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import flatten_leaves, flatten_tensors
from modelexport.verification.records import Array


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
    """Run the model once with hooks on its modules; model and inputs are left as they were.

    Args:
        model: The model.
        inputs: Its inputs.
        root_only: Whether to record only the call of the model itself.

    Returns:
        The calls, in the order in which they finished.

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
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda tensor: tensor.detach().clone(),
                (inputs.args, inputs.kwargs),
            )
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
    """Copy the values of a tensor; None for nested, sparse and quantized ones.

    torch itself uses such tensors inside some modules.
    """
    try:
        return as_array(tensor).copy()
    except (RuntimeError, TypeError):
        return None
