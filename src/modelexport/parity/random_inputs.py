"""Random inputs that look like a model's example inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._pytree import tree_map_only

from modelexport.baseline.calling import ModelInputs
from modelexport.errors import ArgumentError, ArgumentTypeError
from modelexport.hierarchy.capture import tensors_in

_SEEDS = 2**63


def random_sets(inputs: ModelInputs, count: int, seed: int) -> list[ModelInputs]:
    """Make sets of random inputs with the names, dtypes and shapes of the example ones.

    Values are drawn evenly from the range of the example's values, so that token ids stay in the vocabulary. A float
    input that holds one value is drawn from one below to one above it; integers and bools of one value stay as
    they are.
    """
    _check_number("random_inputs", count)
    _check_number("seed", seed)
    if not count:
        return []
    if not any(_varies(tensor) for tensor in tensors_in((inputs.args, inputs.kwargs))):
        raise ArgumentError(
            f"random_inputs is {count}, and no input can vary: each is of integers or bools that are all equal",
            hint="pass example inputs that span the values to draw from",
        )
    return list(_drawn(inputs, count, torch.Generator().manual_seed(seed)))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}: expected an integer, got a {type(value).__name__}", hint="pass 0 or more")
    if not 0 <= value < _SEEDS:
        raise ArgumentError(f"{name}: expected 0 or more, got {value}", hint="pass an integer from 0")


def _drawn(inputs: ModelInputs, count: int, generator: torch.Generator) -> Iterator[ModelInputs]:
    for _ in range(count):
        args, kwargs = tree_map_only(
            torch.Tensor, lambda tensor: _like(tensor, generator), (inputs.args, inputs.kwargs)
        )
        yield ModelInputs(args, kwargs, inputs.named)


def _varies(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or (
        not tensor.is_complex() and tensor.numel() > 0 and bool((tensor != tensor.flatten()[0]).any())
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
