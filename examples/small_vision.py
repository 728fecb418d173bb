"""A small model that is hard to map: fused, reused, shared and unused modules.

modelexport export examples/small_vision.py:make_model vision.onnx
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stem(nn.Module):
    """A convolution and a norm, which exporters fuse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, stride=4)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.conv(image)).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """A block that runs twice with the same parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x + self.dropout(torch.relu(self.mix(self.norm(x)))) * weight
        return x / x.abs().sum(1, keepdim=True)


class Head(nn.Module):
    """A module that runs, one of which only the weight is used, and one that is unused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, 10)
        self.lookup = nn.Linear(width, width)
        self.spare = nn.Linear(width, 2)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x = F.linear(x, self.lookup.weight)  # uses the parameter of a module that does not run
        return self.classes((x * weight).sum(1))


class SmallVision(nn.Module):
    """A stem, a block that runs twice, and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = Stem(width)
        self.block = Block(width)
        self.head = Head(width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        positions = torch.arange(x.shape[1], dtype=x.dtype)
        # The root computes this value; the blocks and the head consume it.
        weight = torch.sigmoid(x.mean(-1) - positions)[:, :, None]
        for _ in range(2):
            x = self.block(x, weight)
        return self.head(x, weight)


def make_model() -> tuple[nn.Module, tuple[Tensor]]:
    """Build the model and its example inputs."""
    torch.manual_seed(0)
    return SmallVision().eval(), (torch.rand(1, 3, 16, 16),)
