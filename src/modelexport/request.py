"""The arguments of one export, checked before anything is run or written.

torch is imported by the functions that get a model: options and paths are checked before that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from modelexport.attribution.strategies import ExportStrategy, Strategy, find_strategy
from modelexport.capture.trace import TorchOptions
from modelexport.errors import ArgumentError
from modelexport.exporters import (
    GRAPH_OPTIONS,
    Exporter,
    ModelKind,
    auto_exporters,
    exporters_accepting,
    find_exporter,
)
from modelexport.graphml.format import check_graphml, check_mode, data_path
from modelexport.modules.tags import make_policy
from modelexport.onnx_file.atomic_write import check_output_path, check_writable
from modelexport.option_values import spell_option
from modelexport.options import KEEP_NAMESPACE, CallOptions, ExportOptions
from modelexport.report import report_path
from modelexport.tagged.records import sidecar_path
from modelexport.tagged.strip import check_no_graph_text
from modelexport.viewing.page import page_path

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from modelexport.capture.inputs import ModelInputs

Attempt = tuple[Strategy, Exporter]
"""A strategy to try, with the exporter to use."""


class ExportRequest(msgspec.Struct, frozen=True):
    """The arguments of one export, checked."""

    model: nn.Module | ExportedProgram
    inputs: ModelInputs
    target: Path
    """The file of the model."""
    graphml: Path | None
    """The file of its GraphML, if one is wanted."""
    options: ExportOptions
    call: CallOptions
    torch_options: TorchOptions
    attempts: tuple[Attempt, ...]


def check_request(
    model: object,
    example_inputs: Any,
    output_path: object,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
) -> ExportRequest:
    """Check all arguments of an export, as `export_model` takes them.

    Raises:
        ArgumentError: A value cannot work.
        ArgumentTypeError: A value has the wrong type.
        FileError: A file cannot be written.
    """
    target, graphml = check_outputs(output_path, options)
    check_options(options)
    from modelexport.capture.inputs import read_inputs
    from modelexport.capture.model_state import check_model, exceeds_one_file, kind_of_model

    module = check_model(model)
    inputs = read_inputs(module, example_inputs)
    torch_options = TorchOptions(
        optimize=options.optimize,
        opset_version=options.opset_version,
        input_names=call.input_names,
        output_names=call.output_names,
        dynamic_shapes=call.dynamic_shapes,
        external_data=options.external_data,
        verbose=verbose,
        with_graph_text=bool(graph_files(options)),
        needs_given_inputs=options.exporter is None,
    )
    attempts = _plan_attempts(options, kind_of_model(module))
    if kind_of_model(module) is ModelKind.PROGRAM:
        if options.flops:
            raise ArgumentError(
                f"{spell_option('flops')} needs the model; a saved program has no modules to run",
                hint="export the model itself",
            )
        attempts = _keep_for_programs(attempts, call.dynamic_shapes)
    elif options.external_data is False and exceeds_one_file(module):
        raise ArgumentError(
            "the weights do not fit into one file: the limit is 2 GiB",
            hint=f"leave {spell_option('external_data').rpartition('/')[2]} out",
        )
    return ExportRequest(module, inputs, target, graphml, options, call, torch_options, attempts)


def graph_files(options: ExportOptions) -> dict[str, str]:
    """Return the given files for the text form of an exporter's graph, by option."""
    given = {name: getattr(options, name) for name in GRAPH_OPTIONS}
    return {name: path for name, path in given.items() if path is not None}


def check_options(options: ExportOptions) -> None:
    """Raise for options that cannot work, whatever the model is.

    Raises:
        ArgumentError: A value is out of range or unknown, or two options exclude each other.
        ArgumentTypeError: A value has the wrong type.
    """
    if options.strategy != ExportStrategy.AUTO:
        find_strategy(options.strategy)
    if options.exporter is not None:
        find_exporter(options.exporter)
    if options.dynamic and options.dynamic_axes:
        raise ArgumentError(
            f"{spell_option('dynamic')} chooses the axes that {spell_option('dynamic_axes')} sets",
            hint="give one of them",
        )
    _check_cache_length(options)
    for shape in options.input_shapes.values():
        if any(size < 1 for size in shape):
            raise ArgumentError(
                f"sizes in {spell_option('input_shapes')} must be 1 or more, "
                f"got {','.join(map(str, shape))}",
                hint="write it as 1,128 or input_ids=1,128",
            )
    check_mode(options.graphml_parameters)
    check_no_graph_text(bool(options.scrub), *graph_files(options).values())
    if options.clean and options.scrub == KEEP_NAMESPACE:
        raise ArgumentError(
            f"{spell_option('clean')} writes nothing of the map, so there is no namespace to keep",
            hint=f"leave {spell_option('clean')} or {KEEP_NAMESPACE} out",
        )
    make_policy(options.torch_nn_exceptions, options.include, options.exclude, options.max_depth)
    _check_opset(options.opset_version, _plan_attempts(options, ModelKind.MODULE)[0][1])


def _check_cache_length(options: ExportOptions) -> None:
    length = options.max_cache_length
    if length is None:
        return
    if not options.generation:
        raise ArgumentError(
            f"{spell_option('max_cache_length')} goes with {spell_option('generation')}",
            hint="only a language model in parts has a cache",
        )
    if length < 1:
        raise ArgumentError(
            f"{spell_option('max_cache_length')} must be 1 or more, got {length}",
            hint="it is the number of tokens that the cache holds",
        )


def check_outputs(output_path: object, options: ExportOptions) -> tuple[Path, Path | None]:
    """Return the paths of the model and of its GraphML, if every file can be written.

    Raises:
        ArgumentError: A path is unsuitable, or one file would overwrite another.
        ArgumentTypeError: A path is not a path.
        FileError: A folder does not exist or cannot be written to.
    """
    target, graphml = check_output_path(output_path), None
    check_writable(target.parent)
    if options.with_graphml or options.graphml_output is not None:
        graphml = check_graphml(target, options.graphml_output, options.graphml_parameters)
    written = {path.resolve(): path for path in _list_outputs(target, graphml, options)}
    for graph_file in graph_files(options).values():
        _check_graph_file(check_output_path(graph_file, suffix=""), written)
    return target, graphml


def _list_outputs(target: Path, graphml: Path | None, options: ExportOptions) -> Iterator[Path]:
    yield from (target, sidecar_path(target), target.with_name(f"{target.name}.data"))
    if options.with_report:
        yield report_path(target)
    if options.with_view:
        yield page_path(target)
    if graphml is not None:
        yield from (graphml, data_path(graphml))


def _check_graph_file(path: Path, written: dict[Path, Path]) -> None:
    if path.resolve() in written:
        name = written[path.resolve()].name
        raise ArgumentError(
            f"the graph file {path} would overwrite {name}, which the export writes",
            hint="choose another file",
        )
    # A pipe or a device has no temporary file beside it: its folder need not be writable.
    special = path.exists() and not path.is_file()
    if not special:
        check_writable(path.parent)


def _check_opset(opset_version: int | None, exporter: Exporter) -> None:
    if opset_version is None:
        return
    low, high = exporter.opsets
    if not low <= opset_version <= high:
        raise ArgumentError(
            f"opset {opset_version} is out of range for the {exporter.name} exporter",
            hint=f"it writes opset {low} to {high}",
        )


def _plan_attempts(options: ExportOptions, kind: ModelKind) -> tuple[Attempt, ...]:
    """Return the strategies to try in order, each with its exporter."""
    forced = None if options.exporter is None else find_exporter(options.exporter)
    if options.strategy != ExportStrategy.AUTO:
        strategy = find_strategy(options.strategy)
        return ((strategy, forced or find_exporter(strategy.exporter)),)
    tried = auto_exporters(kind) if forced is None else (forced,)
    attempts = tuple((find_strategy(one.strategy), one) for one in tried)
    return attempts if options.fallback else attempts[:1]


def _keep_for_programs(attempts: tuple[Attempt, ...], dynamic_shapes: Any) -> tuple[Attempt, ...]:
    """Keep the attempts whose exporter accepts a program of torch.export."""
    if dynamic_shapes is not None:
        raise ArgumentError(
            "a program's shapes are fixed", hint="choose the dynamic ones in torch.export.export"
        )
    able = exporters_accepting(ModelKind.PROGRAM)
    kept = tuple(attempt for attempt in attempts if attempt[1] in able)
    if not kept:
        raise ArgumentError(
            f"only the {' or '.join(one.name for one in able)} exporter takes a program",
            hint=f"use strategy {able[0].strategy} or auto",
        )
    return kept
