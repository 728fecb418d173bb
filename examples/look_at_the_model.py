"""Write a page that shows a model as nested modules, coloured by time and size: a small ResNet.

    python examples/look_at_the_model.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)

config = ResNetConfig(
    embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config).eval()
inputs = {"pixel_values": torch.rand(1, 3, 64, 64)}
modelexport.export_model(model, inputs, folder / "resnet.onnx", flops=True)

# What the page can show in colours: the time of each module, its bytes and its operations.
times = modelexport.profile(folder / "resnet.onnx", runs=10, threads=1)
sizes = modelexport.analyze(folder / "resnet.onnx")

page = modelexport.view(folder / "resnet.onnx", overlays=[times, sizes])
print(f"{page.nodes} nodes in {page.modules} modules, {page.size // 1024} KiB")
print(f"open {page.path} in a browser")

# Two files side by side: the export without torch's optimiser, and the one above.
modelexport.export_model(model, inputs, folder / "plain.onnx", optimize=False)
both = modelexport.view(folder / "plain.onnx", folder / "both.html", other=folder / "resnet.onnx")
print(f"open {both.path} to see what the optimiser changes")
