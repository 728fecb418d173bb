"""Write the files of an export, and what is made from them: its page and its GraphML."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modelexport.attribution.strategies import Strategy
from modelexport.capture.trace import Baseline
from modelexport.errors import ModelExportError, first_line
from modelexport.exporters import Exporter
from modelexport.graphml.write import export_graphml
from modelexport.onnx_file import wire
from modelexport.onnx_file.atomic_write import Transaction, write_file
from modelexport.report import ExportReport
from modelexport.request import ExportRequest, graph_files
from modelexport.tagged.hierarchy_map import HierarchyMap, tagged_chunks
from modelexport.tagged.records import sidecar_path
from modelexport.viewing.page import page_path, view


class Exported(msgspec.Struct, frozen=True):
    """The baseline that torch wrote, and how."""

    strategy: Strategy
    exporter: Exporter
    reason: str | None
    """Why an earlier attempt failed."""
    baseline: Baseline
    data: wire.Buffer
    """The bytes of the model, scrubbed if that is wanted."""


def write_files(
    stage: Transaction, request: ExportRequest, exported: Exported, hierarchy: HierarchyMap
) -> Path:
    """Place the data files and the sidecar, and write the model for a later step to place."""
    for name, path in sorted(exported.baseline.files.items()):
        stage.publish(path, name)
    sidecar = stage.write("sidecar", [hierarchy.sidecar_bytes])
    stage.publish(sidecar, sidecar_path(request.target).name)
    data = exported.data
    return stage.write("model", [data] if request.options.clean else tagged_chunks(data, hierarchy))


def write_graph_text(
    report: ExportReport, request: ExportRequest, exported: Exported
) -> ExportReport:
    """Write the exporter's own graph, if a file for it is named and the exporter has one."""
    path = graph_files(request.options).get(exported.exporter.graph_option)
    if path is None or exported.baseline.graph_text is None:
        return report
    write_file(Path(path), exported.baseline.graph_text.encode())
    return msgspec.structs.replace(report, graph_path=Path(path))


def write_page(report: ExportReport) -> ExportReport:
    """Write the page; a failure is in the report, since the model is exported already."""
    try:
        page = view(report.onnx_path, page_path(report.onnx_path))
    except Exception as error:
        return msgspec.structs.replace(report, view_path=None, view_error=_explain(error))
    return msgspec.structs.replace(report, view_path=page.path)


def write_graphml(report: ExportReport, graphml: Path, parameters: str) -> ExportReport:
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
