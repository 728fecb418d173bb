"""Take the pictures of the page in the guides: export, profile, write the page, open it.

Needs Chromium and Node.js; `make pictures` runs it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from transformers import BertConfig, BertModel

import modelexport

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from viewing.browser import PICTURE, Browser  # noqa: E402

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1400, "height": 800}
OPEN = "#open=m:encoder.layer.0.attention.self&select=m:encoder.layer.0.attention.self"


def build(folder: Path) -> Path:
    """Export a BERT with twelve layers, measure it, and write its page."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=30522
    )
    model = BertModel(config).eval()
    inputs = {
        "input_ids": torch.randint(0, 30522, (1, 64)),
        "attention_mask": torch.ones(1, 64, dtype=torch.long),
    }
    path = folder / "bert.onnx"
    modelexport.export_model(model, inputs, path)
    times = folder / "times.json"
    times.write_bytes(msgspec.json.encode(modelexport.profile(path)))
    return modelexport.view(path, overlays=[times]).path


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        page = build(Path(name))
        browser.open(page, OPEN, **SIZE)
        browser.evaluate(f"{PICTURE.format(pane=0)}.pan(0, 130)")
        browser.screenshot("view", IMAGES)
        print(f"wrote {IMAGES / 'view.png'}")


if __name__ == "__main__":
    main()
