"""Record every call of every module while an exporter runs the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from modelexport.capture.calls import Call, CallLog
from modelexport.capture.model_state import swap_attributes
from modelexport.modules.tree import ModuleTree


class TraceReader(Protocol):
    """Read an exporter's own trace while the exporter makes it."""

    def session(self) -> object:
        """Return the trace under way, another object for another attempt; None outside a trace."""

    def position(self) -> int:
        """Return the position of the trace, which grows with every operation."""

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the trace's name of a tensor, None for one that it did not compute."""

    def scope_of(self, module: nn.Module) -> str:
        """Return the trace's name of the scope of a call of this module; "" where it has none."""

    def assign_calls(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        """Return the number of the call in which each operation traced so far ran."""


@dataclasses.dataclass
class OpenCall:
    """A call as it is being recorded; `start` and `finish` are positions of the trace."""

    path: str
    index: int
    parent: int
    start: int
    scope: str
    finish: int = 0
    end: int = 0
    returned: tuple[str, ...] = ()


Leaf = torch.Tensor | int | float | torch.SymInt | torch.SymFloat | torch.SymBool


def flatten_leaves(value: object) -> Iterator[Leaf]:
    """Yield the tensors and numbers in a value, however nested.

    Numbers count because a tracer turns sizes into tensors.

    Args:
        value: What a module takes or returns.

    Yields:
        The leaves in order.
    """
    if isinstance(value, Leaf):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from flatten_leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten_leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from flatten_leaves(getattr(value, field.name, None))


def flatten_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, however nested.

    Args:
        value: What a module takes or returns.

    Returns:
        The tensors in order.
    """
    return (leaf for leaf in flatten_leaves(value) if isinstance(leaf, torch.Tensor))


class Recorder:
    """Forward hooks that record each call: its span in the trace and what it returned."""

    def __init__(self, reader: TraceReader) -> None:
        """Start without calls.

        Args:
            reader: Reads the trace of the exporter that runs the model.
        """
        self._reader = reader
        self._session: object = None
        self._reset()

    def _reset(self) -> None:
        self._calls: list[OpenCall] = []
        self._open: list[int] = []
        self._counts: dict[str, int] = {}
        self._operation_calls: dict[str, int] = {}

    def before(self, path: str, module: nn.Module, args: Any) -> None:
        """Record that a call begins; a forward pre-hook."""
        if self._is_unrecorded():
            return
        session = self._reader.session()
        # An exporter that starts over traces into a new graph: only its last attempt counts.
        if session is not self._session:
            self._session = session
            self._reset()
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        parent = self._open[-1] if self._open else -1
        self._open.append(len(self._calls))
        around = self._calls[parent].scope if parent >= 0 else ""
        scope = "/".join(filter(None, (around, self._reader.scope_of(module))))
        self._calls.append(OpenCall(path, index, parent, self._reader.position(), scope))

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Record that a call ended, and what it returned; a forward hook."""
        if self._is_unrecorded():
            return
        while self._open:
            number = self._open.pop()
            call = self._calls[number]
            # A call that a model's own `try` cut short never reached this hook: it ends here too.
            call.finish = self._reader.position()
            call.end = len(self._calls)
            if call.path == path:
                call.returned = tuple(self._name(leaf) for leaf in flatten_leaves(output))
                break
        if not self._open:
            self._operation_calls = self._reader.assign_calls(self._calls)

    def _is_unrecorded(self) -> bool:
        """Tell whether a call is to be ignored."""
        # In a subgraph that dynamo compiles, a side effect such as recording fails the capture.
        if torch.compiler.is_dynamo_compiling():
            return True
        # After it has traced the model, torch runs it again outside a trace to compare results.
        return self._session is not None and self._reader.session() is None

    def _name(self, leaf: Leaf) -> str:
        return (self._reader.name_of(leaf) or "") if isinstance(leaf, torch.Tensor) else ""

    def log(self) -> CallLog:
        """Return the calls of the last capture."""
        end = len(self._calls)
        calls = tuple(
            Call(c.path, c.index, c.parent, c.end or end, c.returned, c.finish) for c in self._calls
        )
        return CallLog(calls, self._operation_calls)


# nn.Module has public ways to register and to remove a hook, but none to list the hooks it has.
# These dicts hold them, and are part of the pickled state of every module, so they rarely change.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def hide_hooks_from_jit(model: nn.Module) -> Iterator[None]:
    """Let torch.jit compile modules without the hooks that are registered while the block runs.

    torch.jit compiles the hooks of a module that has methods marked for compilation, as modules
    with packed parameters do. The recorder's hooks are Python that it can neither name nor compile.

    Args:
        model: The model; the hooks that it has now stay visible.
    """
    # Private: torch.jit reads the hooks of a module here only, and has no option to skip some. If
    # torch renames it, entering the block fails; if it reads hooks elsewhere, exports of quantized
    # models fail with an error about a hook (tests/capture/test_calling.py has one).
    from torch.jit import _recursive

    original: Any = _recursive.get_hook_stubs
    visible = {
        id(hook)
        for module in model.modules()
        for kind in _HOOKS
        for hook in getattr(module, kind).values()
    }

    def get_hook_stubs(module: nn.Module) -> Any:
        stand_in = nn.Module()
        for kind in _HOOKS:
            getattr(stand_in, kind).update(
                (key, hook) for key, hook in getattr(module, kind).items() if id(hook) in visible
            )
        return original(stand_in)

    with swap_attributes(_recursive, get_hook_stubs=get_hook_stubs):
        yield


@contextmanager
def record_calls(model: nn.Module, tree: ModuleTree, reader: TraceReader) -> Iterator[Recorder]:
    """Record the calls made while the block runs; every hook is removed afterwards.

    Args:
        model: The model that the exporter runs.
        tree: Its modules; those that cannot have hooks are left out.
        reader: Reads the exporter's trace.

    Yields:
        The recorder, whose log is complete when the exporter returns.
    """
    recorder = Recorder(reader)
    handles = []
    try:
        for path in tree:
            if tree[path].opaque:
                continue
            module = model.get_submodule(path)
            # First before, last after: what other hooks compute belongs to the module as well. The
            # path is bound here, because torch.export calls hooks with a stand-in for the module.
            handles.append(
                module.register_forward_pre_hook(partial(recorder.before, path), prepend=True)
            )
            handles.append(module.register_forward_hook(partial(recorder.after, path)))
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
