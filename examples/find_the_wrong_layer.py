"""Find the layer that a conversion changes most: a small BERT in int8, optimised, and float16.

    python examples/find_the_wrong_layer.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import logging
import sys
import tempfile
from pathlib import Path

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from transformers import BertConfig, BertModel

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
logging.disable(logging.WARNING)  # the quantizer recommends a preprocessing that renames values
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
original = folder / "bert.onnx"
modelexport.export_model(model, inputs, original)
assert modelexport.verify(model, inputs, original).agrees

# Three conversions by other tools. In the optimised file most values have other names, or none.
quantize_dynamic(str(original), str(folder / "int8.onnx"), weight_type=QuantType.QInt8)

options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # it warns that the file suits this machine only
options.optimized_model_filepath = str(folder / "optimized-int8.onnx")
onnxruntime.InferenceSession(folder / "int8.onnx", options, providers=["CPUExecutionProvider"])

half = convert_float_to_float16(onnx.load(original), keep_io_types=True)
onnx.save(half, folder / "float16.onnx")

# Carry the map over to each file, and compare every module with PyTorch.
for name in ("int8.onnx", "optimized-int8.onnx", "float16.onnx"):
    tagged = folder / f"tagged-{name}"
    modelexport.retag(original, folder / name, tagged)
    result = modelexport.verify(model, inputs, tagged, atol=1e-2, rtol=1e-2)
    print(f"{name}: {'agrees' if result.agrees else f'differs first in {result.first}'}")
    modules = {record.module: record for record in result.modules}
    for cause in result.causes[:3]:
        print(f"  {cause}: off by {modules[cause].own_abs:.3f} on PyTorch's own inputs")
