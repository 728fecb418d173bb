"""Run the model in PyTorch and record what every module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from modelexport.capture.failure import model_run_error
from modelexport.capture.inputs import ModelInputs
from modelexport.capture.model_state import preserve_model, silence_torch
from modelexport.capture.module_tree import read_module_tree
from modelexport.capture.outputs import filter_outputs
from modelexport.capture.recorder import flatten_leaves, flatten_tensors
from modelexport.errors import ArgumentError, ArgumentTypeError
from modelexport.verification.records import Array


@dataclasses.dataclass
class PyTorchCall:
    """One call: `taken` are its tensors in, `given` its tensors and numbers out (None for a number)."""

    path: str
    index: int
    taken: list[Array]
    given: list[Array | None]


def run_pytorch(
    model: nn.Module, inputs: ModelInputs, root_only: bool = False
) -> list[PyTorchCall]:
    """All calls, or only the model's own, in the order in which they finished; the model is left as it was."""
    watch = _Watch()
    handles = []
    tree = read_module_tree(model)
    with silence_torch(verbose=False), preserve_model(model), filter_outputs(model):
        try:
            for path in [""] if root_only else tree:
                if not tree[path].opaque:
                    module = model.get_submodule(path)
                    before, after = partial(watch.before, path), partial(watch.after, path)
                    handles.append(
                        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                    )
                    handles.append(module.register_forward_hook(after))
            args, kwargs = tree_map(_copy, (inputs.args, inputs.kwargs))
            with torch.no_grad():
                output = model(*args, **kwargs)
        except Exception as error:
            raise model_run_error(error) from error
        finally:
            for handle in handles:
                handle.remove()
    if tree[""].opaque:  # it takes no hooks, but what it returns can be seen
        watch.before("", model, args, kwargs)
        watch.after("", model, args, output)
    return watch.finished


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _Watch:
    def __init__(self) -> None:
        self.finished: list[PyTorchCall] = []
        self._open: list[PyTorchCall] = []
        self._counts: dict[str, int] = {}
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, Array | None]] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        taken = [self._values(tensor) for tensor in flatten_tensors((args, kwargs))]
        self._open.append(
            PyTorchCall(path, index, [values for values in taken if values is not None], [])
        )

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        while self._open:
            call = self._open.pop()
            if call.path == path:  # those above it were cut short by an error that the model caught
                leaves = flatten_leaves(output)
                call.given = [
                    self._values(leaf) if isinstance(leaf, torch.Tensor) else None
                    for leaf in leaves
                ]
                self.finished.append(call)
                break

    def _values(self, tensor: torch.Tensor) -> Array | None:
        """A copy of the values, made once while nobody writes to the tensor; None for what is no plain tensor."""
        if tensor.is_inference():  # torch does not count who writes to it
            return _plain(tensor)
        key = (id(tensor), int(tensor._version))
        if key not in self._kept:
            self._kept[key] = (tensor, _plain(tensor))
        return self._kept[key][1]


def as_array(tensor: torch.Tensor) -> Array:
    """The values of a tensor, in a type that numpy has."""
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.dtype == torch.bfloat16 else plain
    return plain.resolve_conj().resolve_neg().numpy()


def _plain(tensor: torch.Tensor) -> Array | None:
    try:
        return as_array(tensor).copy()
    except (
        RuntimeError,
        TypeError,
    ):  # nested, sparse or quantized: torch itself uses such inside some modules
        return None


_SEEDS = 2**63


def random_input_sets(inputs: ModelInputs, count: int, seed: int) -> list[ModelInputs]:
    """Make sets of random inputs with the names, dtypes and shapes of the example ones.

    Values are drawn evenly from the range of the example's values, so that token ids stay in the vocabulary. A float
    input that holds one value is drawn from one below to one above it; integers and bools of one value stay as
    they are.
    """
    _check_number("random_inputs", count)
    _check_number("seed", seed)
    if not count:
        return []
    if not any(_varies(tensor) for tensor in flatten_tensors((inputs.args, inputs.kwargs))):
        raise ArgumentError(
            f"random_inputs is {count}, and no input can vary: each is of integers or bools that are all equal",
            hint="pass example inputs that span the values to draw from",
        )
    return list(_drawn(inputs, count, torch.Generator().manual_seed(seed)))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"{name}: expected an integer, got a {type(value).__name__}", hint="pass 0 or more"
        )
    if not 0 <= value < _SEEDS:
        raise ArgumentError(
            f"{name}: expected 0 or more, got {value}", hint="pass an integer from 0"
        )


def _drawn(inputs: ModelInputs, count: int, generator: torch.Generator) -> Iterator[ModelInputs]:
    for _ in range(count):
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: _like(tensor, generator), (inputs.args, inputs.kwargs)
        )
        yield ModelInputs(args, kwargs, inputs.named)


def _varies(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or (
        not tensor.is_complex()
        and tensor.numel() > 0
        and bool((tensor != tensor.flatten()[0]).any())
    )


def _like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values in the range of a tensor's own; what is not finite, as in a mask, stays where it is."""
    if not tensor.numel() or not _varies(tensor):
        return tensor
    if not tensor.is_floating_point():
        least, most = int(tensor.min()), int(tensor.max())
        return torch.randint(least, most + 1, tensor.shape, generator=generator).to(tensor)
    finite = tensor.detach().isfinite()
    if not finite.any():
        return tensor
    low, high = float(tensor[finite].min()), float(tensor[finite].max())
    low, high = (low, high) if low < high else (low - 1, high + 1)
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return torch.where(finite, drawn.to(tensor), tensor.detach())
