"""Forward hooks on a model while it runs: record its calls, and filter and name its outputs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from modelexport.capture.model_state import swap_attributes
from modelexport.capture.pytrees import (
    flatten_tree,
    holds_tree,
    is_tree,
    named_leaves,
    register_caches,
    without_trees,
)
from modelexport.capture.trace import Call, CallLog
from modelexport.errors import ArgumentError
from modelexport.modules.tree import ModuleTree

_Leaf = torch.Tensor | int | float | torch.SymInt | torch.SymFloat | torch.SymBool


def flatten_leaves(value: object, with_trees: bool = True) -> Iterator[_Leaf]:
    """Yield the tensors and numbers in a value, however nested.

    Numbers count because a tracer turns sizes into tensors. `with_trees` includes those in objects
    that torch can flatten, such as caches.
    """
    if isinstance(value, _Leaf):
        yield value
        return
    items: Iterable[object] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif is_tree(value):
        items = (flatten_tree(value) or {}).values() if with_trees else ()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    for item in items:
        yield from flatten_leaves(item, with_trees)


def flatten_tensors(value: object, with_trees: bool = True) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, however nested."""
    return (leaf for leaf in flatten_leaves(value, with_trees) if isinstance(leaf, torch.Tensor))


def holds_tensor(value: object) -> bool:
    """Return whether a value is a tensor or contains one."""
    return next(flatten_tensors(value), None) is not None


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


class Recorder:
    """Forward hooks that record each call: its span in the trace and what it returned."""

    def __init__(self, reader: TraceReader) -> None:
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
        """Return whether a call is to be ignored."""
        # In a subgraph that dynamo compiles, a side effect such as recording fails the capture.
        if torch.compiler.is_dynamo_compiling():
            return True
        # After it has traced the model, torch runs it again outside a trace to compare results.
        return self._session is not None and self._reader.session() is None

    def _name(self, leaf: _Leaf) -> str:
        return (self._reader.name_of(leaf) or "") if isinstance(leaf, torch.Tensor) else ""

    def log(self) -> CallLog:
        """Return the calls of the last capture."""
        end = len(self._calls)
        calls = tuple(
            Call(c.path, c.index, c.parent, c.end or end, c.returned, c.finish) for c in self._calls
        )
        return CallLog(calls, self._operation_calls)


def assign_operations(
    spans: Sequence[tuple[int, int]], marks: Sequence[tuple[str, int]]
) -> dict[str, int]:
    """Return the number of the innermost call whose span holds the position of each operation.

    Args:
        spans: For each call, in the order the calls began, the position before its first
            operation and the position of its last.
        marks: The name and the position of each operation.
    """
    operation_calls: dict[str, int] = {}
    open_calls: list[int] = []
    upcoming = 0
    for operation, position in sorted(marks, key=lambda mark: mark[1]):
        while upcoming < len(spans) and spans[upcoming][0] < position:
            while open_calls and spans[open_calls[-1]][1] <= spans[upcoming][0]:
                open_calls.pop()
            open_calls.append(upcoming)
            upcoming += 1
        while open_calls and spans[open_calls[-1]][1] < position:
            open_calls.pop()
        if open_calls:
            operation_calls[operation] = open_calls[-1]
    return operation_calls


# nn.Module has public ways to register and to remove a hook, but none to list the hooks it has.
# These dicts hold them, and are part of the pickled state of every module, so they rarely change.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def hide_hooks_from_jit(model: nn.Module) -> Iterator[None]:
    """Let torch.jit compile modules without the hooks that are registered while the block runs.

    torch.jit compiles the hooks of a module that has methods marked for compilation, as modules
    with packed parameters do. The recorder's hooks are Python that it can neither name nor compile.
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
    """Record the calls made while the block runs; every hook is removed afterwards."""
    recorder = Recorder(reader)
    with ExitStack() as hooks:
        for path in tree:
            if tree[path].opaque:
                continue
            module = model.get_submodule(path)
            # First before, last after: what other hooks compute belongs to the module as well. The
            # path is bound here, because torch.export calls hooks with a stand-in for the module.
            before, after = partial(recorder.before, path), partial(recorder.after, path)
            hooks.enter_context(module.register_forward_pre_hook(before, prepend=True))
            hooks.enter_context(module.register_forward_hook(after))
        yield recorder


class Trees(enum.Enum):
    """What becomes of objects that torch can flatten, such as caches, among the outputs."""

    KEEP = enum.auto()
    UNPACK = enum.auto()
    """The tensors that they hold are outputs: the tracer takes no objects."""
    DROP = enum.auto()


class OutputFilter:
    """A forward hook for the root that drops what is not a tensor and notes the outputs' names.

    `names` is passed to torch before the model runs, and filled when it does: torch reads it only
    after the capture, so no extra forward pass is needed to know the names.
    """

    def __init__(
        self, taken: Sequence[str] = (), may_be_numbers: bool = True, trees: Trees = Trees.KEEP
    ) -> None:
        """Name outputs apart from the `taken` names, and by a number only if that is valid."""
        self.names: list[str] = []
        self.dropped: list[str] = []
        """The name and the type of each dropped output."""
        self.has_trees: bool = False
        """Whether outputs are in objects."""
        self._taken = set(taken)
        self._may_be_numbers = may_be_numbers
        self._trees = trees
        self._taken_out: set[str] = set()
        """The names of tensors that are returned without the object that holds them."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return what is left of an output; None if nothing was changed."""
        self.dropped = []
        self._taken_out = set()
        fields = self._keep(_named_fields(output))
        if not any(holds_tensor(value) for value in fields.values()):
            raise ArgumentError(
                f"the model returns no tensor ({type(output).__name__})",
                hint="an ONNX graph needs at least one tensor output; "
                "wrap the model so that it returns one",
            )
        kept = list(fields.values())
        self.has_trees = bool(self._taken_out) or holds_tree(kept)
        is_named = not isinstance(output, tuple | list)
        if isinstance(output, Mapping) or dataclasses.is_dataclass(output) or self.has_trees:
            self.names[:] = self._output_names(fields, is_named)
        if self.has_trees and self._trees is Trees.UNPACK:
            return tuple(without_trees(value) for value in kept if value is not None)
        if self.dropped or not isinstance(output, torch.Tensor | Mapping | tuple | list):
            return tuple(value for value in kept if value is not None)
        return None

    def _keep(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that can be exported, with only the tensors of an object that cannot.

        The others are noted as dropped.
        """
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            keeps_trees = self._trees is not Trees.DROP
            if _is_exportable(value) and (keeps_trees or not holds_tree(value)):
                kept[name] = value
                continue
            leaves = (flatten_tree(value) or {}) if keeps_trees and is_tree(value) else {}
            named = {f"{name}.{path}": leaf for path, leaf in leaves.items() if leaf is not None}
            tensors = {n: leaf for n, leaf in named.items() if isinstance(leaf, torch.Tensor)}
            kept.update(tensors)
            self._taken_out.update(tensors)
            others = {n: leaf for n, leaf in named.items() if n not in tensors}
            self.dropped += [
                f"{n}: {type(leaf).__name__}"
                for n, leaf in (others if tensors else {name: value}).items()
            ]
        return kept

    def _output_names(self, fields: Mapping[str, Any], is_named: bool) -> list[str]:
        """Return the names of all tensors; what a tuple returns has its position in its name."""
        names = []
        for field, value in fields.items():
            in_object = field in self._taken_out or holds_tree(value)
            for name, leaf in named_leaves(field if is_named else f"output_{field}", value):
                if isinstance(leaf, torch.Tensor):
                    # What an object holds is often an input and an output, as in a cache.
                    is_repeated = in_object and name in self._taken
                    names.append(f"output.{name}" if is_repeated else name)
        return unique_names(map(self._legal, names), self._taken)

    def _legal(self, name: str) -> str:
        """Return a valid name: ONNX has no empty names, and torch.jit none that are numbers."""
        if not name:
            return "output"
        return name if self._may_be_numbers or not name.isdecimal() else f"output_{name}"


def unique_names(names: Iterable[str], taken: Set[str]) -> list[str]:
    """Make names unique, and different from those that are taken, by adding numbers."""
    used = set(taken)
    unique = []
    for name in names:
        candidate, number = name, 1
        while candidate in used:
            candidate, number = f"{name}_{number}", number + 1
        used.add(candidate)
        unique.append(candidate)
    return unique


def _named_fields(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if isinstance(output, tuple | list):
        return {str(position): value for position, value in enumerate(output)}
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {"output": output}


def _is_exportable(value: Any) -> bool:
    if isinstance(value, tuple | list | dict):
        return all(map(_is_exportable, value.values() if isinstance(value, dict) else value))
    if is_tree(value):
        leaves = list((flatten_tree(value) or {}).values())
        return any(map(holds_tensor, leaves)) and all(map(_is_exportable, leaves))
    return value is None or isinstance(value, torch.Tensor)


@contextmanager
def filter_outputs(
    model: nn.Module, output_filter: OutputFilter | None = None
) -> Iterator[OutputFilter]:
    """Let the model return only what can be exported while the block runs."""
    register_caches(model)
    output_filter = output_filter or OutputFilter()
    # A compiled module takes no hooks, and can return nothing but tensors.
    compiled = isinstance(model, torch.jit.ScriptModule)
    with nullcontext() if compiled else model.register_forward_hook(output_filter):
        yield output_filter
