"""Cut a module out of a model and run it alone: the encoder of a small T5.

    python examples/cut_out_a_module.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import T5Config, T5Model

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)

config = T5Config(
    vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False
)
model = T5Model(config).eval()
tokens = torch.arange(10).reshape(1, 10)
inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}
modelexport.export_model(model, inputs, folder / "t5.onnx")

# The encoder as a model of its own.
record = modelexport.extract(folder / "t5.onnx", "encoder", folder / "encoder.onnx").record
print(f"encoder.onnx: {record.nodes} nodes")
print(f"  takes {', '.join(value.name for value in record.inputs)}")

session = onnxruntime.InferenceSession(folder / "encoder.onnx")
(hidden,) = session.run(None, {record.inputs[0].name: tokens.numpy()})
with torch.no_grad():
    expected = model.encoder(tokens).last_hidden_state.numpy()
print(f"  against PyTorch's encoder: off by {np.abs(hidden - expected).max():.1e}")

# The whole model in parts, which could run on several machines, one after the other.
print("t5.onnx in parts:")
values = {name: tensor.numpy() for name, tensor in inputs.items()}
for part in modelexport.partition(folder / "t5.onnx"):
    session = onnxruntime.InferenceSession(part.model.SerializeToString())
    results = session.run(None, {info.name: values[info.name] for info in part.record.inputs})
    values.update(zip((info.name for info in part.record.outputs), results, strict=True))
    print(f"  {part.record.module or '(own nodes)'}: {part.record.nodes} nodes")
print(f"  all together: {values['last_hidden_state'].shape}")
