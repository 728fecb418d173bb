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

from modelexport import __version__
from modelexport.attribution.evidence import Facts
from modelexport.attribution.module_records import build_map
from modelexport.attribution.strategies import ExportStrategy, attribute
from modelexport.capture.failure import explain_failure
from modelexport.capture.flops import count_flops
from modelexport.capture.graph_inputs import match_inputs
from modelexport.capture.inputs import check_model_runs, in_signature_order
from modelexport.capture.model_state import EXPORT_LOCK, check_model, kind_of_model
from modelexport.capture.module_tree import read_module_tree, read_program_tree
from modelexport.capture.trace import Baseline
from modelexport.errors import ArgumentError, ExportError, ModelExportError
from modelexport.export_files import (
    Exported,
    write_files,
    write_graph_text,
    write_graphml,
    write_page,
)
from modelexport.exporters import (
    AUTO_EXPORTERS,
    CALL_ORDER_EXPORTERS,
    exporters_accepting,
)
from modelexport.graph.flat import flatten, pause_collector
from modelexport.keywords import ExporterKeywords, ModelKeywords
from modelexport.modules.tags import assign_tags, make_policy
from modelexport.modules.tree import ModuleTree
from modelexport.onnx_file.atomic_write import Transaction, transaction
from modelexport.onnx_file.model_file import parse_model
from modelexport.option_values import check_flag, convert_options
from modelexport.options import (
    KEEP_NAMESPACE,
    MODEL_KEYWORDS,
    CallOptions,
    ExportOptions,
    StrPath,
    resolve_names,
)
from modelexport.packages import require_package
from modelexport.report import ExportReport, Steps, markdown_page, report_path, warn_of_failures
from modelexport.request import ExportRequest, check_options, check_request
from modelexport.tagged.example_inputs import record_example
from modelexport.tagged.hierarchy_map import HierarchyMap
from modelexport.tagged.records import (
    ExampleInput,
    ExportRecord,
    ModelRecord,
    sidecar_path,
)
from modelexport.tagged.strip import scrub_bytes
from modelexport.tagged.tables import tensor_infos
from modelexport.viewing.page import page_path


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
        FallbackWarning: `auto` used torchscript, because dynamo failed.
        GraphmlWarning: The model was exported, but its GraphML could not be written.
        ViewWarning: The model was exported, but its page could not be written.
    """
    named = resolve_names(options, MODEL_KEYWORDS)
    split = _split_options({"strategy": strategy, "optimize": optimize, **named})
    report = export_with(model, example_inputs, output_path, *split, check_flag("verbose", verbose))
    warn_of_failures(report)
    return report


def _split_options(named: Mapping[str, Any]) -> tuple[ExportOptions, CallOptions]:
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
    target, steps = request.target, Steps(call.on_step)
    temp_dir = None if options.temp_dir is None else Path(options.temp_dir)
    with EXPORT_LOCK, transaction(target.parent, temp_dir) as stage:
        with steps.step("read the module tree"):
            tree, tags = _read_modules(request)
        if options.flops:
            with steps.step("count the operations"):
                tree = _count_flops(request, tree)
        exported = _export_baseline(request, tree, stage, steps)
        with steps.step("attribute nodes to modules"), pause_collector():
            proto = parse_model(exported.data, target)
            facts = Facts(flatten(proto), tree, exported.baseline.trace)
            attributions = attribute(exported.strategy, facts)
        with steps.step("build the map"), pause_collector():
            records = _make_records(request, tree, exported, proto)
            hierarchy = build_map(facts, tags, attributions, *records)
        with steps.step("write the files"), pause_collector():
            model_file = write_files(stage, request, exported, hierarchy)
        report = _make_report(request, exported, hierarchy, steps)
        if report.report_path is not None:
            page = stage.write("report", [markdown_page(report).encode()])
            stage.publish(page, report.report_path.name)
        # The model is placed last, so that no program sees it without the files it refers to.
        stage.publish(model_file, target.name)
        stage.commit()
    report = write_graph_text(report, request, exported)
    if options.with_view:
        with steps.step("write the page"):
            report = write_page(report)
    if request.graphml is not None:
        with steps.step("write the GraphML"):
            report = write_graphml(report, request.graphml, options.graphml_parameters)
    return report


def _read_modules(request: ExportRequest) -> tuple[ModuleTree, dict[str, str | None]]:
    """Read the module tree and derive the tag of every module."""
    model, options = request.model, request.options
    read = read_program_tree if isinstance(model, ExportedProgram) else read_module_tree
    tree = read(model)  # type: ignore[arg-type]  # the test above chose the function
    policy = make_policy(
        options.torch_nn_exceptions, options.include, options.exclude, options.max_depth
    )
    return tree, assign_tags(tree, policy)


def _count_flops(request: ExportRequest, tree: ModuleTree) -> ModuleTree:
    """Return the module tree with the floating-point operations of each module."""
    assert isinstance(request.model, nn.Module)  # see check_request
    counts = count_flops(request.model, tree, request.inputs)
    modules = {
        path: msgspec.structs.replace(module, flops=counts.get(path))
        for path, module in tree.modules.items()
    }
    return ModuleTree(modules, tree.tensor_shapes)


def _export_baseline(
    request: ExportRequest, tree: ModuleTree, stage: Transaction, steps: Steps
) -> Exported:
    """Let torch write the baseline, with the next attempt where an exporter fails."""
    model, inputs = request.model, request.inputs
    failures: list[tuple[str, Exception]] = []
    for strategy, exporter in request.attempts:
        # Exporters need torch, so that `exporters.py` only names the module that runs each.
        capture = importlib.import_module(exporter.capture)
        path = stage.subfolder(exporter.name) / request.target.name
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
            if not request.options.scrub:
                return Exported(strategy, exporter, reason, baseline, baseline.data)
            # After the kind of its error, torch may quote the model's code.
            reason = None if reason is None else reason.partition(":")[0]
            return Exported(strategy, exporter, reason, baseline, scrub_bytes(baseline.data))
    raise ExportError(
        "torch cannot export this model" + (" with either exporter" if len(failures) > 1 else ""),
        hint="verbose=True or -v shows what torch printed",
        details=[line for name, error in failures for line in explain_failure(error).lines(name)],
    ) from failures[0][1]


def _make_records(
    request: ExportRequest, tree: ModuleTree, exported: Exported, proto: onnx.ModelProto
) -> tuple[ModelRecord, ExportRecord]:
    """Describe the model and the export, as the file and the sidecar record them."""
    call, root = request.call, tree[""].qualified_class
    opset = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
    model = ModelRecord(root, call.source or root, request.target.name, opset, proto.ir_version)
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
        example_inputs=_record_inputs(request, exported.exporter.name, proto),
        scrubbed=bool(request.options.scrub) or msgspec.UNSET,
        namespaces=request.options.scrub == KEEP_NAMESPACE or msgspec.UNSET,
    )
    return model, export


def _record_inputs(
    request: ExportRequest, exporter: str, proto: onnx.ModelProto
) -> dict[str, ExampleInput]:
    """Record the example inputs by the names of the graph, for commands that run the file."""
    model, inputs = request.model, request.inputs
    if not isinstance(model, nn.Module):
        return {}
    if exporter not in CALL_ORDER_EXPORTERS:
        inputs = in_signature_order(model, inputs)
    try:
        arrays = match_inputs(proto.graph, model, inputs)
    except (ArgumentError, KeyError):  # inputs that are nested, or of a type numpy lacks
        return {}
    return {name: record_example(array) for name, array in arrays.items()}


@functools.cache
def _versions() -> dict[str, str]:
    names = ("torch", "onnx", "onnxscript")
    return {"modelexport": __version__} | {name: importlib.metadata.version(name) for name in names}


def _make_report(
    request: ExportRequest, exported: Exported, hierarchy: HierarchyMap, steps: Steps
) -> ExportReport:
    target, options = request.target, request.options
    notes = (
        note.text if options.scrub else f"{note.location}: {note.text}"
        for note in exported.baseline.tracer_notes
    )
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
        notes=tuple(dict.fromkeys(notes)),
        report_path=report_path(target) if options.with_report else None,
        view_path=page_path(target) if options.with_view else None,
    )


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
        check_options(_split_options({**named, "strategy": strategy, "optimize": optimize})[0])

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
    first, *others = AUTO_EXPORTERS
    fallback = "".join(f"; auto falls back to {one.strategy} where it fails" for one in others)
    return first.strategy, f"{first.reason}{fallback}"
