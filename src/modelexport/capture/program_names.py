"""Names for the inputs and outputs of a program that takes or returns objects such as caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

# Private by its name only: torch's own way to nest arguments.
from torch.utils._pytree import tree_unflatten

from modelexport.capture.hooks import OutputFilter
from modelexport.capture.pytrees import holds_tree, named_leaves

Names = Sequence[str] | None
"""Names in the file; None if torch chooses them."""


def name_program(program: ExportedProgram, input_names: Names, output_names: Names) -> Any:
    """Return the names of inputs and outputs as arguments for torch.

    Names that the caller chose are kept. Without objects, torch chooses the others.
    """
    input_names = input_names or _input_names(program)
    output_names = output_names or _output_names(program, input_names or ())
    return {"input_names": input_names, "output_names": output_names}


def placeholder_inputs(program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a program as they are nested, with empty tensors as leaves."""
    specs = program.graph_signature.input_specs
    leaves = [_placeholder(spec.arg) for spec in specs if spec.kind is InputKind.USER_INPUT]
    args, kwargs = tree_unflatten(leaves, program.call_spec.in_spec)
    return tuple(args), dict(kwargs)


def _placeholder(argument: object) -> Any:
    if isinstance(argument, ConstantArgument):
        return argument.value
    return torch.empty(0, device="meta")


def _input_names(program: ExportedProgram) -> list[str] | None:
    """Return names as an export of the model gives them; None if no input is an object."""
    try:
        args, kwargs = placeholder_inputs(program)
    except Exception:  # a class of the caller that takes no such tensors
        return None
    if not holds_tree((args, kwargs)):
        return None
    # Undocumented: the signature of the root, with the names of forward's arguments.
    signature = program.module_call_graph[0].signature
    arguments = list(getattr(signature, "forward_arg_names", None) or ())
    arguments += [f"args_{number}" for number in range(len(arguments), len(args))]
    named = (*zip(arguments, args, strict=False), *kwargs.items())
    leaves = (leaf for name, value in named for leaf in named_leaves(name, value))
    return [name for name, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _output_names(program: ExportedProgram, taken: Sequence[str]) -> list[str] | None:
    """Return names as an export of the model gives them; None if no output is an object."""
    specs = program.graph_signature.output_specs
    leaves = [_placeholder(spec.arg) for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    output_filter = OutputFilter(taken)
    try:
        output_filter(nn.Module(), (), tree_unflatten(leaves, program.call_spec.out_spec))
    except Exception:  # a class of the caller that takes no such tensors
        return None
    return output_filter.names if output_filter.has_trees else None
