"""One export, step by step: read the module tree, export, attribute nodes, build the map, write.

The files are registered in a transaction, which the caller commits; what is made from them, such as
a page, follows the commit.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx
from torch import nn
from torch.export import ExportedProgram

from modelexport import __version__
from modelexport.attribution.evidence import Facts
from modelexport.attribution.module_records import build_map
from modelexport.attribution.strategies import Strategy, attribute
from modelexport.capture.failure import explain_failure
from modelexport.capture.flops import count_flops
from modelexport.capture.graph_inputs import match_inputs
from modelexport.capture.inputs import check_model_runs, in_signature_order
from modelexport.capture.module_tree import read_module_tree, read_program_tree
from modelexport.capture.trace import Baseline
from modelexport.errors import ArgumentError, ExportError, ModelExportError, first_line
from modelexport.exporters import (
    CALL_ORDER_EXPORTERS,
    Exporter,
    find_exporter,
)
from modelexport.graph.flat import defer_full_collections, flatten, pause_collector
from modelexport.graphml.write import export_graphml
from modelexport.modules.tags import assign_tags, make_policy
from modelexport.modules.tree import ModuleTree
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import Transaction, write_file
from modelexport.onnx_file.model_file import opset_imports, parse_model
from modelexport.options import (
    KEEP_NAMESPACE,
)
from modelexport.report import ExportReport, Steps, markdown_page, report_path
from modelexport.request import ExportRequest, graph_files
from modelexport.tagged.example_inputs import record_example
from modelexport.tagged.hierarchy_map import HierarchyMap, tagged_chunks
from modelexport.tagged.records import (
    ExampleInput,
    ExportRecord,
    ModelRecord,
    sidecar_path,
)
from modelexport.tagged.strip import scrub_bytes
from modelexport.tagged.tables import tensor_infos
from modelexport.viewing.page import page_path, view


class StagedExport(msgspec.Struct, frozen=True):
    """An export whose files are registered in a transaction."""

    request: ExportRequest
    report: ExportReport
    graph_text: str | None
    """The exporter's own graph, if it was asked for."""


@defer_full_collections()
def stage_export(
    request: ExportRequest,
    stage: Transaction,
    steps: Steps,
    label: str = "",
    change_baseline: Callable[[Baseline], Baseline] | None = None,
) -> StagedExport:
    """Export a model into a transaction, which the caller commits.

    Args:
        request: The arguments.
        stage: The transaction.
        steps: The steps so far.
        label: How the names of temporary files begin, where a transaction has several exports.
        change_baseline: Called with the baseline before it is read; it may move external data.

    Returns:
        The export, for `finish_export` after the commit.
    """
    target = request.target
    with steps.step("read the module tree"):
        tree, tags = _read_modules(request)
    if request.options.flops:
        with steps.step("count the operations"):
            tree = _count_flops(request, tree)
    exported = _export_baseline(request, tree, stage, steps, label, change_baseline)
    with steps.step("attribute nodes to modules"), pause_collector():
        proto = parse_model(exported.data, target)
        facts = Facts(flatten(proto), tree, exported.baseline.trace)
        attributions = attribute(exported.strategy, facts)
    with steps.step("build the map"), pause_collector():
        records = _make_records(request, tree, exported, proto)
        hierarchy = build_map(facts, tags, attributions, *records)
    with steps.step("write the files"), pause_collector():
        model_file = _write_files(stage, request, exported, hierarchy, label)
    report = _make_report(request, exported, hierarchy, steps)
    if report.report_path is not None:
        page = stage.write(f"{label}report", [markdown_page(report).encode()])
        stage.publish(page, report.report_path.name)
    # The model is placed last, so that no program sees it without the files it refers to.
    stage.publish(model_file, target.name)
    return StagedExport(request, report, _graph_text(request, exported))


def finish_export(staged: StagedExport, steps: Steps) -> ExportReport:
    """Write what is made from the files of an export, once they are in place."""
    request = staged.request
    report = _write_graph_text(staged)
    if request.options.with_view:
        with steps.step("write the page"):
            report = _write_page(report)
    if request.graphml is not None:
        with steps.step("write the GraphML"):
            report = _write_graphml(report, request.graphml, request.options.graphml_parameters)
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
    request: ExportRequest,
    tree: ModuleTree,
    stage: Transaction,
    steps: Steps,
    label: str,
    change_baseline: Callable[[Baseline], Baseline] | None,
) -> _Exported:
    """Let torch write the baseline, with the next attempt where an exporter fails."""
    model, inputs = request.model, request.inputs
    failures: list[tuple[str, Exception]] = []
    for strategy, exporter in request.attempts:
        # Exporters need torch, so that `exporters.py` only names the module that runs each.
        capture = importlib.import_module(exporter.capture)
        path = stage.subfolder(f"{label}{exporter.name}") / request.target.name
        try:
            with steps.step(f"export with torch ({exporter.name})"):
                baseline: Baseline = capture.export(
                    model, tree, inputs, path, request.torch_options
                )
        except MemoryError:
            raise
        except Exception as error:
            # An exporter that is tried for some models only may refuse this one.
            may_refuse = exporter.only_for is not None and len(request.attempts) > 1
            if isinstance(error, ModelExportError) and not may_refuse:
                raise
            # An exporter's error is misleading where the model itself fails on these inputs.
            if not failures and isinstance(model, nn.Module):
                check_model_runs(model, inputs)
            if isinstance(error, OSError) and error.errno is not None:
                raise
            failures.append((exporter.name, error))
        else:
            if change_baseline is not None:
                baseline = change_baseline(baseline)
            reason = explain_failure(failures[0][1]).line if failures else None
            if not request.options.scrub:
                return _Exported(strategy, exporter, reason, baseline, baseline.data)
            # After the kind of its error, torch may quote the model's code.
            reason = None if reason is None else reason.partition(":")[0]
            return _Exported(strategy, exporter, reason, baseline, scrub_bytes(baseline.data))
    raise ExportError(
        "torch cannot export this model" + (" with any exporter" if len(failures) > 1 else ""),
        hint="verbose=True or -v shows what torch printed",
        details=[line for name, error in failures for line in explain_failure(error).lines(name)],
    ) from failures[0][1]


def _make_records(
    request: ExportRequest, tree: ModuleTree, exported: _Exported, proto: onnx.ModelProto
) -> tuple[ModelRecord, ExportRecord]:
    """Describe the model and the export, as the file and the sidecar record them."""
    call, root = request.call, tree[""].qualified_class
    opset = opset_imports(proto).get("ai.onnx", 0)
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
        part=call.part or msgspec.UNSET,
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
    except (ArgumentError, KeyError, TypeError):  # inputs that are nested, or of a type numpy lacks
        return {}
    return {name: record_example(array) for name, array in arrays.items()}


@functools.cache
def _versions() -> dict[str, str]:
    names = ("torch", "onnx", "onnxscript")
    return {"modelexport": __version__} | {name: importlib.metadata.version(name) for name in names}


def _write_files(
    stage: Transaction,
    request: ExportRequest,
    exported: _Exported,
    hierarchy: HierarchyMap,
    label: str,
) -> Path:
    """Place the data files and the sidecar, and write the model for a later step to place."""
    for name, path in sorted(exported.baseline.files.items()):
        stage.publish(path, name)
    sidecar = stage.write(f"{label}sidecar", [hierarchy.sidecar_bytes])
    stage.publish(sidecar, sidecar_path(request.target).name)
    data = exported.data
    chunks = [data] if request.options.clean else tagged_chunks(data, hierarchy)
    return stage.write(f"{label}model", chunks)


def _make_report(
    request: ExportRequest, exported: _Exported, hierarchy: HierarchyMap, steps: Steps
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


def _graph_text(request: ExportRequest, exported: _Exported) -> str | None:
    """Return the exporter's own graph, if a file for it is named and the exporter has one."""
    wanted = exported.exporter.graph_option in graph_files(request.options)
    return exported.baseline.graph_text if wanted else None


def _write_graph_text(staged: StagedExport) -> ExportReport:
    """Write the exporter's own graph, if there is one to write."""
    report = staged.report
    if staged.graph_text is None:
        return report
    option = find_exporter(report.exporter).graph_option
    path = Path(graph_files(staged.request.options)[option])
    write_file(path, staged.graph_text.encode())
    return msgspec.structs.replace(report, graph_path=path)


def _write_page(report: ExportReport) -> ExportReport:
    """Write the page; a failure is in the report, since the model is exported already."""
    try:
        page = view(report.onnx_path, page_path(report.onnx_path))
    except Exception as error:
        return msgspec.structs.replace(report, view_path=None, view_error=_explain(error))
    return msgspec.structs.replace(report, view_path=page.path)


def _write_graphml(report: ExportReport, graphml: Path, parameters: str) -> ExportReport:
    """Write the GraphML; a failure is in the report, since the model is exported already."""
    try:
        files = export_graphml(report.onnx_path, graphml, parameters=parameters)
    except Exception as error:
        return msgspec.structs.replace(report, graphml_error=_explain(error))
    return msgspec.structs.replace(report, graphml_path=files.graphml, graphml_data_path=files.data)


def _explain(error: Exception) -> str:
    if isinstance(error, ModelExportError):
        return error.headline
    return f"{type(error).__name__}: {first_line(error)}"
