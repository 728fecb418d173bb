"""The public names are those of the contract, and each can be had."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import modelexport

pytestmark = pytest.mark.sanity

PUBLIC = {
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
    "import_onnx",
    "extract",
    "partition",
    "extract_module_subgraph",
    "load",
    "recommend_strategy",
    "register_strategy",
    "strip",
    "validate",
    "verify",
}


def test_public_names() -> None:
    assert set(modelexport.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(modelexport, name) is not None
    assert modelexport.UnifiedExporter is modelexport.HierarchyExporter
    with pytest.raises(AttributeError, match="nothing_like_this"):
        modelexport.nothing_like_this  # noqa: B018


@pytest.mark.regression
def test_dir_lists_the_public_names() -> None:
    """In a new process, where nothing was used yet."""
    code = "import modelexport; print(*dir(modelexport))"
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(listed) >= PUBLIC | {"__version__"}


def test_strategies_are_values_and_strings() -> None:
    assert [strategy.value for strategy in modelexport.ExportStrategy] == [
        "auto",
        "usage_based",
        "htp",
        "fx",
    ]
    assert modelexport.ExportStrategy.HTP == "htp"


def test_signature_of_export_model() -> None:
    names = list(inspect.signature(modelexport.export_model).parameters)
    assert names[:6] == [
        "model",
        "example_inputs",
        "output_path",
        "strategy",
        "optimize",
        "verbose",
    ]
    assert {
        "exporter",
        "opset_version",
        "input_names",
        "output_names",
        "dynamic_shapes",
        "torch_nn_exceptions",
        "include",
        "exclude",
        "max_depth",
        "clean",
        "with_report",
        "temp_dir",
        "external_data",
    } <= set(names)
