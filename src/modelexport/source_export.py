"""export_source(): load a model by name, make its example inputs, and export it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import msgspec

from modelexport.checks import check_options, check_outputs, graph_files
from modelexport.errors import ArgumentTypeError
from modelexport.exporters import EXPORTERS, find_exporter
from modelexport.keywords import SourceKeywords, StrPath
from modelexport.modules.tags import make_policy, unmatched_names
from modelexport.options import (
    SOURCE_KEYWORDS,
    CallOptions,
    ExportOptions,
    recorded_options,
    resolve_names,
)
from modelexport.report import ExportReport, warn_of_failures

if TYPE_CHECKING:
    from modelexport.source.dynamic_axes import PreparedInputs
    from modelexport.source.load import LoadedModel

_SEED = 0
"""Random weights and inputs are drawn with it, so that the same command writes the same file."""


class SourceExport(NamedTuple):
    """An export of a source: its report, and what else its user should know."""

    report: ExportReport
    notes: tuple[str, ...]


def export_source(
    spec: str,
    output_path: StrPath,
    *,
    verbose: bool = False,
    on_step: Callable[[str], None] | None = None,
    **options: Unpack[SourceKeywords],
) -> ExportReport:
    """Load a model by its name and export it, as `modelexport export` does.

    Args:
        spec: A local Hugging Face folder, a hub name, a program saved by torch.export (`.pt2`), or
            a factory, `package.module:name` or `path/to/file.py:name`.
        output_path: Where the model goes; the name ends in `.onnx`.
        verbose: Let torch print.
        on_step: Called with the name of each step as it begins.
        **options: The fields of `ExportOptions`.

    Returns:
        The report. Its `notes` also name options that had no effect.

    Raises:
        UnknownOptionError: There is no option of this name.
        ArgumentTypeError: An option has the wrong type.
        SourceError: The model or its inputs cannot be loaded.
        ExportError: torch cannot export the model.
        ModelExportError: Any other error, such as a path that cannot be written.
    """
    named = resolve_names(options, SOURCE_KEYWORDS)
    try:
        chosen = msgspec.convert(named, ExportOptions)
    except msgspec.ValidationError as error:
        raise ArgumentTypeError(
            f"an option has the wrong type: {error}", hint="see ExportOptions for the types"
        ) from error
    report, notes = run_export(spec, str(output_path), chosen, on_step, verbose)
    warn_of_failures(report)
    return msgspec.structs.replace(report, notes=(*notes, *report.notes))


def run_export(
    spec: str,
    output: str,
    options: ExportOptions,
    on_step: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> SourceExport:
    """Load a model, make its example inputs and export it, without a warning.

    Args:
        spec: What names the model.
        output: The path of the file to write.
        options: All options.
        on_step: Called with the name of each step as it begins.
        verbose: Let torch print.

    Returns:
        The report and notes.

    Raises:
        ModelExportError: As `export_source` does.
    """
    check_options(options)
    check_outputs(output, options)
    step = on_step or (lambda _: None)
    step("load torch and the model")
    # Only here, so that mistakes in the options are reported before seconds of imports.
    from modelexport.source.dynamic_axes import as_input_error, open_source, prepare_inputs
    from modelexport.source.example_inputs import InputRequest

    specs = None if options.input_specs is None else Path(options.input_specs)
    request = InputRequest(specs, options.input_text, options.input_shapes)
    recorded = recorded_options(options)
    source = open_source(spec, recorded, options.trust_remote_code, _SEED)
    with as_input_error(request != InputRequest() or source.inputs is not None):
        step("make example inputs")
        prepared = prepare_inputs(source, request, options.dynamic, options.dynamic_axes, _SEED)
        call = CallOptions(
            on_step=step,
            source=source.name,
            inputs_from=prepared.origin,
            source_options=recorded,
            seed=_SEED,
        )
        report, notes = _export_prepared(source, prepared, output, options, call, verbose)
    return SourceExport(report, (*source.notes, *notes, *_idle_options(options, report)))


def _export_prepared(
    source: LoadedModel,
    prepared: PreparedInputs,
    output: str,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
) -> tuple[ExportReport, list[str]]:
    """Export a loaded model, and say which of its dynamic axes the exporter fixed."""
    from modelexport.pipeline import export_with
    from modelexport.source.dynamic_axes import export_dynamic

    def export(dynamic_shapes: Any = None) -> ExportReport:
        shaped = msgspec.structs.replace(call, dynamic_shapes=dynamic_shapes)
        return export_with(source.model, prepared.inputs, output, options, shaped, verbose)

    if prepared.axes is None:
        return export(), []
    step = call.on_step or (lambda _: None)
    return export_dynamic(export, source.model, prepared, may_drop=options.dynamic, on_step=step)


def _idle_options(options: ExportOptions, report: ExportReport) -> list[str]:
    """Return a line for each option that had no effect."""
    notes = []
    if options.opset_version not in (None, report.hierarchy.model.opset):
        notes.append(f"torch could not convert this model to opset {options.opset_version}")
    for option, path in graph_files(options).items():
        if option != find_exporter(report.exporter).graph_option:
            able = " or ".join(one.name for one in EXPORTERS if one.graph_option == option)
            notes.append(f"{path} was not written: only the {able} exporter has such a graph")
    classes = {path: module.class_ for path, module in report.hierarchy.modules.items()}
    policy = make_policy(options.torch_nn_exceptions, options.include, options.exclude)
    notes += [
        f"{option} names {name}, but no module matches it"
        for option, names in unmatched_names(policy, classes).items()
        for name in names
    ]
    return notes


def source_files(spec: str) -> list[Path]:
    """Return the files that the name of a model stands for.

    Args:
        spec: A folder, a file, or a factory in a file.

    Returns:
        The files of the folder, or the one file; nothing for a folder that cannot be read.
    """
    path = Path(spec)
    if ".py:" in spec and not path.exists():
        path = Path(spec.rpartition(":")[0])
    try:
        return list(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return []
