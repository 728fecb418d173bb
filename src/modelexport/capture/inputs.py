"""Example inputs: read what the caller passes, and pass it as the exporter takes it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

# Private by its name only: torch's own way to map over nested arguments.
from torch.utils._pytree import tree_map_only

from modelexport.capture.failure import model_run_error
from modelexport.capture.hooks import holds_tensor, unique_names
from modelexport.capture.model_state import check_has_weights, preserve_model, silence_torch
from modelexport.capture.module_tree import forward_args
from modelexport.capture.pytrees import (
    flatten_tree,
    holds_tree,
    is_tree,
    named_leaves,
    register_caches,
)
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Example inputs, as positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool = True
    """Whether keyword inputs are named by their keys in the file."""

    @property
    def for_torch(self) -> tuple[Any, ...]:
        """The positional inputs for `torch.onnx.export`.

        It takes a dict at their end for keywords, so an empty one follows such a dict.
        """
        return (*self.args, {}) if self.args and isinstance(self.args[-1], dict) else self.args

    @property
    def names(self) -> list[str] | None:
        """The names of keyword inputs in the file; None if torch chooses them."""
        if not self.named or not self.kwargs or self.args:
            return None
        names = [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]
        others = [value for name, value in self.kwargs.items() if name not in names]
        return None if any(map(holds_tensor, others)) else names

    @property
    def holds_tree(self) -> bool:
        """Whether an input is an object that torch flattens, such as a cache."""
        return holds_tree((self.args, self.kwargs))


def parse_inputs(example_inputs: object) -> ModelInputs:
    """Check example inputs as the caller passes them.

    Args:
        example_inputs: A tensor, a tuple of positional inputs, a dict of keyword inputs, or a tuple
            that ends in such a dict, which `bind_inputs` separates. `ModelInputs` stay as they are.

    Raises:
        ArgumentTypeError: They are of another type, or one of them is.
    """
    register_caches()
    if isinstance(example_inputs, ModelInputs):
        return example_inputs
    hint = (
        "pass a tensor, a tuple of positional inputs, a dict of keyword inputs, "
        "or a tuple that ends in such a dict"
    )
    if isinstance(example_inputs, torch.Tensor):
        return ModelInputs((example_inputs,), {})
    if isinstance(example_inputs, Mapping):
        inputs = ModelInputs((), dict(example_inputs))
        wrong = [key for key in inputs.kwargs if not isinstance(key, str)]
        if wrong:
            raise ArgumentTypeError(
                f"example_inputs has the key {wrong[0]!r}, which is not an argument name", hint=hint
            )
    elif isinstance(example_inputs, tuple | list):
        inputs = ModelInputs(tuple(example_inputs), {})
    else:
        raise ArgumentTypeError(f"example_inputs is {describe_type(example_inputs)}", hint=hint)
    for name, value in (*enumerate(inputs.args), *inputs.kwargs.items()):
        if not _is_input(value):
            raise ArgumentTypeError(
                f"example input {name!r} is {describe_type(value)}",
                hint="inputs are tensors, plain constants that stay fixed, or objects of a class "
                "that is registered with torch.export; convert arrays with torch.as_tensor",
            )
    return inputs


def read_inputs(model: nn.Module | ExportedProgram, example_inputs: object) -> ModelInputs:
    """Check the example inputs of a model or program, and separate their keywords.

    Raises:
        ArgumentError: Inputs are given for a program, which has its own.
        ArgumentTypeError: An input has the wrong type.
    """
    if not isinstance(model, ExportedProgram):
        register_caches(model)
        return bind_inputs(model, parse_inputs(example_inputs))
    if example_inputs is not None:
        raise ArgumentError("a program has its own inputs", hint="pass None as example_inputs")
    return ModelInputs((), {})


def bind_inputs(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Separate keyword inputs from positional ones that end in a dict, as torch's exporters do.

    The dict holds keywords if forward can take it so. The others may be in a tuple of their own,
    `((a,), {"b": b})`. Where forward could also take that tuple as an argument, it does if the
    model runs this way.
    """
    last = inputs.args[-1] if inputs.args else None
    if not isinstance(last, dict) or not all(isinstance(name, str) for name in last):
        return inputs
    flat = ModelInputs(inputs.args[:-1], last, named=False)
    ways = [flat]
    if len(flat.args) == 1 and isinstance(flat.args[0], tuple | list):
        ways.append(dataclasses.replace(flat, args=tuple(flat.args[0])))
    ways = [way for way in ways if _fits(model, way)]
    if len(ways) > 1 and not can_run(model, ways[0]):
        return ways[1]
    return ways[0] if ways else inputs


def _fits(model: nn.Module, inputs: ModelInputs) -> bool:
    """Return whether the model's forward takes inputs of this number and these names."""
    try:
        inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return False
    return True


def in_signature_order(model: nn.Module, inputs: ModelInputs) -> ModelInputs:
    """Sort keyword inputs in the order of forward's arguments, in which torch.jit traces them."""
    rank = {name: index for index, name in enumerate(forward_args(model))}
    ordered = sorted(inputs.kwargs.items(), key=lambda item: rank.get(item[0], len(rank)))
    return dataclasses.replace(inputs, kwargs=dict(ordered))


def _is_input(value: object) -> bool:
    if isinstance(value, Mapping | tuple | list):
        return all(map(_is_input, value.values() if isinstance(value, Mapping) else value))
    if is_tree(value):
        leaves = flatten_tree(value)
        return leaves is not None and all(map(_is_input, leaves.values()))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def name_inputs(model: nn.Module, inputs: ModelInputs) -> dict[str, Any]:
    """Return the inputs by the names of forward's arguments."""
    return dict(zip(forward_args(model), inputs.args, strict=False)) | inputs.kwargs


def named_input_leaves(model: nn.Module, inputs: ModelInputs) -> dict[str, Any]:
    """Return the leaves of all inputs in the order in which torch flattens them, by name.

    Positional inputs have the names of forward's arguments.
    """
    arguments = forward_args(model)
    single = list(itertools.takewhile(lambda name: not name.startswith("*"), arguments))
    variadic = next((name.lstrip("*") for name in arguments if name.startswith("*")), "args")
    names = itertools.chain(single, (f"{variadic}_{number}" for number in itertools.count()))
    named = (*zip(names, inputs.args, strict=False), *inputs.kwargs.items())
    leaves = [leaf for name, value in named for leaf in named_leaves(name, value)]
    unique = unique_names((name for name, _ in leaves), set())
    return {name: value for name, (_, value) in zip(unique, leaves, strict=True)}


def graph_input_names(model: nn.Module, inputs: ModelInputs) -> list[str] | None:
    """Return the names of the inputs in the file; None if torch chooses them."""
    if not inputs.holds_tree:
        return inputs.names
    leaves = named_input_leaves(model, inputs)
    return [name for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]


def copy_inputs(inputs: ModelInputs) -> ModelInputs:
    """Copy inputs with the objects among them, which a model may change, but not the tensors."""
    given = (inputs.args, inputs.kwargs)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor, given)
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)


def run_model(model: nn.Module, inputs: ModelInputs) -> Any:
    """Run the model without gradients and in evaluation mode; it is left as it was."""
    inputs = copy_inputs(inputs) if inputs.holds_tree else inputs
    with silence_torch(verbose=False), preserve_model(model), torch.no_grad():
        return model(*inputs.args, **inputs.kwargs)


def can_run(model: nn.Module, inputs: ModelInputs) -> bool:
    """Return whether the model runs on these inputs."""
    try:
        run_model(model, inputs)
    except Exception:
        return False
    return True


def check_model_runs(model: nn.Module, inputs: ModelInputs) -> None:
    """Check that the model runs on these inputs.

    Raises:
        ArgumentError: The model has no weights.
        ModelRunError: The model raises an error.
    """
    check_has_weights(model)
    try:
        run_model(model, inputs)
    except Exception as error:
        raise model_run_error(error) from error
