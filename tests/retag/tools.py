"""The tools that people put a model through, each as a function (source, target, inputs)."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import version_converter

Inputs = Mapping[str, np.ndarray]
Tool = Callable[[Path, Path, Inputs], None]


def runtime_level(name: str) -> Tool:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, name)
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return run


def transformers_optimizer(level: int) -> Tool:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        from onnxruntime.transformers.optimizer import optimize_model

        model = optimize_model(str(source), "bert", num_heads=2, hidden_size=16, opt_level=level)
        model.save_model_to_file(str(target))

    return run


def onnxsim(source: Path, target: Path, inputs: Inputs) -> None:
    import onnxsim

    onnx.save(onnxsim.simplify(onnx.load(source))[0], target)


def onnxslim(source: Path, target: Path, inputs: Inputs) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), target)


def onnxscript_optimizer(source: Path, target: Path, inputs: Inputs) -> None:
    import onnxscript.optimizer

    onnx.save(onnxscript.optimizer.optimize(onnx.load(source)), target)


def float16(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def version_conversion(source: Path, target: Path, inputs: Inputs) -> None:
    model = onnx.load(source)
    version = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    onnx.save(version_converter.convert_version(model, version + 1), target)


def renamed(source: Path, target: Path, inputs: Inputs) -> None:
    onnx.save(hide_names(onnx.load(source)), target)


def quantize_dynamic(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime import quantization

    quantization.quantize_dynamic(str(source), str(target))


def quantize_static(style: str) -> Tool:
    def run(source: Path, target: Path, inputs: Inputs) -> None:
        from onnxruntime import quantization

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.rest = [dict(inputs)]

            def get_next(self) -> Any:
                return self.rest.pop() if self.rest else None

        quantization.quantize_static(
            str(source), str(target), Reader(), getattr(quantization.QuantFormat, style)
        )

    return run


def int4(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


FLOAT_TOOLS: dict[str, Tool] = {
    "ort-basic": runtime_level("ORT_ENABLE_BASIC"),
    "ort-extended": runtime_level("ORT_ENABLE_EXTENDED"),
    "ort-all": runtime_level("ORT_ENABLE_ALL"),
    "transformers-0": transformers_optimizer(0),
    "transformers-1": transformers_optimizer(1),
    "onnxsim": onnxsim,
    "onnxslim": onnxslim,
    "onnxscript": onnxscript_optimizer,
    "float16": float16,
    "version": version_conversion,
    "renamed": renamed,
}
INT_TOOLS: dict[str, Tool] = {
    "int8-dynamic": quantize_dynamic,
    "int8-qdq": quantize_static("QDQ"),
    "int8-qoperator": quantize_static("QOperator"),
    "int4": int4,
}
TOOLS = {**FLOAT_TOOLS, **INT_TOOLS}


def apply(name: str, source: Path, target: Path, inputs: Inputs) -> bool:
    """Run a tool without its output; return whether it wrote a file."""
    target.unlink(missing_ok=True)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    quiet, wrote = io.StringIO(), False
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            warnings.simplefilter("ignore")
            # Each of these tools rejects some valid models, with errors of many kinds.
            with contextlib.suppress(Exception):
                TOOLS[name](source, target, inputs)
                wrote = target.exists()
            gc.collect()  # some leave a TemporaryDirectory to the collector, which warns
    finally:
        logging.disable(disabled)
    return wrote


def hide_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give every value another name, and remove the names and doc_strings of nodes."""
    count = 0

    def rename_graph(graph: onnx.GraphProto, outer: Mapping[str, str]) -> None:
        names = dict(outer)

        def rename(name: str) -> str:
            nonlocal count
            if name and name not in names:
                count += 1
                names[name] = f"v{count}"
            return names.get(name, name)

        for named in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            named.name = rename(named.name)
        for node in graph.node:
            node.name = node.doc_string = ""
            del node.metadata_props[:]
            node.input[:] = [rename(name) for name in node.input]
            node.output[:] = [rename(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename_graph(attribute.g, names)
                for inner in attribute.graphs:
                    rename_graph(inner, names)

    rename_graph(model.graph, {})
    del model.metadata_props[:]
    return model
