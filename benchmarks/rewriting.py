"""Tools that rewrite an ONNX file, after which the map should still be readable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.shape_inference
import onnx.utils
import onnx.version_converter
import onnxruntime
import onnxscript.optimizer
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

import modelexport

MODULE = "encoder"


def save(source: Path, target: Path) -> None:
    """Load and save the file."""
    onnx.save(onnx.load(source), target)


def infer_shapes(source: Path, target: Path) -> None:
    """Infer shapes."""
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(source)), target)


def extract_model(source: Path, target: Path) -> None:
    """Extract one module by the names of its inputs and outputs."""
    record = modelexport.extract(source, MODULE).record
    ends = [value.name for value in record.inputs], [value.name for value in record.outputs]
    onnx.utils.extract_model(str(source), str(target), *ends)


def convert_version(source: Path, target: Path) -> None:
    """Convert to the next opset."""
    model = onnx.load(source)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    onnx.save(onnx.version_converter.convert_version(model, opset + 1), target)


def optimize(source: Path, target: Path) -> None:
    """Optimize with onnxscript."""
    onnx.save(onnxscript.optimizer.optimize(onnx.load(source)), target)


def optimize_basic(source: Path, target: Path) -> None:
    """Optimize with ONNX Runtime, basic level."""
    _optimize_with_runtime(source, target, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)


def optimize_all(source: Path, target: Path) -> None:
    """Optimize with ONNX Runtime, all levels."""
    _optimize_with_runtime(source, target, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def _optimize_with_runtime(
    source: Path, target: Path, level: onnxruntime.GraphOptimizationLevel
) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def quantize(source: Path, target: Path) -> None:
    """Quantize to int8."""
    quantize_dynamic(str(source), str(target))


def convert_to_float16(source: Path, target: Path) -> None:
    """Convert to float16."""
    onnx.save(convert_float_to_float16(onnx.load(source)), target)


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    "onnx.load and onnx.save": save,
    "onnx.shape_inference": infer_shapes,
    "onnx.utils.extract_model of the encoder": extract_model,
    "onnx.version_converter, one opset up": convert_version,
    "onnxscript.optimizer": optimize,
    "ONNX Runtime's optimised file, basic": optimize_basic,
    "ONNX Runtime's optimised file, all": optimize_all,
    "ONNX Runtime's quantize_dynamic": quantize,
    "ONNX Runtime's float16": convert_to_float16,
}
