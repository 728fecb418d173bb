"""Export any PyTorch model to ONNX with every node mapped to the nn.Module that made it.

Everything that a caller can pass, receive or catch is importable from here. A name is imported from
its home on first use, so that importing the package stays light and reading never needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelexport.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExportError,
    ExtractionWarning,
    FallbackWarning,
    FileError,
    FormatError,
    GraphmlWarning,
    MissingPackageError,
    ModelExportError,
    ModelRunError,
    NotDescendedError,
    SourceError,
    UnknownOptionError,
    ViewWarning,
)

if TYPE_CHECKING:
    from modelexport.analysis.analyze import (
        Analysis,
        DataFile,
        FileFacts,
        ModuleFacts,
        NodeFacts,
        Totals,
        analyze,
    )
    from modelexport.analysis.compare import (
        Comparison,
        FileSummary,
        ModuleChange,
        NodeChange,
        TagChanges,
        WeightChanges,
        compare,
    )
    from modelexport.analysis.findings import Finding
    from modelexport.analysis.subgraph import ModuleSubgraph, extract_module_subgraph
    from modelexport.analysis.validate import Repair, Validation, validate
    from modelexport.attribution.evidence import Evidence, Facts
    from modelexport.attribution.strategies import (
        AGREEMENT,
        DATAFLOW,
        FULL_CHAIN,
        PARAMETER,
        PARAMETER_IN_USE,
        ROOT,
        SCOPE,
        ExportStrategy,
        Strategy,
        register_strategy,
    )
    from modelexport.batch.jobs import BatchJob
    from modelexport.batch.results import JobResult
    from modelexport.batch.run import export_batch
    from modelexport.capture.trace import Call, CallLog, Site, Trace
    from modelexport.extraction.extract import ExtractableModule, Extraction, extract, list_modules
    from modelexport.extraction.partition import partition
    from modelexport.generation.export import export_generation
    from modelexport.generation.records import (
        GenerationFile,
        GenerationInput,
        GenerationPart,
        InputRole,
        TokenIds,
    )
    from modelexport.generation.run import Generation, generate
    from modelexport.graph.flat import FlatSubgraph, Graph, Node
    from modelexport.graphml.import_onnx import Imported, import_onnx
    from modelexport.graphml.write import GraphmlFiles, export_graphml
    from modelexport.keywords import ExporterKeywords, ModelKeywords, SourceKeywords
    from modelexport.modules.record import Attribution, Method, ModuleRecord, NodeTag
    from modelexport.modules.tree import ModuleInfo, ModuleTree
    from modelexport.options import CallOptions, ExportOptions, SourceOptions
    from modelexport.pipeline import HierarchyExporter, export_model, recommend_strategy
    from modelexport.pipeline import HierarchyExporter as UnifiedExporter
    from modelexport.profiling.profile import (
        ModuleDifference,
        ModuleTime,
        Profile,
        ProfileComparison,
        compare_profiles,
        profile,
    )
    from modelexport.quantization.annotations import LayerAnnotations, annotate_layers
    from modelexport.quantization.budget import KeptModule
    from modelexport.quantization.quantize import QuantizeReport, quantize
    from modelexport.quantization.results import ModuleSensitivity, Sensitivity
    from modelexport.quantization.samples import OutputError
    from modelexport.quantization.select import select
    from modelexport.quantization.sensitivity import measure_sensitivity
    from modelexport.report import ExportReport
    from modelexport.retagging.retag import RetagReport, retag
    from modelexport.source_export import export_source
    from modelexport.tagged.model import MapInEffect, TaggedModel, load
    from modelexport.tagged.records import (
        EmbeddedMap,
        ExampleInput,
        ExportRecord,
        ExtractionRecord,
        ModelRecord,
        NodeRecord,
        RetagRecord,
        Sidecar,
        Statistics,
        TensorInfo,
        TensorRecord,
    )
    from modelexport.tagged.strip import strip
    from modelexport.verification.records import (
        Blame,
        ModuleParity,
        Outcome,
        TensorParity,
        Verification,
    )
    from modelexport.verification.verify import verify
    from modelexport.viewing.functions import FunctionsReport, from_functions, to_functions
    from modelexport.viewing.page import View, view

__version__ = "0.2.0"

_HOMES = {
    "analysis.analyze": "Analysis DataFile FileFacts ModuleFacts NodeFacts Totals analyze",
    "analysis.compare": (
        "Comparison FileSummary ModuleChange NodeChange TagChanges WeightChanges compare"
    ),
    "analysis.findings": "Finding",
    "analysis.subgraph": "ModuleSubgraph extract_module_subgraph",
    "analysis.validate": "Repair Validation validate",
    "attribution.evidence": "Evidence Facts",
    "attribution.strategies": (
        "AGREEMENT DATAFLOW FULL_CHAIN PARAMETER PARAMETER_IN_USE ROOT SCOPE "
        "ExportStrategy Strategy register_strategy"
    ),
    "batch.jobs": "BatchJob",
    "batch.results": "JobResult",
    "batch.run": "export_batch",
    "capture.trace": "Call CallLog Site Trace",
    "extraction.extract": "ExtractableModule Extraction extract list_modules",
    "extraction.partition": "partition",
    "generation.export": "export_generation",
    "generation.records": "GenerationFile GenerationInput GenerationPart InputRole TokenIds",
    "generation.run": "Generation generate",
    "graph.flat": "FlatSubgraph Graph Node",
    "graphml.import_onnx": "Imported import_onnx",
    "graphml.write": "GraphmlFiles export_graphml",
    "keywords": "ExporterKeywords ModelKeywords SourceKeywords",
    "modules.record": "Attribution Method ModuleRecord NodeTag",
    "modules.tree": "ModuleInfo ModuleTree",
    "options": "CallOptions ExportOptions SourceOptions",
    "pipeline": (
        "HierarchyExporter UnifiedExporter=HierarchyExporter export_model recommend_strategy"
    ),
    "profiling.profile": (
        "ModuleDifference ModuleTime Profile ProfileComparison compare_profiles profile"
    ),
    "quantization.budget": "KeptModule",
    "quantization.annotations": "LayerAnnotations annotate_layers",
    "quantization.quantize": "QuantizeReport quantize",
    "quantization.results": "ModuleSensitivity Sensitivity",
    "quantization.samples": "OutputError",
    "quantization.select": "select",
    "quantization.sensitivity": "measure_sensitivity",
    "report": "ExportReport",
    "retagging.retag": "RetagReport retag",
    "source_export": "export_source",
    "tagged.model": "MapInEffect TaggedModel load",
    "tagged.records": (
        "EmbeddedMap ExampleInput ExportRecord ExtractionRecord ModelRecord NodeRecord "
        "RetagRecord Sidecar Statistics TensorInfo TensorRecord"
    ),
    "tagged.strip": "strip",
    "verification.records": "Blame ModuleParity Outcome TensorParity Verification",
    "verification.verify": "verify",
    "viewing.functions": "FunctionsReport from_functions to_functions",
    "viewing.page": "View view",
}
"""The public names by the module that defines them; `new=old` where the module has another name."""

__all__ = [
    "AGREEMENT",
    "DATAFLOW",
    "FULL_CHAIN",
    "PARAMETER",
    "PARAMETER_IN_USE",
    "ROOT",
    "SCOPE",
    "Analysis",
    "ArgumentError",
    "ArgumentTypeError",
    "Attribution",
    "BatchJob",
    "Blame",
    "Call",
    "CallLog",
    "CallOptions",
    "Comparison",
    "DataFile",
    "EmbeddedMap",
    "Evidence",
    "ExampleInput",
    "ExportError",
    "ExportOptions",
    "ExportRecord",
    "ExportReport",
    "ExportStrategy",
    "ExporterKeywords",
    "ExtractableModule",
    "Extraction",
    "ExtractionRecord",
    "ExtractionWarning",
    "Facts",
    "FallbackWarning",
    "FileError",
    "FileFacts",
    "FileSummary",
    "Finding",
    "FlatSubgraph",
    "FormatError",
    "FunctionsReport",
    "Generation",
    "GenerationFile",
    "GenerationInput",
    "GenerationPart",
    "Graph",
    "GraphmlFiles",
    "GraphmlWarning",
    "HierarchyExporter",
    "Imported",
    "InputRole",
    "JobResult",
    "KeptModule",
    "LayerAnnotations",
    "MapInEffect",
    "Method",
    "MissingPackageError",
    "ModelExportError",
    "ModelKeywords",
    "ModelRecord",
    "ModelRunError",
    "ModuleChange",
    "ModuleDifference",
    "ModuleFacts",
    "ModuleInfo",
    "ModuleParity",
    "ModuleRecord",
    "ModuleSensitivity",
    "ModuleSubgraph",
    "ModuleTime",
    "ModuleTree",
    "Node",
    "NodeChange",
    "NodeFacts",
    "NodeRecord",
    "NodeTag",
    "NotDescendedError",
    "Outcome",
    "OutputError",
    "Profile",
    "ProfileComparison",
    "QuantizeReport",
    "Repair",
    "RetagRecord",
    "RetagReport",
    "Sensitivity",
    "Sidecar",
    "Site",
    "SourceError",
    "SourceKeywords",
    "SourceOptions",
    "Statistics",
    "Strategy",
    "TagChanges",
    "TaggedModel",
    "TensorInfo",
    "TensorParity",
    "TensorRecord",
    "TokenIds",
    "Totals",
    "Trace",
    "UnifiedExporter",
    "UnknownOptionError",
    "Validation",
    "Verification",
    "View",
    "ViewWarning",
    "WeightChanges",
    "analyze",
    "annotate_layers",
    "compare",
    "compare_profiles",
    "export_batch",
    "export_generation",
    "export_graphml",
    "export_model",
    "export_source",
    "extract",
    "extract_module_subgraph",
    "from_functions",
    "generate",
    "import_onnx",
    "list_modules",
    "load",
    "measure_sensitivity",
    "partition",
    "profile",
    "quantize",
    "recommend_strategy",
    "register_strategy",
    "retag",
    "select",
    "strip",
    "to_functions",
    "validate",
    "verify",
    "view",
]


_SOURCES = {
    public: (f"modelexport.{home}", name or public)
    for home, names in _HOMES.items()
    for public, _, name in (entry.partition("=") for entry in names.split())
}
_NEED_TORCH = {
    "modelexport.pipeline",
    "modelexport.generation.export",
    "modelexport.verification.verify",
}
"""The homes that import torch, which the extra `export` installs."""


if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        """Import a public name from its home on first use.

        Raises:
            MissingPackageError: It needs torch, which is not installed.
        """
        if name not in _SOURCES:
            raise AttributeError(f"module 'modelexport' has no attribute {name!r}")
        home, attribute = _SOURCES[name]
        if home in _NEED_TORCH:
            from modelexport.packages import import_package

            import_package("torch")
        return getattr(importlib.import_module(home), attribute)


def __dir__() -> list[str]:
    """List the public names too, before their first use."""
    return sorted({*globals(), *__all__})
