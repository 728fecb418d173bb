"""export_model(): from a live model to a tagged file and its sidecar, step by step.

The steps, in order: check the arguments, read the module tree, let torch write the baseline while
its calls are recorded, attribute nodes to modules, build the map, write the files. All but the
first are in `staged_export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.export import ExportedProgram

from modelexport.attribution.strategies import ExportStrategy
from modelexport.capture.model_state import EXPORT_LOCK, check_model, kind_of_model
from modelexport.exporters import (
    auto_exporters,
    exporters_accepting,
)
from modelexport.keywords import ExporterKeywords, ModelKeywords
from modelexport.onnx_file.atomic_write import transaction
from modelexport.option_values import check_flag, convert_options
from modelexport.options import (
    MODEL_KEYWORDS,
    CallOptions,
    ExportOptions,
    StrPath,
    resolve_names,
)
from modelexport.packages import require_package
from modelexport.report import ExportReport, Steps, warn_of_failures
from modelexport.request import check_options, check_request
from modelexport.staged_export import finish_export, stage_export


def export_model(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    output_path: StrPath,
    strategy: str = ExportStrategy.AUTO,
    optimize: bool = True,
    verbose: bool = False,
    **options: Unpack[ModelKeywords],
) -> ExportReport:
    """Export a model with torch's own exporter and map every node to the module that made it.

    The graph is the one that `torch.onnx.export` writes. All files are written or none, and the
    model is left unchanged.

    Args:
        model: A module, or a program of `torch.export`.
        example_inputs: A tensor, a tuple of positional inputs or a dict of keyword inputs; or both
            kinds, as `(a, {"b": b})` or `((a,), {"b": b})`. Inputs may be nested, and objects of
            classes that are registered with `torch.export`, such as caches. None for a program,
            which has its own.
        output_path: A name that ends in `.onnx`; the sidecar and a data file are named after it.
        strategy: `auto`, `fx`, `htp`, `usage_based` or a registered one.
        optimize: Let the exporter optimise the graph.
        verbose: Let torch print.
        **options: The fields of `ExportOptions` that do not say how to load a model, and those of
            `CallOptions`.

    Returns:
        The report: what was used, what was written, and the whole map.

    Raises:
        UnknownOptionError: There is no option of this name.
        ArgumentError: A value cannot work.
        ArgumentTypeError: A value has the wrong type.
        ExportError: torch cannot export the model.
        ModelExportError: Any other error, such as a file that cannot be written.

    Warns:
        FallbackWarning: `auto` used another exporter, because dynamo failed.
        GraphmlWarning: The model was exported, but its GraphML could not be written.
        ViewWarning: The model was exported, but its page could not be written.
    """
    named = resolve_names(options, MODEL_KEYWORDS)
    split = split_options({"strategy": strategy, "optimize": optimize, **named})
    report = export_with(model, example_inputs, output_path, *split, check_flag("verbose", verbose))
    warn_of_failures(report)
    return report


def split_options(named: Mapping[str, Any]) -> tuple[ExportOptions, CallOptions]:
    """Sort the keywords of `export_model` into their two records, and check their types."""
    further = {name: named[name] for name in CallOptions.__struct_fields__ if name in named}
    rest = {name: value for name, value in named.items() if name not in further}
    return convert_options(rest, ExportOptions), convert_options(further, CallOptions)


def export_with(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    output_path: StrPath,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
) -> ExportReport:
    """Export a model as `export_model` does, with the options in their records, and do not warn.

    The options that say how to load a model have no effect.
    """
    require_package("onnxscript")  # or dynamo fails, and auto falls back
    request = check_request(model, example_inputs, output_path, options, call, verbose)
    steps = Steps(call.on_step)
    temp_dir = None if options.temp_dir is None else Path(options.temp_dir)
    with EXPORT_LOCK, transaction(request.target.parent, temp_dir) as stage:
        staged = stage_export(request, stage, steps)
        stage.commit()
    return finish_export(staged, steps)


class HierarchyExporter:
    """`export_model` with its options given once, and checked at once."""

    def __init__(
        self,
        strategy: str = ExportStrategy.AUTO,
        optimize: bool = True,
        verbose: bool = False,
        **options: Unpack[ModelKeywords],
    ) -> None:
        named = resolve_names(options, MODEL_KEYWORDS)
        self.strategy = strategy
        self.options: dict[str, Any] = {**named, "optimize": optimize, "verbose": verbose}
        check_flag("verbose", verbose)
        check_options(split_options({**named, "strategy": strategy, "optimize": optimize})[0])

    def export(
        self,
        model: nn.Module | ExportedProgram,
        example_inputs: Any,
        output_path: StrPath,
        **options: Unpack[ExporterKeywords],
    ) -> ExportReport:
        """Export one model.

        Args:
            model: A module, or a program of `torch.export`.
            example_inputs: The example inputs, as `export_model` takes them.
            output_path: The path of the file to write.
            **options: Options of `export_model`, which override those of the exporter.

        Returns:
            The report.

        Raises:
            ModelExportError: As `export_model` does.
        """
        given = resolve_names(options, MODEL_KEYWORDS, also=("verbose",))
        merged = {"strategy": self.strategy, **self.options, **given}
        verbose = check_flag("verbose", merged.pop("verbose"))
        split = split_options(merged)
        report = export_with(model, example_inputs, output_path, *split, verbose)
        warn_of_failures(report)
        return report


def recommend_strategy(model: nn.Module | ExportedProgram) -> tuple[str, str]:
    """Recommend a strategy for a model.

    Args:
        model: A module, or a program of `torch.export`.

    Returns:
        The name of the strategy, and the reason.

    Raises:
        ArgumentTypeError: It is not a model.
    """
    kind = kind_of_model(check_model(model))
    able = exporters_accepting(kind)
    if len(able) == 1:
        return able[0].strategy, f"it is {kind}, which only the {able[0].name} exporter takes"
    first, *others = auto_exporters(kind)
    names = " or ".join(f"{one.strategy} with {one.name}" for one in others)
    fallback = f"; auto falls back to {names} where it fails"
    return first.strategy, f"{first.reason}{fallback}"
