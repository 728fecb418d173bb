"""Find the layer that takes the time: a small BERT that predicts masked words.

    python examples/find_the_slow_layer.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)

# Two narrow layers, and the vocabulary of the real model.
config = BertConfig(
    hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2
)
model = BertForMaskedLM(config).eval()
inputs = {"input_ids": torch.randint(0, config.vocab_size, (1, 64))}
modelexport.export_model(model, inputs, folder / "bert.onnx", flops=True)

# Run the graph that ONNX Runtime makes of the file, and add up its times by module.
profile = modelexport.profile(folder / "bert.onnx", runs=10, threads=1)
print(f"bert.onnx: {profile.total_ms:.2f} ms a run, on {profile.inputs}")
slowest = sorted(profile.modules, key=lambda module: module.own_ms, reverse=True)
for module in slowest[:3]:
    share = module.own_ms / profile.kernel_ms
    print(f"  {module.path}: {module.own_ms:.2f} ms, {share:.0%}")

# The layers themselves are fast: most of the time is in the scores of 30,522 words.
layers = [module for module in profile.modules if module.class_.endswith(".BertLayer")]
print(f"  all {len(layers)} layers together {sum(layer.share for layer in layers):.0%}")
