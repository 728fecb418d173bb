"""Quantize a model to int8 within a limit for the error: a small GPT-2.

    python examples/quantize_safely.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import logging
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2Model

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
logging.disable(logging.WARNING)  # the quantizer recommends a preprocessing
torch.manual_seed(0)

config = GPT2Config(vocab_size=200, n_embd=64, n_layer=4, n_head=4, use_cache=False)
model = GPT2Model(config).eval()
with torch.no_grad():  # an outlier, as trained models have them: one scale for a tensor is coarse
    model.h[2].mlp.c_proj.weight[0, 0] = 30.0
inputs = {"input_ids": torch.arange(24).reshape(1, 24)}
modelexport.export_model(model, inputs, folder / "gpt2.onnx")

# What does int8 cost, and where?
sensitivity = modelexport.measure_sensitivity(folder / "gpt2.onnx", depth=3)
print(f"all in int8: relative error {sensitivity.whole.size:.3f}")
for module in sensitivity.modules[:3]:
    print(f"  {module.module}: {module.size:.4f} alone")

# Keep in float what the limit requires, and nothing else.
report = modelexport.quantize(folder / "gpt2.onnx", folder / "int8.onnx", max_error=0.03, depth=3)
print(f"int8.onnx: relative error {report.error.relative:.4f}, in float:")
for kept in report.kept:
    print(f"  {kept.module}")
print(f"  {report.bytes_after / report.bytes_before:.0%} of the bytes")

# The file has a map, so each module can be compared with PyTorch.
result = modelexport.verify(model, inputs, folder / "int8.onnx", atol=0.1, rtol=0.1)
print(f"against PyTorch: {'agrees' if result.agrees else f'differs in {result.causes}'}")
