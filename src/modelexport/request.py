"""The arguments of one export, checked before anything is run or written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.export import ExportedProgram

from modelexport.attribution.strategies import ExportStrategy, Strategy, find_strategy
from modelexport.capture.inputs import ModelInputs, bind_inputs, parse_inputs
from modelexport.capture.model_state import check_has_weights, exceeds_one_file, unwrap_model
from modelexport.capture.trace import TorchOptions
from modelexport.checks import OutputPaths, check_options, check_outputs, graph_files
from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.exporters import (
    AUTO_EXPORTERS,
    Exporter,
    ModelKind,
    exporters_accepting,
    find_exporter,
)
from modelexport.keywords import StrPath
from modelexport.options import CallOptions, ExportOptions


class Attempt(NamedTuple):
    """A strategy to try, with the exporter to use."""

    strategy: Strategy
    exporter: Exporter


class ExportRequest(msgspec.Struct, frozen=True):
    """The arguments of one export, checked."""

    model: nn.Module | ExportedProgram
    inputs: ModelInputs
    paths: OutputPaths
    options: ExportOptions
    call: CallOptions
    torch_options: TorchOptions
    attempts: tuple[Attempt, ...]


def check_request(
    model: object,
    example_inputs: Any,
    output_path: StrPath,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
) -> ExportRequest:
    """Check all arguments of an export.

    Args:
        model: The model.
        example_inputs: The example inputs, as `export_model` takes them.
        output_path: The path of the file to write.
        options: The options.
        call: The further keywords of `export_model`.
        verbose: Let torch print.

    Returns:
        The request, ready to be carried out.

    Raises:
        ArgumentError: A value cannot work.
        ArgumentTypeError: A value has the wrong type.
        FileError: A file cannot be written.
    """
    paths = check_outputs(output_path, options)
    check_options(options)
    module = _check_model(model)
    inputs = _check_inputs(module, example_inputs)
    torch_options = TorchOptions(
        optimize=options.optimize,
        opset_version=options.opset_version,
        input_names=_check_names(call.input_names, "input_names"),
        output_names=_check_names(call.output_names, "output_names"),
        dynamic_shapes=call.dynamic_shapes,
        external_data=options.external_data,
        verbose=verbose,
        with_graph_text=bool(graph_files(options)),
    )
    attempts = _plan_attempts(options)
    if isinstance(module, ExportedProgram):
        attempts = _keep_for_programs(attempts, call.dynamic_shapes)
    elif options.external_data is False and exceeds_one_file(module):
        raise ArgumentError(
            "the weights do not fit into one file: the limit is 2 GiB",
            hint="leave external_data out",
        )
    _check_opset(options.opset_version, attempts[0].exporter)
    return ExportRequest(module, inputs, paths, options, call, torch_options, attempts)


def _check_model(model: object) -> nn.Module | ExportedProgram:
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ArgumentTypeError(
            f"the model is {describe_type(model)}, not a torch.nn.Module",
            hint="pass the model object itself; call a class first, and load a path first",
        )
    check_has_weights(model)
    return unwrap_model(model) if isinstance(model, nn.Module) else model


def _check_inputs(model: nn.Module | ExportedProgram, example_inputs: Any) -> ModelInputs:
    if not isinstance(model, ExportedProgram):
        return bind_inputs(model, parse_inputs(example_inputs))
    if example_inputs is not None:
        raise ArgumentError("a program has its own inputs", hint="pass None as example_inputs")
    return ModelInputs((), {})


def _check_names(names: Sequence[str] | None, argument: str) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{argument} must be a list of names", hint='for example ["input_ids"]'
        )
    return list(names)


def _check_opset(opset_version: object, exporter: Exporter) -> None:
    if opset_version is None:
        return
    if isinstance(opset_version, bool) or not isinstance(opset_version, int):
        raise ArgumentTypeError(
            f"opset_version is {describe_type(opset_version)}", hint="pass a whole number"
        )
    low, high = exporter.opsets
    if not low <= opset_version <= high:
        raise ArgumentError(
            f"opset {opset_version} is out of range for the {exporter.name} exporter",
            hint=f"it writes opset {low} to {high}",
        )


def _plan_attempts(options: ExportOptions) -> tuple[Attempt, ...]:
    """Return the strategies to try in order, each with its exporter."""
    forced = None if options.exporter is None else find_exporter(options.exporter)
    if options.strategy != ExportStrategy.AUTO:
        strategy = find_strategy(options.strategy)
        return (Attempt(strategy, forced or find_exporter(strategy.exporter)),)
    tried = AUTO_EXPORTERS if forced is None else (forced,)
    attempts = tuple(Attempt(find_strategy(one.strategy), one) for one in tried)
    return attempts if options.fallback else attempts[:1]


def _keep_for_programs(attempts: tuple[Attempt, ...], dynamic_shapes: Any) -> tuple[Attempt, ...]:
    """Keep the attempts whose exporter accepts a program of torch.export."""
    if dynamic_shapes is not None:
        raise ArgumentError(
            "a program's shapes are fixed", hint="choose the dynamic ones in torch.export.export"
        )
    able = exporters_accepting(ModelKind.PROGRAM)
    kept = tuple(attempt for attempt in attempts if attempt.exporter in able)
    if not kept:
        raise ArgumentError(
            f"only the {' or '.join(one.name for one in able)} exporter takes a program",
            hint=f"use strategy {able[0].strategy} or auto",
        )
    return kept


def recommend_strategy(model: nn.Module | ExportedProgram) -> tuple[str, str]:
    """Recommend a strategy for a model.

    Args:
        model: A module, or a program of `torch.export`.

    Returns:
        The name of the strategy, and the reason.

    Raises:
        ArgumentTypeError: It is not a model.
    """
    model = _check_model(model)
    kind = ModelKind.MODULE
    if isinstance(model, ExportedProgram):
        kind = ModelKind.PROGRAM
    elif isinstance(model, torch.jit.ScriptModule):
        kind = ModelKind.SCRIPT
    able = exporters_accepting(kind)
    if len(able) == 1:
        return able[0].strategy, f"it is {kind}, which only the {able[0].name} exporter takes"
    first, *others = AUTO_EXPORTERS
    fallback = "".join(f"; auto falls back to {one.strategy} where it fails" for one in others)
    return first.strategy, f"{first.reason}{fallback}"
