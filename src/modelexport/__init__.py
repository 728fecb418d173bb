"""Export any PyTorch model to ONNX with every node mapped to the nn.Module that made it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelexport.errors import ExtractionWarning, FallbackWarning, ModelExportError

if TYPE_CHECKING:
    from modelexport.analysis.analyze import analyze
    from modelexport.analysis.compare import compare
    from modelexport.analysis.subgraph import extract_module_subgraph
    from modelexport.analysis.validate import validate
    from modelexport.attribution.strategies import ExportStrategy, Strategy, register_strategy
    from modelexport.batch.results import JobResult
    from modelexport.batch.run import export_batch
    from modelexport.extraction.extract import extract
    from modelexport.extraction.partition import partition
    from modelexport.graphml.import_onnx import import_onnx
    from modelexport.graphml.write import export_graphml
    from modelexport.pipeline import HierarchyExporter, export_model, recommend_strategy
    from modelexport.pipeline import HierarchyExporter as UnifiedExporter
    from modelexport.report import ExportReport
    from modelexport.tagged.model import TaggedModel, load
    from modelexport.tagged.strip import strip
    from modelexport.verification.verify import verify

__version__ = "0.1.0"

_HOMES = {
    "analyze": ("modelexport.analysis.analyze", "analyze"),
    "compare": ("modelexport.analysis.compare", "compare"),
    "extract_module_subgraph": ("modelexport.analysis.subgraph", "extract_module_subgraph"),
    "validate": ("modelexport.analysis.validate", "validate"),
    "JobResult": ("modelexport.batch.results", "JobResult"),
    "export_batch": ("modelexport.batch.run", "export_batch"),
    "export_graphml": ("modelexport.graphml.write", "export_graphml"),
    "import_onnx": ("modelexport.graphml.import_onnx", "import_onnx"),
    "verify": ("modelexport.verification.verify", "verify"),
    "extract": ("modelexport.extraction.extract", "extract"),
    "partition": ("modelexport.extraction.partition", "partition"),
    "ExportStrategy": ("modelexport.attribution.strategies", "ExportStrategy"),
    "Strategy": ("modelexport.attribution.strategies", "Strategy"),
    "register_strategy": ("modelexport.attribution.strategies", "register_strategy"),
    "HierarchyExporter": ("modelexport.pipeline", "HierarchyExporter"),
    "UnifiedExporter": ("modelexport.pipeline", "HierarchyExporter"),
    "export_model": ("modelexport.pipeline", "export_model"),
    "recommend_strategy": ("modelexport.pipeline", "recommend_strategy"),
    "ExportReport": ("modelexport.report", "ExportReport"),
    "TaggedModel": ("modelexport.tagged.model", "TaggedModel"),
    "load": ("modelexport.tagged.model", "load"),
    "strip": ("modelexport.tagged.strip", "strip"),
}

__all__ = [
    "ExportReport",
    "ExportStrategy",
    "ExtractionWarning",
    "FallbackWarning",
    "HierarchyExporter",
    "JobResult",
    "ModelExportError",
    "Strategy",
    "TaggedModel",
    "UnifiedExporter",
    "analyze",
    "compare",
    "export_batch",
    "export_graphml",
    "export_model",
    "extract",
    "extract_module_subgraph",
    "import_onnx",
    "load",
    "partition",
    "recommend_strategy",
    "register_strategy",
    "strip",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, so that importing the package stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'modelexport' has no attribute {name!r}")
    home, attribute = _HOMES[name]
    return getattr(importlib.import_module(home), attribute)


def __dir__() -> list[str]:
    """List the public names too, before their first use."""
    return sorted({*globals(), *__all__})
