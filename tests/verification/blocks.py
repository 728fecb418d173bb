"""Models with an operation of their own between two children."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OwnWork(nn.Module):
    """Has an operation of its own between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = OwnWork(), OwnWork()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))
