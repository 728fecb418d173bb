"""Find the layer that a conversion changes most: a small BERT in int8, optimised, and float16.

    python examples/which_layer_hurts.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from transformers import BertConfig, BertModel

import modelexport


def optimize(source: Path, target: Path) -> None:
    """Save the graph that ONNX Runtime runs: most values have other names there, or none."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the file suits this machine only
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def main(folder: Path) -> None:
    """Export a BERT, convert it, and compare each module with PyTorch."""
    warnings.simplefilter("ignore")
    # The quantizer recommends a preprocessing that renames values.
    logging.getLogger().setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = BertModel(config).eval()
    with torch.no_grad():  # an outlier, which one scale for a whole int8 tensor represents badly
        model.encoder.layer[1].output.dense.weight[0, 0] = 30.0
    inputs = {
        "input_ids": torch.arange(12).reshape(1, 12),
        "attention_mask": torch.ones(1, 12, dtype=torch.int64),
    }

    path = folder / "bert.onnx"
    modelexport.export_model(model, inputs, path)
    assert modelexport.verify(model, inputs, path).agrees

    quantize_dynamic(str(path), str(folder / "int8.onnx"), weight_type=QuantType.QInt8)
    optimize(folder / "int8.onnx", folder / "optimized-int8.onnx")
    onnx.save(
        convert_float_to_float16(onnx.load(path), keep_io_types=True), folder / "float16.onnx"
    )

    for name in ("int8.onnx", "optimized-int8.onnx", "float16.onnx"):
        tagged = folder / f"tagged-{name}"
        modelexport.retag(path, folder / name, tagged)
        result = modelexport.verify(model, inputs, tagged, atol=1e-2, rtol=1e-2)
        print(f"{name}: {'agrees' if result.agrees else f'differs first in {result.first}'}")
        modules = {record.module: record for record in result.modules}
        for cause in result.causes[:3]:
            print(f"  {cause}: off by {modules[cause].own_abs:.3f} on PyTorch's own inputs")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
