"""Runs a PyTorch model once and keeps what each call of each module took and gave."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

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


def run_eagerly(model: nn.Module, inputs: ModelInputs) -> list[EagerCall]:
    """All calls, in the order in which they finished; the model is left as it was."""
    watch = _Watch()
    handles = []
    tree = scan(model)
    with preserved(model), shaped_output(model), quiet(verbose=False):
        try:
            for path in tree:
                if not tree[path].opaque:
                    module = model.get_submodule(path)
                    before, after = partial(watch.before, path), partial(watch.after, path)
                    handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                    handles.append(module.register_forward_hook(after))
            with torch.no_grad():
                model(*copy.deepcopy(inputs.args), **copy.deepcopy(inputs.kwargs))
        except Exception as error:
            raise does_not_run(error) from error
        finally:
            for handle in handles:
                handle.remove()
    return watch.finished


class _Watch:
    def __init__(self) -> None:
        self.finished: list[EagerCall] = []
        self._open: list[EagerCall] = []
        self._counts: dict[str, int] = {}
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, Array]] = {}

    def before(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        self._open.append(EagerCall(path, index, [self._values(t) for t in tensors_in((args, kwargs))], []))

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

    def _values(self, tensor: torch.Tensor) -> Array:
        """A copy of the values, made once for as long as nobody writes to the tensor."""
        version = 0 if tensor.is_inference() else int(tensor._version)
        key = (id(tensor), version)
        if key not in self._kept:
            plain = tensor.detach().cpu()
            if plain.dtype == torch.bfloat16:
                plain = plain.float()
            self._kept[key] = (tensor, plain.resolve_conj().resolve_neg().numpy().copy())
        return self._kept[key][1]
