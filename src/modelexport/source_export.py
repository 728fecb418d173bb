"""export_source(): load a model by name, make its example inputs, and export it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import msgspec

from modelexport.errors import ArgumentError, ArgumentTypeError, describe_type
from modelexport.exporters import EXPORTERS, find_exporter
from modelexport.keywords import SourceKeywords
from modelexport.modules.tags import make_policy, unmatched_names
from modelexport.onnx_file.model_file import as_path
from modelexport.option_values import check_flag, check_function, convert_options, spell_option
from modelexport.options import (
    SOURCE_KEYWORDS,
    CallOptions,
    ExportOptions,
    StrPath,
    recorded_options,
    resolve_names,
)
from modelexport.packages import import_package
from modelexport.report import ExportReport, warn_of_failures
from modelexport.request import check_options, check_outputs, graph_files

_SEED = 0
"""Random weights and inputs are drawn with it, so that the same command writes the same file."""


class SourceExport(NamedTuple):
    """An export of a source: its report, and what else its user should know."""

    report: ExportReport
    notes: tuple[str, ...]


def export_source(
    spec: StrPath,
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
        MissingPackageError: torch, or a package that loads the model, is not installed.
        ExportError: torch cannot export the model.
        ModelExportError: Any other error, such as a path that cannot be written.
    """
    if not isinstance(spec, str | os.PathLike):
        raise ArgumentTypeError(
            f"spec must be the name of a model, got {describe_type(spec)}",
            hint="use export_model for a model that is loaded already",
        )
    check_flag("verbose", verbose)
    check_function("on_step", on_step)
    chosen = convert_options(resolve_names(options, SOURCE_KEYWORDS), ExportOptions)
    report, notes = run_export(os.fspath(spec), output_path, chosen, on_step, verbose)
    for part in report.parts.values() or (report,):
        warn_of_failures(part)
    return msgspec.structs.replace(report, notes=(*notes, *report.notes))


def run_export(
    spec: str,
    output: StrPath,
    options: ExportOptions,
    on_step: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> SourceExport:
    """Load and export a model as `export_source` does, with the options in their record.

    It does not warn: the notes are returned beside the report.
    """
    check_options(options)
    if options.generation:
        return _run_generation(spec, output, options, on_step or (lambda _: None), verbose)
    check_outputs(output, options)
    specs = _check_input_files(spec, options)
    step = on_step or (lambda _: None)
    step("load torch and the model")
    import_package("torch")
    # Only here, so that mistakes in the options are reported before seconds of imports.
    from modelexport.pipeline import export_with
    from modelexport.source import dynamic_axes
    from modelexport.source.example_inputs import InputRequest
    from modelexport.source.load import open_source

    def export(dynamic_shapes: Any = None) -> ExportReport:
        call = CallOptions(
            dynamic_shapes=dynamic_shapes,
            on_step=step,
            source=source.name,
            inputs_from=prepared.origin,
            source_options=recorded,
            seed=_SEED,
        )
        return export_with(source.model, prepared.inputs, output, options, call, verbose)

    request = InputRequest(specs, options.input_text, options.input_shapes)
    recorded = recorded_options(options)
    source = open_source(spec, recorded, options.trust_remote_code, _SEED, step)
    with dynamic_axes.as_input_error(request != InputRequest() or source.inputs is not None):
        step("make example inputs")
        prepared = dynamic_axes.prepare_inputs(
            source, request, options.dynamic, options.dynamic_axes, _SEED
        )
        if prepared.axes is None:
            report, fixed_axes = export(), list[str]()
        else:
            report, fixed_axes = dynamic_axes.export_dynamic(
                export, source.model, prepared, may_drop=options.dynamic, on_step=step
            )
    return SourceExport(report, (*source.notes, *fixed_axes, *_idle_options(options, report)))


def _run_generation(
    spec: str,
    output: StrPath,
    options: ExportOptions,
    step: Callable[[str], None],
    verbose: bool,
) -> SourceExport:
    """Load a language model and export its parts."""
    from modelexport.generation.request import check_generation_options

    check_generation_options(output, options)
    specs = _check_input_files(spec, options)
    step("load torch and the model")
    import_package("torch")
    from modelexport.generation.export import export_parts
    from modelexport.source import dynamic_axes
    from modelexport.source.example_inputs import InputRequest
    from modelexport.source.generation_inputs import find_tokenizer, make_generation_inputs
    from modelexport.source.load import open_source

    request = InputRequest(specs, options.input_text, options.input_shapes)
    recorded = recorded_options(options)
    source = open_source(spec, recorded, options.trust_remote_code, _SEED, step)
    with dynamic_axes.as_input_error(request != InputRequest() or source.inputs is not None):
        step("make example inputs")
        inputs, origin = make_generation_inputs(source, request, _SEED)
        call = CallOptions(
            on_step=step,
            source=source.name,
            inputs_from=origin,
            source_options=recorded,
            seed=_SEED,
        )
        report = export_parts(
            source.model,  # type: ignore[arg-type]  # make_generation_inputs has checked it
            inputs,
            output,
            options,
            call,
            verbose,
            find_tokenizer(source),
        )
    return SourceExport(report, (*source.notes, *_idle_options(options, report)))


def _check_input_files(spec: str, options: ExportOptions) -> Path | None:
    """Return the specs of the inputs, if no graph file overwrites them or the model.

    Raises:
        ArgumentError: A graph file would overwrite them, or no file can have their name.
    """
    specs = None if options.input_specs is None else as_path(options.input_specs)
    read = {path.resolve() for path in filter(None, (*source_files(spec), specs))}
    for path in graph_files(options).values():
        if Path(path).resolve() in read:
            raise ArgumentError(
                f"the graph file {path} would overwrite a file that the export reads",
                hint="choose another file",
            )
    return specs


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
        f"{spell_option(option)} names {name}, but no module matches it"
        for option, names in unmatched_names(policy, classes).items()
        for name in names
    ]
    return notes


def source_files(spec: str) -> list[Path]:
    """Return the files that the name of a model stands for.

    Those of a folder, or the one file, also of a factory in it; none for a folder that cannot be
    read.
    """
    path = Path(spec)
    if ".py:" in spec and not path.exists():
        path = Path(spec.rpartition(":")[0])
    try:
        return list(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return []
