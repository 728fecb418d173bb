"""export_model(): from a live model to a tagged file and its sidecar, step by step.

The steps, in order: check the arguments, read the module tree, let torch write the baseline while
its calls are recorded, attribute nodes to modules, build the map, write the files.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import msgspec
import onnx
from torch import nn
from torch.export import ExportedProgram

from modelexport.attribution.evidence import Facts
from modelexport.attribution.module_records import HierarchyMap, build_map, tagged_chunks
from modelexport.attribution.strategies import ExportStrategy, Strategy, attribute
from modelexport.capture.failure import explain_failure
from modelexport.capture.inputs import check_model_runs
from modelexport.capture.model_state import EXPORT_LOCK
from modelexport.capture.module_tree import read_module_tree, read_program_tree
from modelexport.capture.torchscript import note_lines
from modelexport.capture.trace import Baseline
from modelexport.checks import check_options, graph_files
from modelexport.errors import (
    ExportError,
    ModelExportError,
    first_line,
)
from modelexport.exporters import Exporter
from modelexport.garbage import pause_collector
from modelexport.graph.flat import flatten
from modelexport.graphml.write import export_graphml
from modelexport.keywords import ExporterKeywords, ModelKeywords, StrPath
from modelexport.modules.tags import assign_tags, make_policy
from modelexport.modules.tree import ModuleTree
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import Transaction, transaction, write_file
from modelexport.onnx_file.model_file import parse_model
from modelexport.options import (
    MODEL_KEYWORDS,
    CallOptions,
    ExportOptions,
    resolve_names,
)
from modelexport.report import ExportReport, Steps, markdown_page, report_path, warn_of_failures
from modelexport.request import ExportRequest, check_request
from modelexport.tagged.records import ExportRecord, ModelRecord, encode_sidecar, sidecar_path
from modelexport.tagged.strip import scrub_bytes
from modelexport.tagged.tables import tensor_infos


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
            kinds, as `(a, {"b": b})` or `((a,), {"b": b})`. None for a program, which has its own.
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
        FallbackWarning: `auto` used torchscript, because dynamo failed.
        GraphmlWarning: The model was exported, but its GraphML could not be written.
    """
    named = resolve_names(options, MODEL_KEYWORDS)
    split = _split_options({"strategy": strategy, "optimize": optimize, **named})
    report = export_with(model, example_inputs, output_path, *split, verbose)
    warn_of_failures(report)
    return report


def _split_options(named: Mapping[str, Any]) -> tuple[ExportOptions, CallOptions]:
    """Sort the keywords of `export_model` into their two records."""
    further = {name: named[name] for name in CallOptions.__struct_fields__ if name in named}
    rest = {name: value for name, value in named.items() if name not in further}
    return ExportOptions(**rest), CallOptions(**further)


def export_with(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    output_path: StrPath,
    options: ExportOptions,
    call: CallOptions,
    verbose: bool,
) -> ExportReport:
    """Export a model with options in their records, without a warning.

    Args:
        model: A module, or a program of `torch.export`.
        example_inputs: The example inputs, as `export_model` takes them.
        output_path: The path of the file to write.
        options: The options; those that say how to load a model have no effect.
        call: The further keywords of `export_model`.
        verbose: Let torch print.

    Returns:
        The report.

    Raises:
        ModelExportError: As `export_model` does.
    """
    request = check_request(model, example_inputs, output_path, options, call, verbose)
    target, steps = request.paths.onnx, Steps(call.on_step)
    temp_dir = None if options.temp_dir is None else Path(options.temp_dir)
    with EXPORT_LOCK, transaction(target.parent, temp_dir) as stage:
        with steps.step("read the module tree"):
            tree, tags = _read_modules(request)
        exported = _export_baseline(request, tree, stage, steps)
        with steps.step("attribute nodes to modules"), pause_collector():
            proto = parse_model(exported.data, target)
            facts = Facts(flatten(proto), tree, exported.baseline.trace)
            attributions = attribute(exported.strategy, facts)
        with steps.step("build the map"), pause_collector():
            records = _make_records(request, tree, exported, proto)
            hierarchy = build_map(facts, tags, attributions, *records)
        with steps.step("write the files"), pause_collector():
            model_file = _write_files(stage, request, exported, hierarchy)
        report = _make_report(request, exported, hierarchy, steps)
        if report.report_path is not None:
            page = stage.write("report", [markdown_page(report).encode()])
            stage.publish(page, report.report_path.name)
        # The model is placed last, so that no program sees it without the files it refers to.
        stage.publish(model_file, target.name)
        stage.commit()
    report = _write_graph_text(report, request, exported)
    if request.paths.graphml is not None:
        with steps.step("write the GraphML"):
            report = _write_graphml(report, request.paths.graphml, options.graphml_parameters)
    return report


class _Exported(msgspec.Struct, frozen=True):
    """The baseline that torch wrote, and how."""

    strategy: Strategy
    exporter: Exporter
    reason: str | None
    """Why an earlier attempt failed."""
    baseline: Baseline
    data: wire.Buffer
    """The bytes of the model, scrubbed if that is wanted."""


def _read_modules(request: ExportRequest) -> tuple[ModuleTree, dict[str, str | None]]:
    """Read the module tree and derive the tag of every module."""
    model, options = request.model, request.options
    read = read_program_tree if isinstance(model, ExportedProgram) else read_module_tree
    tree = read(model)  # type: ignore[arg-type]  # the test above chose the function
    policy = make_policy(
        options.torch_nn_exceptions, options.include, options.exclude, options.max_depth
    )
    return tree, assign_tags(tree, policy)


def _export_baseline(
    request: ExportRequest, tree: ModuleTree, stage: Transaction, steps: Steps
) -> _Exported:
    """Let torch write the baseline, with the next attempt where an exporter fails."""
    model, inputs = request.model, request.inputs
    failures: list[tuple[str, Exception]] = []
    for strategy, exporter in request.attempts:
        # Exporters need torch, so that `exporters.py` only names the module that runs each.
        capture = importlib.import_module(exporter.capture)
        path = stage.subfolder(exporter.name) / request.paths.onnx.name
        try:
            with steps.step(f"export with torch ({exporter.name})"):
                baseline: Baseline = capture.export(
                    model, tree, inputs, path, request.torch_options
                )
        except (ModelExportError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            # An exporter's error is misleading where the model does not accept these inputs.
            if not failures and isinstance(model, nn.Module):
                check_model_runs(model, inputs)
            failures.append((exporter.name, error))
        else:
            reason = explain_failure(failures[0][1]).line if failures else None
            return _finish_baseline(request.options.scrub, strategy, exporter, reason, baseline)
    raise ExportError(
        "torch cannot export this model" + (" with either exporter" if len(failures) > 1 else ""),
        hint="verbose=True or -v shows what torch printed",
        details=[line for name, error in failures for line in explain_failure(error).lines(name)],
    ) from failures[0][1]


def _finish_baseline(
    scrub: bool, strategy: Strategy, exporter: Exporter, reason: str | None, baseline: Baseline
) -> _Exported:
    """Take out what identifies the exporting machine, if that is wanted."""
    if not scrub:
        return _Exported(strategy, exporter, reason, baseline, baseline.data)
    # After the kind of its error, torch may quote the model's code.
    kind = None if reason is None else reason.partition(":")[0]
    return _Exported(strategy, exporter, kind, baseline, scrub_bytes(baseline.data))


def _make_records(
    request: ExportRequest, tree: ModuleTree, exported: _Exported, proto: onnx.ModelProto
) -> tuple[ModelRecord, ExportRecord]:
    """Describe the model and the export, as the file and the sidecar record them."""
    call, root = request.call, tree[""].qualified_class
    opset = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
    model = ModelRecord(root, call.source or root, request.paths.onnx.name, opset, proto.ir_version)
    export = ExportRecord(
        strategy=exported.strategy.name,
        exporter=exported.exporter.name,
        requested=str(request.options.strategy),
        fallback_reason=exported.reason,
        seed=call.seed,
        inputs_from=call.inputs_from,
        source_options=call.source_options,
        inputs=tensor_infos(proto.graph.input),
        outputs=tensor_infos(proto.graph.output),
        dropped_outputs=exported.baseline.dropped_outputs,
        versions=_versions(),
        scrubbed=request.options.scrub or msgspec.UNSET,
    )
    return model, export


@functools.cache
def _versions() -> dict[str, str]:
    names = ("modelexport", "torch", "onnx", "onnxscript")
    return {name: importlib.metadata.version(name) for name in names}


def _write_files(
    stage: Transaction, request: ExportRequest, exported: _Exported, hierarchy: HierarchyMap
) -> Path:
    """Place the data files and the sidecar, and write the model for a later step to place."""
    for name, path in sorted(exported.baseline.files.items()):
        stage.publish(path, name)
    sidecar = stage.write("sidecar", [encode_sidecar(hierarchy.sidecar)])
    stage.publish(sidecar, sidecar_path(request.paths.onnx).name)
    data = exported.data
    return stage.write("model", [data] if request.options.clean else tagged_chunks(data, hierarchy))


def _make_report(
    request: ExportRequest, exported: _Exported, hierarchy: HierarchyMap, steps: Steps
) -> ExportReport:
    target, options = request.paths.onnx, request.options
    return ExportReport(
        requested=str(options.strategy),
        strategy=exported.strategy.name,
        exporter=exported.exporter.name,
        fallback_reason=exported.reason,
        onnx_path=target,
        sidecar_path=sidecar_path(target),
        data_paths=tuple(target.parent / name for name in sorted(exported.baseline.files)),
        hierarchy=hierarchy.sidecar,
        timings=steps.timings,
        notes=note_lines(exported.baseline.tracer_notes, with_locations=not options.scrub),
        report_path=report_path(target) if options.with_report else None,
    )


def _write_graph_text(
    report: ExportReport, request: ExportRequest, exported: _Exported
) -> ExportReport:
    """Write the exporter's own graph, if a file for it is named and the exporter has one."""
    path = graph_files(request.options).get(exported.exporter.graph_option)
    if path is None or exported.baseline.graph_text is None:
        return report
    write_file(Path(path), exported.baseline.graph_text.encode())
    return msgspec.structs.replace(report, graph_path=Path(path))


def _write_graphml(report: ExportReport, graphml: Path, parameters: str) -> ExportReport:
    """Write the GraphML; a failure is in the report, since the model is exported already."""
    try:
        files = export_graphml(report.onnx_path, graphml, parameters=parameters)
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModelExportError):
            message = error.headline
        return msgspec.structs.replace(report, graphml_error=message)
    return msgspec.structs.replace(report, graphml_path=files.graphml, graphml_data_path=files.data)


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
        self.options = {**named, "optimize": optimize, "verbose": verbose}
        check_options(_split_options({**named, "strategy": strategy})[0])

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
        return export_model(model, example_inputs, output_path, **merged)
