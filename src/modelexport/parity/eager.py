"""Runs a PyTorch model once and keeps what each call of each module took and gave."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from modelexport.baseline.calling import ModelInputs, preserved, quiet, shaped_output
from modelexport.baseline.failure import does_not_run
from modelexport.hierarchy.capture import leaves_in, scan, tensors_in
from modelexport.parity.measure import Array


@dataclasses.dataclass
class EagerCall:
    """One call: `taken` are its tensors in, `given` its tensors and numbers out (None for a number)."""

    path: str
    index: int
    taken: list[Array]
    given: list[Array | None]


def run_eagerly(model: nn.Module, inputs: ModelInputs, root_only: bool = False) -> list[EagerCall]:
    """All calls, or only the model's own, in the order in which they finished; the model is left as it was."""
    watch = _Watch()
    handles = []
    tree = scan(model)
    with quiet(verbose=False), preserved(model), shaped_output(model):
        try:
            for path in [""] if root_only else tree:
                if not tree[path].opaque:
                    module = model.get_submodule(path)
                    before, after = partial(watch.before, path), partial(watch.after, path)
                    handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                    handles.append(module.register_forward_hook(after))
            args, kwargs = tree_map(_copy, (inputs.args, inputs.kwargs))
            with torch.no_grad():
                output = model(*args, **kwargs)
        except Exception as error:
            raise does_not_run(error) from error
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
        self.finished: list[EagerCall] = []
        self._open: list[EagerCall] = []
        self._counts: dict[str, int] = {}
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, Array | None]] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        taken = [self._values(tensor) for tensor in tensors_in((args, kwargs))]
        self._open.append(EagerCall(path, index, [values for values in taken if values is not None], []))

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        while self._open:
            call = self._open.pop()
            if call.path == path:  # those above it were cut short by an error that the model caught
                leaves = leaves_in(output)
                call.given = [self._values(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
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
    except (RuntimeError, TypeError):  # nested, sparse or quantized: torch itself uses such inside some modules
        return None
