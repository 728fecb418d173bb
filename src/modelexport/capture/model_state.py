"""The state of the caller's model: borrow it for an export and restore it."""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.exporters import ModelKind

EXPORT_LOCK = threading.RLock()
"""Held by each export and silent run: torch's exporters and `silence_torch` have global state."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Remove the wrappers of torch.compile and torch.nn.parallel, which add to module paths."""
    # Private: the class of compiled models and its `_orig_mod` have no public names. It is looked
    # up only where it is imported already: that is slow, and before it nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    while True:
        if compiler is not None and isinstance(model, compiler.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def check_model(model: object) -> nn.Module | ExportedProgram:
    """Check what the caller passed as the model, and return it without its wrappers.

    Raises:
        ArgumentTypeError: It is not a model.
        ArgumentError: It has no weights.
    """
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ArgumentTypeError(
            f"the model is {describe_type(model)}, not a torch.nn.Module",
            hint="pass the model object itself; call a class first, and load a path first",
        )
    check_has_weights(model)
    return unwrap_model(model) if isinstance(model, nn.Module) else model


def kind_of_model(model: nn.Module | ExportedProgram) -> ModelKind:
    """Return what kind of model an exporter is given."""
    if isinstance(model, ExportedProgram):
        return ModelKind.PROGRAM
    if isinstance(model, torch.jit.ScriptModule):
        return ModelKind.SCRIPT
    # Looked up only where it is imported already: before that, no model is one of its classes.
    modeling = sys.modules.get("transformers.modeling_utils")
    pretrained = modeling is not None and isinstance(model, modeling.PreTrainedModel)
    return ModelKind.PRETRAINED if pretrained else ModelKind.MODULE


_INLINE_LIMIT = 2**31 - 2**24  # a protobuf holds 2 GiB; the graph needs some room


def exceeds_one_file(model: nn.Module | ExportedProgram) -> bool:
    """Return whether the parameters and buffers are more than a protobuf can hold."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(t.numel() * t.element_size() for t in tensors) > _INLINE_LIMIT


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and restore it when the block ends.

    Restores the attributes of its modules, the contents of the dicts, lists and sets among them,
    the values of its buffers, and which parameters have gradients. The values of parameters are
    not restored: that would take a copy of all of them.
    """
    modules = list(model.modules())
    compiled = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    training = [module.training for module in compiled]
    containers = [
        pair
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)
        for pair in _containers(module)
    ]
    buffers = [(buffer, buffer.detach().clone(), buffer.is_leaf) for buffer in model.buffers()]
    gradients = [
        (parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()
    ]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for live, saved in containers:
            _restore(live, saved)
        for module, was in zip(compiled, training, strict=True):
            module.training = was
        for parameter, needs_grad, grad in gradients:
            parameter.requires_grad = needs_grad
            parameter.grad = grad
        for buffer, copy, was_leaf in buffers:
            _restore_buffer(buffer, copy, was_leaf)


def _restore_buffer(buffer: torch.Tensor, copy: torch.Tensor, was_leaf: bool) -> None:
    """Restore the value of a buffer if it differs; torch does not count every write to one."""
    if was_leaf and not buffer.is_leaf:  # the result of a parameter was written to it
        buffer.detach_()
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if buffer.shape != copy.shape or buffer.dtype != copy.dtype:
            buffer.data = copy
        elif not torch.equal(buffer, copy):
            buffer.copy_(copy)


_Container = dict[Any, Any] | list[Any] | set[Any]


def _containers(module: nn.Module) -> Iterator[tuple[_Container, _Container]]:
    """Yield a module's attributes, and the dicts, lists and sets among them, each with a copy.

    They hold its submodules, parameters, buffers and hooks, and caches of its own.
    """
    for value in (module.__dict__, *module.__dict__.values()):
        if isinstance(value, dict | list | set):
            yield value, dict(value) if isinstance(value, dict) else list(value)


def _restore(live: _Container, saved: _Container) -> None:
    if len(live) == len(saved) and all(map(operator.is_, _items(live), _items(saved))):
        return
    live.clear()
    if isinstance(live, list):
        live.extend(saved)
    else:
        live.update(saved)


def _items(container: _Container) -> Iterator[Any]:
    """Return the items of a container in order: of a dict the keys and the values."""
    return chain(container, container.values() if isinstance(container, dict) else ())


def check_has_weights(model: nn.Module | ExportedProgram) -> None:
    """Check that all parameters and buffers of a model have values.

    Raises:
        ArgumentError: Some are lazy, or on the meta device.
    """
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    if any(map(is_lazy, tensors.values())):
        raise ArgumentError(
            "the model has lazy modules without weights", hint="run it once on its inputs first"
        )
    meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if meta is not None:
        raise ArgumentError(
            f"the model has no weights: {meta} is on the meta device",
            hint="load the weights first, as with load_state_dict(..., assign=True), "
            "or build it on a real device",
        )


@contextmanager
def swap_attributes(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a module or object while the block runs."""
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


@contextmanager
def silence_torch(verbose: bool) -> Iterator[None]:
    """Keep torch's warnings, prints and log lines off the screen while the block runs.

    Holds the lock: `sys.stdout`, the warning filters and the loggers belong to the whole process,
    and two blocks that overlap in two threads would each restore what the other one had set.
    """
    with EXPORT_LOCK, nullcontext() if verbose else _silenced():
        yield


_NOISY = ("torch", "onnxscript", "onnx_ir", "transformers")


@contextmanager
def _silenced() -> Iterator[None]:
    roots = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in roots]
    # A logger below with its own level ignores that of its parent.
    own_level = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(tuple(f"{root}." for root in _NOISY))
        and isinstance(logger, logging.Logger)
        and logger.level
        and not logger.disabled
    ]
    # Private: torch's exporter logs from C++, which no logger or redirection catches, and this is
    # the only switch. The exporter means to restore it and turns it on instead, so that whole
    # graphs are printed when it fails: hence it must not be able to. Without it only the screen is
    # less quiet.
    torch._C._jit_set_onnx_log_enabled(False)
    try:
        with (
            warnings.catch_warnings(),
            swap_attributes(torch._C, _jit_set_onnx_log_enabled=lambda enabled: None),
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
