"""Extract the encoder of an encoder-decoder, run it alone, and compare it with PyTorch.

    python examples/ship_the_encoder.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import T5Config, T5Model

import modelexport


def main(folder: Path) -> None:
    """Export a T5, extract its encoder, and partition it."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False
    )
    model = T5Model(config).eval()
    tokens = torch.arange(10).reshape(1, 10)
    modelexport.export_model(
        model, {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}, folder / "t5.onnx"
    )

    record = modelexport.extract(folder / "t5.onnx", "encoder", folder / "encoder.onnx").record
    size, total = file_size(folder, "encoder.onnx"), file_size(folder, "t5.onnx")
    print(f"encoder.onnx: {record.nodes} nodes, {size} of {total} bytes")
    print(f"  takes {', '.join(value.name for value in record.inputs)}")

    session = onnxruntime.InferenceSession(
        folder / "encoder.onnx", providers=["CPUExecutionProvider"]
    )
    (hidden,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    with torch.no_grad():
        expected = model.encoder(tokens).last_hidden_state.numpy()
    print(f"  against PyTorch's encoder: off by {np.abs(hidden - expected).max():.1e}")
    assert np.allclose(hidden, expected, atol=1e-4)

    # Partition the file into models that could run on several machines.
    values = {"input_ids": tokens.numpy(), "decoder_input_ids": tokens[:, :4].numpy()}
    for part in modelexport.partition(folder / "t5.onnx"):
        session = onnxruntime.InferenceSession(
            part.model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        results = session.run(None, {info.name: values[info.name] for info in part.record.inputs})
        values.update(zip((info.name for info in part.record.outputs), results, strict=True))
        print(f"  {part.record.module or '(own nodes)'}: {part.record.nodes} nodes")
    print(f"  all together: {values['last_hidden_state'].shape}")


def file_size(folder: Path, name: str) -> int:
    """Return the size of a model with its data file."""
    return sum(path.stat().st_size for path in folder.glob(f"{name}*"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
