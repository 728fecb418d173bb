"""How a model is called for an export: its inputs, its outputs, and giving it back as it came."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import operator
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from modelexport.baseline.failure import does_not_run
from modelexport.errors import ArgumentError, ArgumentTypeError, a_kind
from modelexport.hierarchy.capture import forward_args

EXPORT_LOCK = threading.RLock()
"""torch's exporters keep global state, and so does `quiet`: one export or silent run at a time in a process."""


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Example inputs, as positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool = True
    """Whether keyword inputs are to be called by their keys."""

    @property
    def for_torch(self) -> tuple[Any, ...]:
        """The positional ones as torch.onnx.export takes them: it would take a dict at their end for keywords."""
        return (*self.args, {}) if self.args and isinstance(self.args[-1], dict) else self.args

    @property
    def names(self) -> list[str] | None:
        """The names of keyword inputs; None where torch is to choose its own."""
        if not self.named or not self.kwargs or self.args:
            return None
        if any(not isinstance(value, torch.Tensor) and _holds_tensor(value) for value in self.kwargs.values()):
            return None
        return [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]


def read_inputs(example_inputs: object) -> ModelInputs:
    """A tensor, a tuple of positional inputs or a dict of keyword inputs, checked; `as_called` takes a tuple apart."""
    hint = "pass a tensor, a tuple of positional inputs, a dict of keyword inputs, or a tuple that ends in such a dict"
    if isinstance(example_inputs, torch.Tensor):
        return ModelInputs((example_inputs,), {})
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
        wrong = [key for key in kwargs if not isinstance(key, str)]
        if wrong:
            raise ArgumentTypeError(
                f"example_inputs has the key {wrong[0]!r}, which is not an argument name", hint=hint
            )
        inputs = ModelInputs((), kwargs)
    elif isinstance(example_inputs, tuple | list):
        inputs = ModelInputs(tuple(example_inputs), {})
    else:
        raise ArgumentTypeError(f"example_inputs is {a_kind(example_inputs)}", hint=hint)
    for name, value in (*enumerate(inputs.args), *inputs.kwargs.items()):
        if not _is_input(value):
            raise ArgumentTypeError(
                f"example input {name!r} is {a_kind(value)}",
                hint="inputs are tensors, or plain constants that stay fixed; convert arrays with torch.as_tensor",
            )
    return inputs


def as_called(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Read positional inputs that end in a dict as torch's exporters do: it holds keywords, if it can.

    The others may stand in a tuple of their own, `((a,), {"b": b})`. Where forward could take that tuple as an
    argument as well, it does if the model runs so.
    """
    last = inputs.args[-1] if inputs.args else None
    if not isinstance(last, dict) or not all(isinstance(name, str) for name in last):
        return inputs
    flat = ModelInputs(inputs.args[:-1], last, named=False)
    ways = [way for way in (flat, *_nested(flat)) if _fits(model, way)]
    if len(ways) > 1 and not can_run(model, ways[0]):
        return ways[1]
    return ways[0] if ways else inputs


def _nested(flat: ModelInputs) -> Iterator[ModelInputs]:
    if len(flat.args) == 1 and isinstance(flat.args[0], tuple | list):
        yield dataclasses.replace(flat, args=tuple(flat.args[0]))


def _fits(model: nn.Module, inputs: ModelInputs) -> bool:
    """Whether the model's forward takes inputs of this number and these names."""
    try:
        inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return False
    return True


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and torch.nn.parallel, which add to its module paths."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # slow to import; before that nothing is compiled
    while True:
        if compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


_INLINE_LIMIT = 2**31 - 2**24


def exceeds_one_file(model: nn.Module) -> bool:
    """Whether the weights are more than a protobuf can hold, which is 2 GiB."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) > _INLINE_LIMIT


def in_signature_order(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Keyword inputs in the order of forward's arguments, in which torch.jit traces them."""
    rank = {name: place for place, name in enumerate(forward_args(model))}
    ordered = sorted(inputs.kwargs.items(), key=lambda item: rank.get(item[0], len(rank)))
    return dataclasses.replace(inputs, kwargs=dict(ordered))


def _is_input(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_input(item) for item in value.values())
    if isinstance(value, tuple | list):
        return all(_is_input(item) for item in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _holds_tensor(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, tuple | list) and any(_holds_tensor(item) for item in value)


def keyword_shim(model: nn.Module, names: Sequence[str], constants: Mapping[str, Any]) -> None:
    """Rebind `forward` to take the named inputs by position; `preserved` puts the old one back."""
    original = model.forward

    def forward(*tensors: Any) -> Any:
        return original(**dict(zip(names, tensors, strict=True)), **constants)

    model.forward = forward


class OutputShape:
    """A forward hook for the root: drops what is not a tensor and notes the output's own names.

    `names` is handed to torch before the model runs and filled when it does: torch reads it
    only after the capture, so no extra forward pass is needed to know the names.
    """

    def __init__(self, taken: Sequence[str] = (), may_be_numbers: bool = True) -> None:
        self.names: list[str] = []
        self.dropped: list[str] = []
        self._taken = set(taken)
        self._may_be_numbers = may_be_numbers

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.dropped = []
        fields = _named_fields(output)
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if _is_exportable(value):
                kept[name] = value
            else:
                self.dropped.append(f"{name}: {type(value).__name__}")
        if not any(_holds_tensor(value) for value in kept.values()):
            raise ArgumentError(
                f"the model returns no tensor ({type(output).__name__})",
                hint="an ONNX graph needs at least one tensor output; wrap the model so that it returns one",
            )
        if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
            self.names[:] = unique_names(map(self._legal, _flat_names(kept)), self._taken)
        if self.dropped or not isinstance(output, torch.Tensor | Mapping | tuple | list):
            return tuple(value for value in kept.values() if value is not None)
        return None

    def _legal(self, name: str) -> str:
        """ONNX has no output without a name, and torch.jit none whose name is a number."""
        if not name:
            return "output"
        return name if self._may_be_numbers or not name.isdecimal() else f"output_{name}"


def unique_names(names: Iterable[str], taken: Set[str]) -> list[str]:
    """Names that are neither taken nor twice among them: numbers are added where it takes some."""
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
    if value is None or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, tuple | list):
        return all(_is_exportable(item) for item in value)
    return isinstance(value, dict) and all(_is_exportable(item) for item in value.values())


def _flat_names(fields: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            names.append(name)
        elif isinstance(value, Mapping):
            names.extend(f"{name}_{inner}" for inner in _flat_names(value))
        elif isinstance(value, tuple | list):
            names.extend(f"{name}_{inner}" for inner in _flat_names(_named_fields(value)))
    return names


@contextmanager
def shaped_output(model: nn.Module, taken: Sequence[str] = (), may_be_numbers: bool = True) -> Iterator[OutputShape]:
    """Let only tensors out of the model while the block runs."""
    shape = OutputShape(taken, may_be_numbers)
    if isinstance(model, torch.jit.ScriptModule):  # it takes no hooks, and can return nothing but tensors
        yield shape
        return
    handle = model.register_forward_hook(shape)
    try:
        yield shape
    finally:
        handle.remove()


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Eval mode for the time of the block; afterwards the model is as it was.

    That is: its modules with their attributes, the contents of the dicts, lists and sets among those, the values of
    its buffers, and what is to have gradients. Not the values of parameters, which would take a copy of them all.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    training = [module.training for module in scripted]
    attributes = [(module, dict(module.__dict__), _contents(module)) for module in modules]
    buffers = [(buffer, buffer.detach().clone(), buffer.is_leaf) for buffer in model.buffers()]
    gradients = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    try:
        for module in (*modules, *scripted):
            module.training = False
        yield
    finally:
        for module, plain, contents in attributes:
            _restore(module.__dict__, plain)
            for live, saved in contents:
                _restore(live, saved)
        for module, was in zip(scripted, training, strict=True):
            module.training = was
        for parameter, needs_grad, grad in gradients:
            parameter.requires_grad = needs_grad
            parameter.grad = grad
        for buffer, copy, was_leaf in buffers:
            _put_back(buffer, copy, was_leaf)


def _put_back(buffer: torch.Tensor, copy: torch.Tensor, was_leaf: bool) -> None:
    """A buffer's value as it was; torch does not count every write to one, so it is compared."""
    if was_leaf and not buffer.is_leaf:  # a result of parameters was written to it
        buffer.detach_()
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.shape != copy.shape or buffer.dtype != copy.dtype:
            buffer.data = copy
        elif not torch.equal(buffer, copy):
            buffer.copy_(copy)


_Container = dict[Any, Any] | list[Any] | set[Any]


def _contents(module: nn.Module) -> list[tuple[_Container, _Container]]:
    """What a module's dicts, lists and sets hold: submodules, parameters, buffers, hooks, and caches of its own."""
    containers = [value for value in module.__dict__.values() if isinstance(value, dict | list | set)]
    return [(value, dict(value) if isinstance(value, dict) else list(value)) for value in containers]


def _restore(live: _Container, saved: _Container) -> None:
    if len(live) == len(saved) and all(map(operator.is_, _items(live), _items(saved))):
        return
    live.clear()
    if isinstance(live, list):
        live.extend(saved)
    else:
        live.update(saved)


def _items(container: _Container) -> Iterator[Any]:
    """What a container holds, in order: of a dict its keys and its values."""
    return chain(container, container.values() if isinstance(container, dict) else ())


def run_once(model: nn.Module, inputs: ModelInputs) -> Any:
    """What the model itself gives for these inputs; it is left as it was."""
    with quiet(verbose=False), preserved(model), torch.no_grad():
        return model(*inputs.args, **inputs.kwargs)


def can_run(model: nn.Module, inputs: ModelInputs) -> bool:
    try:
        run_once(model, inputs)
    except Exception:
        return False
    return True


def check_weights(model: nn.Module | ExportedProgram) -> None:
    """Raise for a model whose parameters or buffers have no values yet."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if any(map(is_lazy, tensors.values())):
        raise ArgumentError("the model has lazy modules without weights", hint="run it once on its inputs first")
    meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if meta is not None:
        raise ArgumentError(
            f"the model has no weights: {meta} is on the meta device",
            hint="load the weights first, as with load_state_dict(..., assign=True), or build it on a real device",
        )


def check_runs(model: nn.Module, inputs: ModelInputs) -> None:
    """Raise if the model itself does not run on these inputs."""
    check_weights(model)
    try:
        run_once(model, inputs)
    except Exception as error:
        raise does_not_run(error) from error


@contextmanager
def swapped(owner: Any, **replacements: Any) -> Iterator[None]:
    """Other values for some attributes of a module or object while the block runs."""
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


@contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep torch's warnings, prints and log lines off the screen unless asked for.

    Holds the lock: `sys.stdout`, the warning filters and the loggers belong to the whole process, and two
    blocks that overlap in two threads would each restore what the other one had set.
    """
    with EXPORT_LOCK:
        if verbose:
            yield
        else:
            with _silenced():
                yield


@contextmanager
def _silenced() -> Iterator[None]:
    roots = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in roots]
    own_level = [logger for logger in _noisy_loggers() if logger.level and not logger.disabled]
    torch._C._jit_set_onnx_log_enabled(False)
    try:
        # The tracer means to restore this switch and turns it on instead: it prints whole graphs when it fails.
        with (
            warnings.catch_warnings(),
            swapped(torch._C, _jit_set_onnx_log_enabled=lambda enabled: None),
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            for logger in roots:
                logger.setLevel(logging.CRITICAL + 1)
            for logger in own_level:
                logger.disabled = True
            yield
    finally:
        for logger, level in zip(roots, levels, strict=True):
            logger.setLevel(level)
        for logger in own_level:
            logger.disabled = False


_NOISY = ("torch", "onnxscript", "onnx_ir")


def _noisy_loggers() -> list[logging.Logger]:
    """The loggers below the noisy ones; those with a level of their own do not heed their parent's."""
    loggers = logging.root.manager.loggerDict
    return [
        logger
        for name, logger in loggers.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _NOISY and "." in name
    ]
