"""Generate text with a language model in ONNX Runtime, and compare it with PyTorch: a tiny Llama.

    python examples/generate_text.py [FOLDER]

Needs the extras `hf` and `runtime`, and no network: the model has random weights.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import modelexport

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)

# The tokenizer of the demo, which is in the package, and a model with as many words.
tokenizer = AutoTokenizer.from_pretrained(str(files("modelexport.cli") / "demo_model"))
tokenizer.save_pretrained(folder / "tokenizer")
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=tokenizer.cls_token_id,
    eos_token_id=tokenizer.sep_token_id,
)
model = LlamaForCausalLM(config).eval()

# One file for the prompt, which fills the cache, and one for each further token, which extends it.
prompt = "every node"
example = {"input_ids": tokenizer(prompt, return_tensors="pt")["input_ids"]}
report = modelexport.export_generation(
    model, example, folder / "llama", tokenizer=folder / "tokenizer"
)
for name, part in report.parts.items():
    print(f"{name}: {part.nodes} nodes, {part.coverage:.0%} with a module")

# The lengths in the files are symbolic, so a longer text than that of the export will do.
text = "every node of this graph belongs to a module"
result = modelexport.generate(report.generation_path, text, max_new_tokens=8)
print(f"{len(result.tokens)} tokens in ONNX Runtime: {result.text}")

tokens = tokenizer(text, return_tensors="pt")["input_ids"]
expected = model.generate(
    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False
)
is_same = list(result.tokens) == expected[0, tokens.shape[1] :].tolist()
print(f"PyTorch generates {'the same' if is_same else 'other tokens'}")
