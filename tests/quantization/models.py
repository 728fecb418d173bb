"""Small models for quantization, one of them with a module that is sensitive on purpose."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

import modelexport
from exports import shared_folder

WIDTH = 32
SENSITIVE = "blocks.2"


class Block(nn.Module):
    """A linear layer with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Six blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.head(x)
        return result


class Wide(nn.Module):
    """Values beyond the range of float16 between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x) * 1e6) * 1e-6
        return result


class Mixed(nn.Module):
    """A module that float16 cannot compute, between two that it can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = Block(), Wide(), Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.wide(self.first(x)))
        return result


def stack() -> Stack:
    """Build a stack with an outlier in one weight: int8 has no steps left for the others."""
    torch.manual_seed(3)
    model = Stack().eval()
    with torch.no_grad():
        model.blocks[2].linear.weight[0, 0] = 60.0
    return model


def export_stack(strategy: str = "htp") -> Path:
    """Return the export of the stack, which must not be changed."""

    def fill(target: Path) -> None:
        modelexport.export_model(
            stack(), torch.randn(4, WIDTH), target / "stack.onnx", strategy=strategy
        )

    return shared_folder(f"quantized-stack-{strategy}", fill) / "stack.onnx"


def export_unnamed_stack(folder: Path) -> Path:
    """Write an export of the stack whose nodes have no names."""
    model = onnx.load(export_stack())
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"
