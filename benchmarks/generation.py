"""Compare `export_generation` with transformers' own exporter, each in its own process."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.table import Row, format_size, ratio_row

ROUNDS = 3
AIM_OF_TIME = 1.05
AIM_OF_MEMORY = 1.1
_MODEL = "a Llama of 125 million parameters"
_PEER = "transformers"


class Cost(NamedTuple):
    """What one export takes: seconds of the processor, bytes of memory and bytes on disk."""

    seconds: float
    memory: int
    disk: int


def build() -> tuple[Any, dict[str, Any]]:
    """Build a language model with random weights, and its prompt."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32_000,
        max_position_embeddings=1024,
    )
    prompt = {"input_ids": torch.randint(3, 32_000, (1, 8))}
    return transformers.LlamaForCausalLM(config).eval(), prompt


def export_plain(model: Any, prompt: dict[str, Any], folder: Path) -> None:
    """Export with transformers alone, on the inputs that modelexport chooses."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    from modelexport.generation.export import widen_inputs
    from modelexport.generation.parts import greedy_generation

    with greedy_generation(model) as config:
        programs = OnnxExporter().export_for_generation(
            model,
            widen_inputs(prompt),
            OnnxConfig(dynamic=True),
            generation_config=config,
            multi_token_decode=True,
        )
        for name, program in programs.items():
            program.save(f"{folder}/{name}.onnx", external_data=True)


def export_ours(model: Any, prompt: dict[str, Any], folder: Path) -> None:
    """Export with modelexport."""
    import modelexport

    modelexport.export_generation(model, prompt, folder / "m")


EXPORTS = {"plain": export_plain, "ours": export_ours}


def export_once(kind: str) -> None:
    """Child process: export once, and print what it took."""
    model, prompt = build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.process_time()
        EXPORTS[kind](model, prompt, folder)
        seconds = time.process_time() - start
        disk = sum(path.stat().st_size for path in folder.iterdir())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(msgspec.json.encode(Cost(seconds, memory, disk)).decode())


def measure(kind: str) -> Cost:
    """Export in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.generation", kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Cost)


def rows() -> Iterator[Row]:
    """Measure in turn, and yield the rows of the table."""
    costs: dict[str, list[Cost]] = {kind: [] for kind in EXPORTS}
    for _ in range(ROUNDS):
        for kind, measured in costs.items():
            measured.append(measure(kind))
    seconds, memory, disk = (
        [[getattr(cost, field) for cost in costs[kind]] for kind in EXPORTS]
        for field in Cost._fields
    )
    what = f"export {_MODEL} in parts"
    yield ratio_row(f"{what}, processor time", _PEER, *seconds, AIM_OF_TIME)
    yield ratio_row(f"{what}, peak memory", _PEER, *memory, AIM_OF_MEMORY, format_size)
    yield ratio_row(f"{what}, all files", _PEER, *disk, None, format_size)


if __name__ == "__main__":
    export_once(sys.argv[1])
