"""Finds operations of a torch.jit graph that repeat an earlier one."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from modelexport.baseline.tap import CHANGES, inputs_of, outputs_of


class Numbering:
    """Numbers the values of a graph in its order: equal values that are computed alike have one number."""

    def __init__(self) -> None:
        self._numbers: dict[int, Hashable] = {}
        self._first: dict[Hashable, list[int]] = {}

    def twins(self, node: Any) -> Iterator[tuple[int, int]]:
        """Yield each output of a node with that of the first node that does the same on the same inputs."""
        outputs = [value.unique() for value in outputs_of(node)]
        inputs = [value.unique() for value in inputs_of(node)]
        if node.kind().endswith(CHANGES) or not outputs:
            return
        constant = None if inputs else _constant_key(node)
        key = (node.kind(), constant, tuple([self._numbers.get(unique, unique) for unique in inputs]))
        first = self._first.setdefault(key, outputs)
        self._numbers.update(zip(outputs, first, strict=False))
        if first is not outputs and inputs:
            yield from zip(outputs, first, strict=False)


def _constant_key(node: Any) -> Hashable:
    """Return a key that is equal for equal constants."""
    value = node.outputsAt(0).toIValue() if node.outputsSize() == 1 else None
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, repr(value)
    content = hashlib.sha256(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return str(value.dtype), tuple(value.shape), content.digest()
