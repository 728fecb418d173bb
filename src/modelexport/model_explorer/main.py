"""The adapter that Model Explorer loads: an ONNX file, nested as its modules are.

Model Explorer imports this module by its name, `main`. It is not a dependency of modelexport.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelexport.viewing.explorer import read_graphs

try:
    import model_explorer
    from model_explorer import graph_builder
except ImportError as error:
    raise ImportError(
        "modelexport.model_explorer is an extension of Model Explorer, which is not installed: "
        "pip install ai-edge-model-explorer"
    ) from error


class ModelExportAdapter(model_explorer.Adapter):  # type: ignore[misc]  # it has no types
    """Converts tagged ONNX files, and untagged ones beside their sidecar."""

    metadata = model_explorer.AdapterMetadata(
        id="modelexport",
        name="modelexport",
        description="ONNX, nested by the modules of the PyTorch model",
        source_repo="",
        fileExts=["onnx"],
    )

    def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, list[Any]]:
        """Convert a model file.

        Args:
            model_path: The file.
            settings: The settings of the page; none has an effect.

        Returns:
            The graphs of the model, as Model Explorer's own records.
        """
        graphs = msgspec.to_builtins(read_graphs(Path(model_path)).graphs)
        return {"graphs": [graph_builder.Graph(**graph) for graph in graphs]}
