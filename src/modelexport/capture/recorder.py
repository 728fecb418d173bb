"""Record every call of every module while an exporter runs the model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from modelexport.capture.calls import Call, CallLog
from modelexport.modules.tree import ModuleTree


class TraceReader(Protocol):
    """How an exporter's own trace is read while it is being made."""

    def session(self) -> object:
        """The trace itself: another object for another attempt."""

    def position(self) -> int:
        """How far the trace has come; grows with every operation."""

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The trace's name for a tensor that it made."""

    def scope_of(self, module: nn.Module) -> str:
        """What the trace calls the scope of a call of this module; empty where it has no scopes."""

    def made_by(self, calls: Sequence[OpenCall]) -> dict[str, int]:
        """Which call made each operation traced so far, by the number of the call."""


@dataclasses.dataclass
class OpenCall:
    """A call as it is being recorded; `start` and `finish` are positions in the trace."""

    path: str
    index: int
    parent: int
    start: int
    scope: str
    finish: int = 0
    end: int = 0
    returned: tuple[str, ...] = ()


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARGS_OF_CLASS: dict[Any, tuple[str, ...]] = {}
"""Cached for the process by a class's `forward`: reading a signature is slow, and a model has few classes."""


Leaf = torch.Tensor | int | float | torch.SymInt | torch.SymFloat | torch.SymBool


def flatten_leaves(value: object) -> Iterator[Leaf]:
    """The tensors and numbers in a module's return value, however nested; a tracer makes tensors of sizes."""
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
    """The tensors in a module's return value, however nested."""
    return (leaf for leaf in flatten_leaves(value) if isinstance(leaf, torch.Tensor))


class Recorder:
    """Forward hooks that write down each call: where in the trace it began and ended, what it returned."""

    def __init__(self, tap: TraceReader) -> None:
        self._tap = tap
        self._session: object = None
        self._reset()

    def _reset(self) -> None:
        self._calls: list[OpenCall] = []
        self._open: list[int] = []
        self._counts: dict[str, int] = {}
        self._made_by: dict[str, int] = {}

    def before(self, path: str, module: nn.Module, args: Any) -> None:
        # Inside a graph body that dynamo compiles, any side effect would fail the capture.
        if torch.compiler.is_dynamo_compiling() or self._is_check():
            return
        session = self._tap.session()
        if session is not self._session:
            self._session = session
            self._reset()
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        parent = self._open[-1] if self._open else -1
        self._open.append(len(self._calls))
        around = self._calls[parent].scope if parent >= 0 else ""
        scope = "/".join(filter(None, (around, self._tap.scope_of(module))))
        self._calls.append(OpenCall(path, index, parent, self._tap.position(), scope))

    def _is_check(self) -> bool:
        """Whether torch runs the model outside a trace after it has traced it, to compare the results."""
        return self._session is not None and self._tap.session() is None

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or self._is_check():
            return
        while self._open:
            number = self._open.pop()
            call = self._calls[number]
            # A call that a model's own `try` cut short never reached this hook: it ends here too.
            call.finish = self._tap.position()
            call.end = len(self._calls)
            if call.path == path:
                call.returned = tuple(self._name(leaf) for leaf in flatten_leaves(output))
                break
        if not self._open:
            self._made_by = self._tap.made_by(self._calls)

    def _name(self, leaf: Leaf) -> str:
        return (self._tap.name_of(leaf) or "") if isinstance(leaf, torch.Tensor) else ""

    def log(self) -> CallLog:
        """The calls of the last complete capture."""
        end = len(self._calls)
        calls = tuple(
            Call(c.path, c.index, c.parent, c.end or end, c.returned, c.finish) for c in self._calls
        )
        return CallLog(calls, self._made_by)


@contextmanager
def hooks_not_compiled(model: nn.Module) -> Iterator[None]:
    """Let torch.jit compile the modules with the hooks they have now, and without those registered in the block.

    It compiles the hooks of a module that has methods marked for it, as modules with packed weights do. Ours
    are Python: the compiler can neither name nor read them.
    """
    from torch.jit import _recursive

    original: Any = _recursive.get_hook_stubs
    own = {
        id(hook)
        for module in model.modules()
        for kind in _HOOKS
        for hook in getattr(module, kind).values()
    }

    def get_hook_stubs(module: nn.Module) -> Any:
        stand_in = nn.Module()
        for kind in _HOOKS:
            getattr(stand_in, kind).update(
                (key, hook) for key, hook in getattr(module, kind).items() if id(hook) in own
            )
        return original(stand_in)

    setattr(_recursive, original.__name__, get_hook_stubs)
    try:
        yield
    finally:
        setattr(_recursive, original.__name__, original)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def record_calls(model: nn.Module, tree: ModuleTree, tap: TraceReader) -> Iterator[Recorder]:
    """Record the calls made while the block runs; every hook is gone afterwards."""
    recorder = Recorder(tap)
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
