"""Reads the module tree off a live model, and records its calls while torch exports it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.jit._trace import TopLevelTracedModule

from modelexport.hierarchy.aliases import Aliases, Link, find_aliases
from modelexport.hierarchy.calls import Call, CallLog
from modelexport.hierarchy.tree import Module, ModuleTree, join, parameter_counts


class Tap(Protocol):
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


def scan(model: nn.Module) -> ModuleTree:
    """Read the module tree of a model; the first name of a module is its path, the others are aliases."""
    path_of = {id(model): ""}
    found: dict[str, nn.Module] = {"": model}
    links: dict[str, list[Link]] = {}
    finished: list[str] = []
    # An explicit stack: models nest deeper than Python likes to recurse. Each module is entered once.
    stack = [(model, "", iter(list(model._modules.items())))]
    above = {id(model)}
    while stack:
        module, path, children = stack[-1]
        for name, child in children:
            if child is None or id(child) in above:
                continue
            own = path_of.setdefault(id(child), join(path, name))
            links.setdefault(own, []).append((path, name))
            if own not in found:
                found[own] = child
                above.add(id(child))
                stack.append((child, own, iter(list(child._modules.items()))))
                break
        else:
            stack.pop()
            above.remove(id(module))
            finished.append(path)
    aliases = find_aliases(links, reversed(finished))
    below = {
        path: [path_of[id(child)] for child in module._modules.values() if child is not None]
        for path, module in found.items()
    }
    held = {path: {id(p): p.numel() for _, p in _direct(module._parameters)} for path, module in found.items()}
    counts = parameter_counts(below, held)
    modules = {path: _describe(path, module, aliases[path], counts[path]) for path, module in found.items()}
    shapes = {
        join(path, name): tuple(tensor.shape)
        for path, module in found.items()
        for name, tensor in (*_direct(module._parameters), *_direct(module._buffers))
    }
    return ModuleTree(modules, shapes)


def _direct(tensors: Mapping[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _describe(path: str, module: nn.Module, aliases: Aliases, parameter_count: int) -> Module:
    cls = type(module)
    return Module(
        path=path,
        qualified_class=f"{cls.__module__}.{cls.__name__}",
        children=tuple(name for name, child in module._modules.items() if child is not None),
        direct_parameters=tuple(name for name, _ in _direct(module._parameters)),
        direct_buffers=tuple(name for name, _ in _direct(module._buffers)),
        forward_args=forward_args(module),
        aliases=aliases.listed,
        more_aliases=aliases.more,
        parameter_count=parameter_count,
        opaque=isinstance(module, torch.jit.ScriptModule) and not isinstance(module, TopLevelTracedModule),
    )


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARGS_OF_CLASS: dict[Any, tuple[str, ...]] = {}
"""Cached for the process by a class's `forward`: reading a signature is slow, and a model has few classes."""


def forward_args(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, with * and ** where it takes any."""
    own = module.__dict__.get("forward")
    try:
        function = own if own is not None else type(module).forward
        if function in _ARGS_OF_CLASS:
            return _ARGS_OF_CLASS[function]
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, AttributeError):
        return ()
    if own is None:
        parameters = parameters[1:]
    names = tuple(str(p).partition(":")[0] if p.kind in _ANY_NUMBER else p.name for p in parameters)
    if own is None:
        _ARGS_OF_CLASS[function] = names
    return names


def named_args(module: nn.Module) -> dict[str, bool]:
    """The arguments of a module's forward that can be given by name, and whether each has to be given."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters
    return {name: item.default is item.empty for name, item in parameters.items() if item.kind in named}


Leaf = torch.Tensor | int | float | torch.SymInt | torch.SymFloat | torch.SymBool


def leaves_in(value: object) -> Iterator[Leaf]:
    """The tensors and numbers in a module's return value, however nested; a tracer makes tensors of sizes."""
    if isinstance(value, Leaf):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name, None))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a module's return value, however nested."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor))


class Recorder:
    """Forward hooks that write down each call: where in the trace it began and ended, what it returned."""

    def __init__(self, tap: Tap) -> None:
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
                call.returned = tuple(self._name(leaf) for leaf in leaves_in(output))
                break
        if not self._open:
            self._made_by = self._tap.made_by(self._calls)

    def _name(self, leaf: Leaf) -> str:
        return (self._tap.name_of(leaf) or "") if isinstance(leaf, torch.Tensor) else ""

    def log(self) -> CallLog:
        """The calls of the last complete capture."""
        end = len(self._calls)
        calls = tuple(Call(c.path, c.index, c.parent, c.end or end, c.returned, c.finish) for c in self._calls)
        return CallLog(calls, self._made_by)


@contextmanager
def hooks_not_compiled(model: nn.Module) -> Iterator[None]:
    """Let torch.jit compile the modules with the hooks they have now, and without those registered in the block.

    It compiles the hooks of a module that has methods marked for it, as modules with packed weights do. Ours
    are Python: the compiler can neither name nor read them.
    """
    from torch.jit import _recursive

    original: Any = _recursive.get_hook_stubs
    own = {id(hook) for module in model.modules() for kind in _HOOKS for hook in getattr(module, kind).values()}

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
def recording(model: nn.Module, tree: ModuleTree, tap: Tap) -> Iterator[Recorder]:
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
            handles.append(module.register_forward_pre_hook(partial(recorder.before, path), prepend=True))
            handles.append(module.register_forward_hook(partial(recorder.after, path)))
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
